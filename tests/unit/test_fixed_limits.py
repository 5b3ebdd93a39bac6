"""Limits fixed at create and the operator's maxima: what is filled in, what is refused, and by which words."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from sandkasten.admission.plan import bounds_in_force, check_maximum, keep_fixed, plan_sandbox, resolve
from sandkasten.config import Config, Defaults, DiskSettings, Maximum
from sandkasten.errors import InvalidRequest
from sandkasten.model import FIXED_BOUNDS, LIMIT_BOUNDS, Limits, SessionSpec


def _resolved(limits: Limits | None, config: Config | None = None) -> Limits:
    return resolve(SessionSpec(limits=limits), config or Config()).limits


def _refused(limits: Limits, config: Config | None = None) -> dict[str, Any]:
    with pytest.raises(InvalidRequest) as refused:
        _resolved(limits, config)
    return dict(refused.value.details)


def test_every_limit_of_a_session_is_a_number() -> None:
    """The configured default, cut to a share of the memory, since both places are memory."""
    usual = _resolved(None)
    assert (usual.open_files, usual.tmp_mb, usual.shm_mb) == (65_536, 256, 64)
    assert (usual.tmp_inodes, usual.shm_inodes) == (65_536, 16_384)
    small = _resolved(Limits(memory_mb=64))
    assert (small.tmp_mb, small.tmp_inodes, small.shm_mb, small.shm_inodes) == (32, 8192, 16, 4096)
    defaults = Defaults(open_files_limit=2048, tmp_limit_mb=8, tmp_inodes=100, shm_limit_mb=4, shm_inodes=200)
    assert _resolved(None, Config(defaults=defaults)) == Limits(
        open_files=2048, tmp_mb=8, tmp_inodes=100, shm_mb=4, shm_inodes=200
    )


def test_the_plan_says_what_the_session_has() -> None:
    """In nsinit's units."""
    asked = Limits(open_files=4096, tmp_mb=10, tmp_inodes=70, shm_mb=3, shm_inodes=80)
    resolved = resolve(SessionSpec(limits=asked), Config())
    assert resolved.limits == asked
    plan = plan_sandbox("0123456789abcdef", resolved, workspace_id=None, image="host", image_kind="host")
    assert (plan.tmp_bytes, plan.tmp_inodes, plan.shm_bytes, plan.shm_inodes) == (10 << 20, 70, 3 << 20, 80)
    assert plan.open_files == 4096


@pytest.mark.parametrize("name", FIXED_BOUNDS)
@pytest.mark.parametrize("value", [-1, 0, 2**63, 1.5, "8", True, float("nan"), []])
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    """Negative, huge, not a number, another type."""
    assert list(_refused(attrs.evolve(Limits(), **{name: value}))) == [f"limits.{name}"]


def test_no_place_in_memory_may_be_larger_than_its_share() -> None:
    """A larger place would be an out-of-memory kill where "no space left" was asked for."""
    assert _resolved(Limits(memory_mb=64, tmp_mb=32, shm_mb=16)).tmp_mb == 32
    assert set(_refused(Limits(memory_mb=64, tmp_mb=33, shm_mb=17))) == {"limits.tmp_mb", "limits.shm_mb"}


def test_nothing_above_the_operators_maximum_is_had() -> None:
    """Each limit that has one, at create and at change; the defaults may not be above it either."""
    maximum = Maximum(
        cpu_limit=2, mem_limit_mb=1024, pids_limit=512, open_files_limit=65_536, tmp_limit_mb=1024, shm_limit_mb=64
    )
    config = Config(maximum=maximum)
    most = Limits(cpu=2, memory_mb=1024, pids=512, open_files=65_536, tmp_mb=512, shm_mb=64)
    check_maximum(_resolved(most, config), maximum)
    above = Limits(cpu=2.1, memory_mb=8192, pids=513, open_files=65_537, tmp_mb=1025, shm_mb=65)
    names = {f"limits.{name}" for name in ("cpu", "memory_mb", "pids", "open_files", "tmp_mb", "shm_mb")}
    assert set(_refused(above, config)) == names
    with pytest.raises(ValueError, match="less than defaults"):
        Config(maximum=Maximum(mem_limit_mb=256))


def test_a_change_leaves_the_fixed_ones() -> None:
    """Absent or the same is no change, anything else is refused by name."""
    current = _resolved(None)
    assert keep_fixed(Limits(pids=9), current) == attrs.evolve(current, pids=9)
    assert keep_fixed(attrs.evolve(current, pids=9), current).pids == 9
    with pytest.raises(InvalidRequest) as refused:
        keep_fixed(Limits(open_files=2048, tmp_mb=1), current)
    assert set(refused.value.details) == {"limits.open_files", "limits.tmp_mb"}


@pytest.mark.parametrize("name", [*LIMIT_BOUNDS, *FIXED_BOUNDS])
def test_the_bounds_that_are_told_are_those_that_are_enforced(name: str) -> None:
    """Both ends of each limit are taken, and the next value beyond is refused by name."""
    config = Config(
        maximum=Maximum(
            cpu_limit=4,
            mem_limit_mb=8192,
            pids_limit=999,
            open_files_limit=70_000,
            tmp_limit_mb=2000,
            shm_limit_mb=1000,
        ),
        disk=DiskSettings(max_mb=5000, max_inodes=300_000),
    )
    bounds = bounds_in_force(config.maximum, config.disk)
    least, most = bounds[name]
    roomy = attrs.evolve(Limits(), memory_mb=int(bounds["memory_mb"][1]))

    def asked(value: float) -> Limits:
        change: dict[str, Any] = {name: value}
        return attrs.evolve(roomy, **change)

    for value in (least, most):
        assert getattr(_resolved(asked(value), config), name) == value
    step = 0.001 if name == "cpu" else 1
    for value in (least - step, most + step):
        assert list(_refused(asked(value), config)) == [f"limits.{name}"]
