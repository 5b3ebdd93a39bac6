"""Reader of Dockerfiles: a text becomes stages of instructions, or one error that names the line.

What is not done, or not done as the reference says, is refused here, before anything starts. Variables are expanded
later, since the image below has some of them.

Source: the Dockerfile reference (docs.docker.com/reference/dockerfile), "Parser directives", "Format" and
"Here-Documents".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sandkasten.building.words import split

MAX_BYTES = 1024 * 1024
"""Bytes of a Dockerfile."""
MAX_INSTRUCTIONS = 10_000
_SHOWN = 100
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.*?)\s*\Z")
_SYNTAX = re.compile(r"(?:docker\.io/)?docker/dockerfile(?::[\w.-]+)?\Z")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(.*))?\Z", re.DOTALL)
_HEREDOC = re.compile(r"(?:^|(?<=\s))[0-9]*<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2(?=\s|\Z)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_STAGE = re.compile(r"[a-z][a-z0-9_.-]*\Z")
_MODE = re.compile(r"0?[0-7]{3}\Z")
_FLAGS = {"COPY": ("from", "chown", "chmod")}
_REFUSED = {
    "ADD": "use COPY for files, and RUN for what is loaded or unpacked",
    "HEALTHCHECK": "nothing here asks a session for its health",
    "MAINTAINER": "use LABEL maintainer=…",
    "ONBUILD": "no build begins with triggers of another",
    "STOPSIGNAL": "a session ends by its own rules",
    "VOLUME": "a session has no volumes; leave the line out, and the files stay in the image",
}
SEVERAL = "the destination of several sources ends with /"
_EXEC = ("RUN", "CMD", "ENTRYPOINT", "SHELL")
_KNOWN = ("FROM", "ARG", "COPY", "ENV", "LABEL", "USER", "WORKDIR", "EXPOSE", *_EXEC)


class BuildError(Exception):
    """A Dockerfile that can't be built, or a build that has failed; the text says where and why."""


@dataclass(frozen=True)
class Document:
    """A here-document; `is_literal`: its variables are not expanded."""

    name: str
    content: str
    is_literal: bool


@dataclass(frozen=True)
class DockerInstruction:
    """One instruction, `shown` as the beginning of its line. `text` is what stands behind name and flags, `words` are
    those of it, with quotes and variables as written, of COPY without its here-documents; of the exec form they are its
    strings. `pairs` are of ENV, LABEL
    and ARG; an ARG may have no value."""

    line: int
    name: str
    text: str
    flags: dict[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    is_exec: bool = False
    pairs: Sequence[tuple[str, str | None]] = ()
    documents: Sequence[Document] = ()
    shown: str = ""


@dataclass(frozen=True)
class Stage:
    """A FROM with what follows it; `name` is empty for a stage without one."""

    start: DockerInstruction
    image: str
    name: str
    steps: Sequence[DockerInstruction]


@dataclass(frozen=True)
class Dockerfile:
    """A whole file: its escape character, the ARGs before the first stage, and the stages."""

    escape: str
    arguments: Sequence[DockerInstruction]
    stages: Sequence[Stage]


def read_dockerfile(content: bytes, title: str) -> Dockerfile:
    """Return a Dockerfile by its content; `title` is its name in errors. Raises `BuildError`."""
    if len(content) > MAX_BYTES:
        raise BuildError(f"{title}: a Dockerfile has at most {MAX_BYTES >> 20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BuildError(f"{title}:{line}: the text is not UTF-8") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise BuildError(f"{title}:{line}: a NUL is in the text")
    return _Reader(text, title).read()


class _Reader:
    def __init__(self, text: str, title: str) -> None:
        self._lines = [line.removesuffix("\r") for line in text.split("\n")]
        self._title, self._at, self._escape = title, 0, "\\"

    def read(self) -> Dockerfile:
        self._read_directives()
        arguments: list[DockerInstruction] = []
        stages: list[tuple[DockerInstruction, list[DockerInstruction]]] = []
        count = 0
        while (found := self._next()) is not None:
            count += 1
            if count > MAX_INSTRUCTIONS:
                raise self._error(found.line, f"there are more than {MAX_INSTRUCTIONS} instructions")
            if found.name == "FROM":
                stages.append((found, []))
            elif stages:
                stages[-1][1].append(found)
            elif found.name == "ARG":
                arguments.append(found)
            else:
                raise self._error(found.line, f"{found.name} stands before the first FROM")
        if not stages:
            raise BuildError(f"{self._title}: there is no FROM")
        made: list[Stage] = []
        for start, steps in stages:
            made.append(self._stage(start, steps, made))
        return Dockerfile(self._escape, arguments, made)

    def _error(self, line: int, why: str) -> BuildError:
        return BuildError(f"{self._title}:{line}: {why}")

    def _read_directives(self) -> None:
        """Read the directives, which stand before every other line."""
        seen = set()
        while self._at < len(self._lines) and (found := _DIRECTIVE.match(self._lines[self._at].strip())):
            name, value = found[1].lower(), found[2]
            if name not in ("escape", "syntax", "check"):
                return  # a comment
            if name in seen:
                raise self._error(self._at + 1, f"the directive {name} is given twice")
            seen.add(name)
            if name == "escape":
                if value not in ("\\", "`"):
                    raise self._error(self._at + 1, "escape is \\ or `")
                self._escape = value
            elif name == "syntax" and not _SYNTAX.match(value):
                raise self._error(
                    self._at + 1, f"no other syntax than docker/dockerfile is known, and {value!r} is one"
                )
            self._at += 1

    def _next(self) -> DockerInstruction | None:
        """Return the next instruction; None at the end."""
        line, text = self._next_text()
        if not text:
            return None
        first, *others = text.split(None, 1)
        name, rest = first.upper(), "".join(others)
        if name in _REFUSED:
            raise self._error(line, f"{name} is not supported: {_REFUSED[name]}")
        if name not in _KNOWN:
            raise self._error(line, f"unknown instruction {name[:64]!r}")
        if not rest:
            raise self._error(line, f"{name} says nothing")
        documents = self._documents(line, rest) if name in ("RUN", "COPY") else []
        flags, words = self._flags(line, name, rest)
        shown = rest if len(rest) <= _SHOWN else f"{rest[: _SHOWN - 1]}…"
        return replace(self._instruction(line, name, flags, words, documents), shown=f"{name} {shown}")

    def _next_text(self) -> tuple[int, str]:
        """Return the next instruction's first line, by its number, and its text with continued lines joined."""
        text, first = "", 0
        ending = re.compile(rf"(?<!{re.escape(self._escape)}){re.escape(self._escape)}[ \t]*\Z")
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            if line.lstrip().startswith("#") or not line.strip():
                continue  # also between lines of one instruction
            if not first:
                first, line = self._at, line.lstrip()
            if (found := ending.search(line)) is None:
                return first, (text + line).strip()
            text += line[: found.start()]
        return first, text.strip()

    def _documents(self, line: int, text: str) -> list[Document]:
        """Read the here-documents that an instruction names, from the lines behind it."""
        found = []
        for match in _HEREDOC.finditer(text):
            is_stripped, quote, name = bool(match[1]), match[2], match[3]
            content: list[str] = []
            while True:
                if self._at >= len(self._lines):
                    raise self._error(line, f"the here-document has no end {name}")
                each = self._lines[self._at]
                self._at += 1
                each = each.lstrip("\t") if is_stripped else each
                if each == name:
                    break
                content.append(each)
            found.append(Document(name, "".join(f"{each}\n" for each in content), bool(quote)))
        return found

    def _flags(self, line: int, name: str, rest: str) -> tuple[dict[str, str], str]:
        """Return the flags before the words, and the rest."""
        flags: dict[str, str] = {}
        while rest.startswith("--"):
            word, _, after = rest.partition(" ")
            if (found := _FLAG.match(word)) is None:
                break
            if found[1] not in _FLAGS.get(name, ()):
                raise self._error(line, f"{name} --{found[1]} is not supported")
            if not found[2]:
                raise self._error(line, f"{name} --{found[1]} needs a value")
            flags[found[1]], rest = found[2], after.strip()
        return flags, rest

    def _instruction(
        self, line: int, name: str, flags: dict[str, str], text: str, documents: list[Document]
    ) -> DockerInstruction:
        words: Sequence[str] = split(text, self._escape)
        pairs: Sequence[tuple[str, str | None]] = ()
        strings = _strings(text) if name in (*_EXEC, "COPY") and not documents else None
        match name:
            case "ENV" | "LABEL" | "ARG":
                pairs = self._pairs(line, name, text, words)
            case "FROM":
                self._check_from(line, words)
            case "SHELL" if not strings:
                raise self._error(line, 'SHELL takes an array, such as ["/bin/sh", "-c"]')
            case "RUN" if strings == [] or not text:
                raise self._error(line, "RUN has no command")
            case "COPY":
                words = strings if strings is not None else text.split()
                self._check_copy(line, flags, words, documents)
                words = [each for each in words if not documents or not _HEREDOC.fullmatch(each)]
        if strings is not None:
            words = strings
        return DockerInstruction(
            line, name, text, flags, tuple(words), strings is not None, tuple(pairs), tuple(documents)
        )

    def _pairs(self, line: int, name: str, text: str, words: Sequence[str]) -> list[tuple[str, str | None]]:
        pairs: list[tuple[str, str | None]] = []
        if name != "ARG" and "=" not in words[0]:  # the old form, of one pair
            key, *value = text.split(None, 1)
            if not value:
                raise self._error(line, f"{name} takes NAME=VALUE")
            pairs.append((key, value[0]))
        else:
            for word in words:
                key, sign, value_text = word.partition("=")
                if not sign and name != "ARG":
                    raise self._error(line, f"{name} takes NAME=VALUE, not {word[:64]!r}")
                pairs.append((key, value_text if sign else None))
        for key, _ in pairs:
            if not key or (name == "ARG" and not _VARIABLE.match(key)):
                raise self._error(line, f"{name}: {key[:64]!r} is no name")
        return pairs

    def _check_from(self, line: int, words: Sequence[str]) -> None:
        if len(words) == 1:
            return
        if len(words) != 3 or words[1].upper() != "AS":
            raise self._error(line, "FROM takes IMAGE, or IMAGE AS NAME")
        if not _STAGE.match(words[2].lower()):
            raise self._error(line, f"{words[2][:64]!r} is no name of a stage")

    def _check_copy(
        self, line: int, flags: dict[str, str], words: Sequence[str], documents: Sequence[Document]
    ) -> None:
        if documents and ("from" in flags or _HEREDOC.fullmatch(words[-1])):
            raise self._error(line, "COPY takes here-documents as sources alone, and without --from")
        if len(words) < 2:
            raise self._error(line, "COPY takes one source or more, and a destination")
        if len(words) > 2 and not words[-1].endswith(("/", ".")) and not any(each in words[-1] for each in "$'\""):
            raise self._error(line, SEVERAL)
        if "chmod" in flags and "from" in flags:
            raise self._error(line, "COPY --from takes no --chmod: use RUN chmod")
        mode = flags.get("chmod")
        if mode is not None and "$" not in mode and not _MODE.match(mode):
            raise self._error(line, "COPY --chmod takes permissions such as 755")

    def _stage(self, start: DockerInstruction, steps: list[DockerInstruction], before: list[Stage]) -> Stage:
        name = start.words[2].lower() if len(start.words) > 1 else ""
        if name and any(each.name == name for each in before):
            raise self._error(start.line, f"there are two stages {name!r}")
        return Stage(start, start.words[0], name, steps)


def _strings(text: str) -> list[str] | None:
    """Return the strings of an exec form; None for what is none, which is a shell form."""
    if not text.startswith("["):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, list) or not all(isinstance(each, str) and "\0" not in each for each in said):
        return None
    return said
