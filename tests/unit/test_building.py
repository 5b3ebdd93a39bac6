"""Dockerfiles and the directory that is built from, without a server."""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkasten.building.context import BuildContext
from sandkasten.building.dockerfile import BuildError, Dockerfile, read_dockerfile
from sandkasten.building.ignoring import Ignored, matches
from sandkasten.building.words import expand, expand_document, split

VARIABLES = {"A": "one", "EMPTY": "", "B": "t w o"}


def read(text: str | bytes) -> Dockerfile:
    return read_dockerfile(text.encode() if isinstance(text, str) else text, "D")


def refusal(text: str | bytes) -> str:
    with pytest.raises(BuildError) as caught:
        read(text)
    return str(caught.value)


def test_lines_become_instructions() -> None:
    """Directives, comments, also between continued lines, both escapes, both forms, flags, and stages by name."""
    made = read(
        "# syntax=docker/dockerfile:1\n# escape=`\r\n\nARG V=1\nfrom base:$V AS First\n"
        "run echo `\n  # not this\n\n   two \\\n"
        'CMD [ "a b", "c" ]\nENTRYPOINT [not json\n'
        "FROM first\nCOPY --from=0 --chown=1:2 a b /c/\nENV a=1 b='x y'\nLABEL key some value\n"
    )
    assert (made.escape, [each.pairs for each in made.arguments]) == ("`", [(("V", "1"),)])
    first, second = made.stages
    assert (first.image, first.name, second.image, second.name) == ("base:$V", "first", "first", "")
    run, cmd, entrypoint = first.steps
    assert (run.line, run.name, run.text, run.is_exec) == (6, "RUN", "echo    two \\", False)
    assert (cmd.words, cmd.is_exec, entrypoint.is_exec) == (("a b", "c"), True, False)
    copy, env, label = second.steps
    assert (copy.flags, copy.words) == ({"from": "0", "chown": "1:2"}, ("a", "b", "/c/"))
    assert (env.pairs, label.pairs) == ((("a", "1"), ("b", "'x y'")), (("key", "some value"),))


def test_here_documents_belong_to_their_run_or_copy() -> None:
    """Of several, with tabs taken off, and literal; a shift and a here-string are none."""
    (copy,) = read("FROM a\nCOPY --chmod=600 b <<A <<'B' /c/\nit's\nA\nB\n").stages[0].steps
    assert (copy.words, [each.content for each in copy.documents]) == (("b", "/c/"), ["it's\n", ""])
    (stage,) = read("FROM a\nRUN <<EOF\necho $x\nEOF\nRUN cat <<A - <<-'B' \none\nA\n\t\ttwo\n\tB\nUSER x\n").stages
    first, second, user = stage.steps
    assert [(each.name, each.content, each.is_literal) for each in first.documents] == [("EOF", "echo $x\n", False)]
    assert [(each.content, each.is_literal) for each in second.documents] == [("one\n", False), ("two\n", True)]
    assert (user.name, user.line) == ("USER", 10)
    assert [each.documents for each in read("FROM a\nRUN cat <<<x; echo $((1<<2))\n").stages[0].steps] == [()]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "D: there is no FROM"),
        ("RUN x\nFROM a", "D:1: RUN stands before the first FROM"),
        ("FROM a\n\nADD x y", "D:3: ADD is not supported: use COPY"),
        ("FROM a\nRUN --mount=type=cache x", "D:2: RUN --mount is not supported"),
        ("FROM --platform=x a", "D:1: FROM --platform is not supported"),
        ("FROM a\nCOPY --link a b", "D:2: COPY --link is not supported"),
        ("FROM a\nCOPY a b c", "D:2: the destination of several sources ends with /"),
        ("FROM a\nCOPY a", "D:2: COPY takes one source or more"),
        ("FROM a\nCOPY <<A <<B /c\nA\nB", "D:2: the destination of several sources ends with /"),
        ("FROM a\nCOPY --from=b <<A /c\nA", "D:2: COPY takes here-documents as sources alone"),
        ("FROM a\nCOPY a <<A\nA", "D:2: COPY takes here-documents as sources alone"),
        ("FROM a\nCOPY --chmod=u+x a b", "D:2: COPY --chmod takes permissions"),
        ("FROM a\nHEALTHCHECK NONE", "D:2: HEALTHCHECK is not supported"),
        ("FROM a\nRUNX y", "D:2: unknown instruction 'RUNX'"),
        ("FROM a\nRUN", "D:2: RUN says nothing"),
        ("FROM a\nRUN []", "D:2: RUN has no command"),
        ("FROM a\nRUN <<E\nx\n", "D:2: the here-document has no end E"),
        ("FROM a\nENV x", "D:2: ENV takes NAME=VALUE"),
        ("FROM a\nENV x=1 y", "D:2: ENV takes NAME=VALUE, not 'y'"),
        ("FROM a\nARG 1x", "D:2: ARG: '1x' is no name"),
        ("FROM a\nSHELL sh -c", "D:2: SHELL takes an array"),
        ("FROM a as b\nFROM c as B", "D:2: there are two stages 'b'"),
        ("FROM a b", "D:1: FROM takes IMAGE"),
        ("#escape=x\nFROM a", "D:1: escape is"),
        ("#syntax=evil/frontend\nFROM a", "D:1: no other syntax"),
        (b"FROM a\n\xff", "D:2: the text is not UTF-8"),
        ("FROM a\n\0", "D:2: a NUL is in the text"),
        ("#\n" * 600_000, "D: a Dockerfile has at most 1 MiB"),
    ],
)
def test_what_is_not_done_is_refused_by_its_line(text: str | bytes, told: str) -> None:
    """Before anything starts."""
    assert refusal(text).startswith(told)


@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(
    ["FROM a", "RUN x", "\\", "\n", " ", "<<E", "E", "#", "=", "'", '"', "COPY a", "ENV", "[", "]", "--from=", "$", "{"]
)).map("".join)))  # fmt: skip
def test_any_text_is_a_dockerfile_or_is_refused(text: str) -> None:
    """With an instruction's line where it begins."""
    try:
        made = read(text)
    except BuildError as error:
        told = str(error)
    else:
        told = "D:"
        check_lines(made, text)
    assert told.startswith("D:")


def check_lines(made: Dockerfile, text: str) -> None:
    """Check that each instruction begins in its line."""
    lines = text.split("\n")
    for stage in made.stages:
        for each in (stage.start, *stage.steps):
            assert lines[each.line - 1].removeprefix("\ufeff").lstrip().upper().startswith(each.name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("$A-${A}$", "one-one$"),
        ("${X:-d$A}${EMPTY-d}${EMPTY:-d}", "doned"),
        ("${A:+yes}${X+no}${EMPTY+set}", "yesset"),
        (r"""'$A' "$A \$A \x" \$A a\ b""", r"""$A one $A \x $A a b"""),
        ("${B}", "t w o"),
        ("$1x", "x"),
    ],
)
def test_variables_and_quotes_are_replaced(text: str, found: str) -> None:
    """As the reference says; a value is not expanded again."""
    assert expand(text, VARIABLES.get, "\\") == found


def test_quotes_of_a_here_document_are_text() -> None:
    """As a shell has it: of the escapes those before a dollar and an escape count."""
    text = """it's "$A" '${A}' \\$A \\\\ \\n \\"""
    assert expand_document(text, VARIABLES.get, "\\") == """it's "one" 'one' $A \\ \\n \\"""


@pytest.mark.parametrize("text", ["'a", '"a', "${A", "${}", "${A%x}", "${X:?gone}", "${X:-" * 40 + "}" * 40])
def test_open_quotes_and_unknown_modifiers_are_refused(text: str) -> None:
    """Also a variable that must have a value, and nesting without end."""
    with pytest.raises(ValueError, match=r"missing|name|modifiers|gone|nested"):
        expand(text, VARIABLES.get, "\\")


@given(st.text(alphabet="ab $'\"\\{}:-", max_size=40))
def test_words_hold_all_but_the_blanks_between_them(text: str) -> None:
    """Open quotes change nothing in that."""
    assert "".join(split(text, "\\")).replace(" ", "") == text.replace(" ", "")


def test_the_last_pattern_that_fits_decides() -> None:
    """Of the path or a directory above; `**` is any number of parts, and an exception brings back what is below."""
    ignored = Ignored(b"# no\n*.log\n/build\n**/cache\nsrc/*\n!src/kept\nsrc/kept/no\n!**/a[^b]c\n\\#x\n../out\n")
    left = {"x.log", "build/y", "a/b/cache/z", "cache", "src/other", "src/kept/no/z", "#x"}
    kept = {"a/x.log", "src", "src/kept/z", "build.txt", "a/build", "q/axc", "../out"}
    assert {path for path in left | kept if ignored(path)} == left
    assert ignored.has_exceptions


@given(st.lists(st.sampled_from(["*", "**", "a", "a*", "?b", "*a*a*a*b"]), max_size=6), st.text("ab/", max_size=12))
def test_a_pattern_fits_as_a_regular_expression_would(pattern: list[str], path: str) -> None:
    """Part by part, whatever stands beside `**`."""
    parts = path.split("/")

    def slow(wanted: list[str], given: list[str]) -> bool:
        if not wanted:
            return not given
        if wanted[0] == "**":
            return any(slow(wanted[1:], given[count:]) for count in range(len(given) + 1))
        return bool(given) and fnmatch.fnmatchcase(given[0], wanted[0]) and slow(wanted[1:], given[1:])

    assert matches(pattern, parts) == slow(pattern, parts)


def packed(context: BuildContext, source: str, mode: int | None = None, name: str = "") -> dict[str, tuple[int, str]]:
    """Return the members of an archive of a source: permissions, and content or target."""
    sources, digest = context.find(source), hashlib.sha256()
    content = b"".join(context.pack(sources, name, mode, digest))
    assert digest.hexdigest() == context.digest(sources, mode)
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content), errors="surrogateescape") as archive:
        for each in archive:
            file = archive.extractfile(each) if each.isreg() else None
            found[each.name] = each.mode, file.read().decode() if file else each.linkname
    return found


def test_sources_are_files_below_the_directory(tmp_path: Path) -> None:
    """A file under its name or another, a directory's content, what a pattern fits, names of odd bytes, and a link
    within as a link; without what is ignored, FIFOs, and depth that Python could not recurse."""
    context = BuildContext(tmp_path, Ignored(b"*.log\nsub\n!sub/kept\n"))
    (tmp_path / "sub").mkdir(0o750)
    (tmp_path / "dir").mkdir(0o750)
    for path in ("one", "two.log", "sub/no", "sub/kept"):
        (tmp_path / path).write_text(path)
    (tmp_path / "dir/link").symlink_to("/etc/passwd")
    (tmp_path / "to-one").symlink_to("one")
    os.mkfifo(tmp_path / "dir/fifo")
    odd = os.fsdecode(b"dir/\xff\n")
    (tmp_path / odd).write_text("odd")
    (tmp_path / "dir").chmod(0o750)
    assert packed(context, "one", 0o755, "other") == {"other": (0o755, "one")}
    assert packed(context, "to-one") == {"to-one": (0o644, "one")}
    assert packed(context, "dir") == {"link": (0o777, "/etc/passwd"), odd[4:]: (0o644, "odd")}
    assert set(packed(context, ".")) == {"one", "to-one", "dir", "dir/link", odd, "sub/kept"}
    assert [each.path for each in context.find("*o*e")] == ["one", "to-one"]
    (tmp_path / "/".join("d" * 200)).mkdir(parents=True)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        assert len(packed(context, "d")) == 199
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "source", ["../x", "a/../../x", "no", "out", "out/passwd", "up", "two.log", "to-log", "z*", "fifo"]
)
def test_no_source_leads_out_of_the_directory(tmp_path: Path, source: str) -> None:
    """By no name and no link, nor to what is ignored."""
    context = BuildContext(tmp_path / "in", Ignored(b"*.log"))
    (tmp_path / "in").mkdir()
    (tmp_path / "x").write_text("secret")
    (tmp_path / "in/two.log").write_text("")
    os.mkfifo(tmp_path / "in/fifo")
    for name, target in (("out", "/etc"), ("up", "../x"), ("to-log", "two.log")):
        (tmp_path / "in" / name).symlink_to(target)
    with pytest.raises(ValueError, match=r"leads out|not in the directory|link|neither|no such"):
        context.find(source)


def test_the_digest_is_of_all_that_is_copied_but_times(tmp_path: Path) -> None:
    """Names, kinds, permissions and contents; a file that is changed between has another."""
    file, context = tmp_path / "file", BuildContext(tmp_path)
    file.write_text("one")

    def digest(mode: int | None = None) -> str:
        return context.digest(context.find("."), mode)

    first = digest()
    os.utime(file, (1, 1))
    assert digest() == first
    others = [digest(0o700)]
    file.chmod(0o600)
    others.append(digest())
    file.write_text("two")
    others.append(digest())
    file.rename(tmp_path / "other")
    others.append(digest())
    assert len({first, *others}) == 5


def test_patterns_beside_the_dockerfile_go_before_those_of_the_directory(tmp_path: Path) -> None:
    """One list counts, not both."""
    (tmp_path / "a").write_text("")
    (tmp_path / "b").write_text("")
    (tmp_path / ".dockerignore").write_text("a\n.dockerignore")
    assert set(packed(BuildContext.of(tmp_path, None), ".")) == {"b"}
    (tmp_path / "D.dockerignore").write_text("b\n*ignore")
    assert set(packed(BuildContext.of(tmp_path, tmp_path / "D"), ".")) == {"a"}
