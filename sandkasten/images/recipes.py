"""Recipes of images: what a system that is made of Debian packages has besides the least, as YAML.

`recipes/` beside this module has those that ship; a file of the operator's may extend one of them. A recipe's commands
run as root of the new system, so a file that others may write is refused. Blocking: call it from a thread.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from sandkasten.config import ConfigError
from sandkasten.config.files import read_yaml
from sandkasten.model.image import ImageConfig

SHIPPED = Path(__file__).parent / "recipes"
_MAX_EXTENDED = 8
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(=[A-Za-z0-9.+~:-]+)?\Z")
"""A name, an architecture and a version, of which apt-get(8) makes one choice. Debian Policy Manual §5.6.7, §5.6.12."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def _all(fits: Callable[[str], object], what: str) -> Callable[[object, object, Iterable[str]], None]:
    """Return a validator of each of some strings."""

    def check(_recipe: object, _field: object, values: Iterable[str]) -> None:
        for value in values:
            if not fits(value) or "\0" in value:
                raise ValueError(f"{value[:64]!r} is no {what}")

    return check


@attrs.frozen
class Recipe:
    """A system of Debian packages, and how programs of it run.

    `include`: packages beside the least system; `exclude`: patterns of paths that no package may bring, now and later
    (dpkg(1), --path-exclude); `run`: commands for `sh -e`, as root of the new system. `source`: DISTRIBUTION:RELEASE,
    by default what the machine is. `extends`: the recipe that this one adds to, by name or as a file beside it.
    """

    extends: str = ""
    source: str = ""
    include: Sequence[str] = attrs.field(default=(), validator=_all(_PACKAGE.match, "package"))
    exclude: Sequence[str] = attrs.field(
        default=(), validator=_all(lambda each: each.startswith("/") and "\n" not in each, "absolute path")
    )
    run: Sequence[str] = attrs.field(default=(), validator=_all(str.strip, "command"))
    env: Mapping[str, str] = attrs.field(factory=dict, validator=_all(_VARIABLE.match, "name of a variable"))
    user: str = ""
    workdir: str = ""
    cmd: Sequence[str] = ()

    def on(self, base: Recipe) -> Recipe:
        """Return this recipe with what it adds to."""
        return Recipe(
            source=self.source or base.source,
            include=tuple(dict.fromkeys((*base.include, *self.include))),
            exclude=tuple(dict.fromkeys((*base.exclude, *self.exclude))),
            run=(*base.run, *self.run),
            env={**base.env, **self.env},
            user=self.user or base.user,
            workdir=self.workdir or base.workdir,
            cmd=self.cmd or base.cmd,
        )

    @property
    def config(self) -> ImageConfig:
        """The configuration of the image."""
        return ImageConfig(env=self.env, working_dir=self.workdir, user=self.user, cmd=tuple(self.cmd))

    @property
    def digest(self) -> str:
        """SHA-256 over every field of the recipe, in hex."""
        return hashlib.sha256(json.dumps(attrs.asdict(self), sort_keys=True).encode()).hexdigest()


BARE = Recipe(
    env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}, cmd=("/bin/bash",)
)
"""The recipe of an image for which packages alone are named."""


def shipped() -> list[str]:
    """Return the names of the recipes that ship."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def load_recipe(name: str) -> tuple[str, Recipe]:
    """Return a recipe that ships, or that of a file if `name` has a slash or ends in .yaml; with its name.

    Raises:
        ConfigError: there is none, the file can't be read or others may write it, or it says something else.
    """
    path = Path(name) if _is_file(name) else _find_shipped(name)
    chain = [_read(path)]
    while extended := chain[-1].extends:
        if len(chain) == _MAX_EXTENDED:
            raise ConfigError(f"{path}: more than {_MAX_EXTENDED} recipes extend each other")
        path = path.parent / extended if _is_file(extended) else _find_shipped(extended)
        chain.append(_read(path))
    recipe = Recipe()
    for each in reversed(chain):
        recipe = each.on(recipe)
    return Path(name).stem, recipe


def _is_file(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _find_shipped(name: str) -> Path:
    if name not in shipped():
        raise ConfigError(f"there is no recipe {name!r}: name a file, or one of {', '.join(shipped())}")
    return SHIPPED / f"{name}.yaml"


def _read(path: Path) -> Recipe:
    fields = read_yaml(path, is_shipped=path.parent == SHIPPED)
    try:
        return _converter.structure(fields, Recipe)
    except cattrs.BaseValidationError as error:
        problems = (line.split(" @ $") for line in cattrs.transform_error(error, format_exception=_describe))
        raise ConfigError(
            "\n".join(f"{path}: {each}{where.replace('.', ' at ', 1)}" for each, where in problems)
        ) from None


def _describe(error: BaseException, _kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"unknown key {min(error.extra_fields)!r}; there are {', '.join(_KEYS)}"
    return str(error)


def _text(value: Any, _kind: type) -> str:  # a YAML value
    """cattrs would convert: a version such as 1.10 would be another."""
    if not isinstance(value, str):
        raise ValueError(f"expected text, not {value!r}")
    return value


def _texts(value: Any, _kind: type) -> Sequence[str]:  # a YAML value
    if not isinstance(value, list):
        raise ValueError(f"expected a list, not {value!r}")
    return tuple(_text(each, str) for each in value)


def _mapping(value: Any, _kind: type) -> Mapping[str, str]:  # a YAML value
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, not {value!r}")
    return {_text(name, str): _text(each, str) for name, each in value.items()}


_KEYS = ["from" if each == "source" else each for each in attrs.fields_dict(Recipe)]
_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook(str, _text)
_converter.register_structure_hook_func(partial(operator.eq, Sequence[str]), _texts)
_converter.register_structure_hook_func(partial(operator.eq, Mapping[str, str]), _mapping)
_converter.register_structure_hook(
    Recipe,
    make_dict_structure_fn(Recipe, _converter, _cattrs_forbid_extra_keys=True, source=override(rename="from")),
)
