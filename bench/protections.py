"""Costs of each protection: sessions with it and without it, made in turn, and the steps that a create consists of.

The protections that can be switched are read from the configuration's own choices. A variant that can't be had on this
machine is named with the reason. A protection that is always on shows in the table of steps alone.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs

from bench.sampling import Table
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ConfigError, ServerSettings
from sandkasten.errors import SandkastenError
from sandkasten.model import SECCOMP_PROFILES, ExecSpec, SessionSpec
from sandkasten.supervisor import Supervisor

CREATE, EXEC = "create, library: ", "exec /bin/true, library: "
"""Beginnings of rows, before the variant's name."""
DEFAULT = "as configured by default"
EXECS_IN_A_ROW = 5
_PROGRAM = ExecSpec("/bin/true")


@attrs.frozen
class Variant:
    """A way to configure the daemon, or to ask for a session, that differs from the default in one thing."""

    name: str
    config: Config
    spec: SessionSpec


def variants() -> Iterator[Variant]:
    """Yield the default, then one variant for each other choice of a protection; paths are set later."""
    config, spec = Config(server=ServerSettings(pool_sandboxes=0)), SessionSpec()
    yield Variant(DEFAULT, config, spec)
    for section, key in (("security", "seccomp"), ("disk", "mode")):
        for choice in _choices(config, section, key):
            changed = attrs.evolve(getattr(config, section), **{key: choice})
            yield Variant(f"{section}.{key}: {choice}", attrs.evolve(config, **{section: changed}), spec)
    for field in ("readonly_rootfs", "root_inside"):
        if field in attrs.fields_dict(SessionSpec):
            variant: dict[str, Any] = {field: True}  # any field
            yield Variant(f"{field}: true", config, attrs.evolve(spec, **variant))


def _choices(config: Config, section: str, key: str) -> list[str]:
    """Return what a setting may be besides its default; nothing where this version has no such setting."""
    settings: Any = getattr(config, section, None)  # any section
    if settings is None:
        return []
    values = typing.get_args(typing.get_type_hints(type(settings))[key])
    if section == "security":
        values = SECCOMP_PROFILES
    return [value for value in values if value != getattr(settings, key)]


async def measure_protections(
    scratch: Path, table: Table, facts: dict[str, Any], rounds: Callable[[Sequence[str]], Iterator[str]]
) -> None:
    """Measure all variants in the order of `rounds`. Facts: variants that can't be had, and the steps of a create."""
    steps, missing = Table(), list[Mapping[str, str]]()
    async with AsyncExitStack() as stack:
        opened: dict[str, tuple[Variant, Supervisor]] = {}
        for number, variant in enumerate(variants()):
            config = attrs.evolve(variant.config, data_dir=scratch / str(number), db_path=scratch / f"{number}.db")
            try:
                supervisor = await stack.enter_async_context(open_supervisor(config))
                await _measure(Table(), Table(), variant, supervisor)  # warms up, and shows whether it works
                opened[variant.name] = variant, supervisor
            except (ConfigError, SandkastenError, ExceptionGroup) as error:
                missing.append({"variant": variant.name, "reason": _reason(error)})
        for name in rounds(list(opened)):
            await _measure(table, steps if name == DEFAULT else Table(), *opened[name])
    facts["protections that can't be had here"] = missing
    total = math.fsum(row.median for name, row in steps.rows.items() if "." not in name)
    facts["steps of a create (build.*: some side by side)"] = [
        {"step": name, "median, us": round(row.median * 1000), "share, %": round(100 * row.median / total, 1)}
        for name, row in steps.rows.items()
    ]


async def _measure(table: Table, steps: Table, variant: Variant, supervisor: Supervisor) -> None:
    with table.timed(create_row(variant.name)):
        session = await supervisor.create(variant.spec)
    for _ in range(EXECS_IN_A_ROW):
        with table.timed(exec_row(variant.name)):
            result = await supervisor.exec(session.id, _PROGRAM)
            if result.end.exit_code != 0:
                raise RuntimeError(f"a wrong answer: {result}")
    await supervisor.destroy(session.id)
    for step, milliseconds in session.timings_ms.items():
        steps.row(step).values.append(milliseconds)


def create_row(variant: str) -> str:
    return f"{CREATE}{variant}"


def exec_row(variant: str) -> str:
    return f"{EXEC}{variant}"


def _reason(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error).splitlines()[0]
