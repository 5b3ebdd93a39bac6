"""Costs of each protection: sessions with it and without it, made in turn, and the steps that a create consists of.

The protections that can be switched are read from the configuration's own choices. A variant that can't be had on this
machine is named with the reason. A protection that is always on shows in the table of steps alone.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs

from bench import measure
from sandkasten.app import open_supervisor
from sandkasten.config import Config, ConfigError, ServerSettings
from sandkasten.model import SECCOMP_PROFILES, ExecSpec, SessionSpec
from sandkasten.model.errors import SandkastenError
from sandkasten.supervisor import Supervisor

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
            wish: dict[str, Any] = {field: True}  # any field
            yield Variant(f"{field}: true", config, attrs.evolve(spec, **wish))


def _choices(config: Config, section: str, key: str) -> list[str]:
    """Return what a setting may be besides its default; nothing where this version has no such setting."""
    settings: Any = getattr(config, section, None)  # any section
    if settings is None:
        return []
    values = typing.get_args(typing.get_type_hints(type(settings))[key])
    if section == "security":
        values = SECCOMP_PROFILES
    return [value for value in values if value != getattr(settings, key)]


async def print_protections(scratch: Path, rounds: int) -> None:
    """Measure all variants, interleaved, and print both tables."""
    samples, steps, missing = measure.Samples(), measure.Samples(), {}
    async with AsyncExitStack() as stack:
        opened: list[tuple[Variant, Supervisor]] = []
        for number, variant in enumerate(variants()):
            config = attrs.evolve(variant.config, data_dir=scratch / str(number), db_path=scratch / f"{number}.db")
            try:
                supervisor = await stack.enter_async_context(open_supervisor(config))
                await _measure(measure.Samples(), None, variant, supervisor)  # warms up, and shows whether it works
                opened.append((variant, supervisor))
            except (ConfigError, SandkastenError, ExceptionGroup) as error:
                missing[variant.name] = _reason(error)
        for _ in range(rounds):
            for variant, node in opened:
                await _measure(samples, steps if variant.name == DEFAULT else None, variant, node)
    _print_variants(samples, missing)
    _print_steps(steps)


async def _measure(
    samples: measure.Samples, steps: measure.Samples | None, variant: Variant, supervisor: Supervisor
) -> None:
    with samples.timed(variant.name):
        session = await supervisor.create(variant.spec)
    for _ in range(EXECS_IN_A_ROW):
        with samples.timed(_exec_row(variant.name)):
            await supervisor.exec(session.id, _PROGRAM)
    await supervisor.destroy(session.id)
    if steps is not None:
        for step, milliseconds in session.timings_ms.items():
            steps.add(step, milliseconds)


def _reason(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error).splitlines()[0]


def _exec_row(name: str) -> str:
    return f"exec {name}"


def _print_variants(samples: measure.Samples, missing: dict[str, str]) -> None:
    title = "protections, no pool sandbox ready"
    print(f"\n{title:<40} {'n':>4} {'create ms':>10} {'p95':>8} {'ratio':>6} {'exec ms':>9} {'ratio':>6}")
    for name in [row for row in samples.rows() if not row.startswith("exec ")]:
        create, run = samples.median(name), samples.median(_exec_row(name))
        create_ratio, run_ratio = create / samples.median(DEFAULT), run / samples.median(_exec_row(DEFAULT))
        print(
            f"{name:<40} {samples.count(name):>4} {create:>10.3f} {samples.p95(name):>8.3f} {create_ratio:>6.2f} "
            f"{run:>9.3f} {run_ratio:>6.2f}"
        )
    for name, reason in missing.items():
        print(f"{name:<40} not here: {reason}")


def _print_steps(steps: measure.Samples) -> None:
    total = math.fsum(steps.median(name) for name in steps.rows() if "." not in name)
    print(f"\n{'steps of a create (build.*: some side by side)':<52} {'median us':>10} {'share':>7}")
    for name in steps.rows():
        print(f"{name:<52} {steps.median(name) * 1000:>10.0f} {steps.median(name) / total:>7.1%}")
