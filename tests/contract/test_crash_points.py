"""The registries of crash points and the code that passes them say the same, and production never comes to one."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsinit.sandbox import build, crash_points
from nsinit.server.start import _crash
from nsinit.steps import Crash
from nsinit.wire.launching import Grant
from nsinit.wire.validate import InvalidName
from sandkasten.config import Config, FaultSettings
from sandkasten.crash import Point
from tests.allowance import ALLOWANCE

ROOT = Path(__file__).parents[2]


def literal_calls(package: str, method: str) -> Iterator[str]:
    """Yield the literal names that `method` is called with, anywhere in a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name == method:
                    yield from (str(each.value) for each in node.args if isinstance(each, ast.Constant))


def test_every_named_step_of_a_create_in_nsinit_is_a_point() -> None:
    """A step that is added to a birth or a build must be added to the registry."""
    named = set()
    for file in ("server/births.py", "server/sessions.py"):
        tree = ast.parse((ROOT / "nsinit" / file).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
                named |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    assert named == set(crash_points.NSINIT_STEPS)


def test_every_step_that_is_carried_out_from_a_list_is_a_point() -> None:
    """Of PID 1 and of the builder."""
    points = set(crash_points.all_points())
    for prefix, steps in (
        (crash_points.INIT, (*build.BIRTH_STEPS, *build.POWER_STEPS)),
        (crash_points.BUILDER, (*build.BLANK_STEPS, *build.IMAGE_STEPS)),
        (crash_points.FILES, (*build.BARE_STEPS, *build.FILES_STEPS)),
    ):
        assert {prefix + name.replace(" ", "_") for name, _ in steps} <= points


def test_every_other_point_is_passed_exactly_once_in_the_code() -> None:
    """None is named that is never passed, none is passed that is not named."""
    assert Counter(literal_calls("nsinit", "passing")) == Counter(crash_points.NSINIT_POINTS)
    assert Counter(literal_calls("runner", "passing")) == Counter(crash_points.RUNNER_POINTS)


def test_every_point_of_the_daemon_is_passed_exactly_once_in_the_code() -> None:
    """`Point` has no member for nothing."""
    used: Counter[str] = Counter()
    for path in sorted((ROOT / "sandkasten").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Point":
                used[node.attr] += 1
    assert used == dict.fromkeys(Point.__members__, 1)


def test_names_are_unique() -> None:
    """One name, one place."""
    names = [*crash_points.all_points(), *(point.value for point in Point)]
    assert len(names) == len(set(names))


# Never by accident -------------------------------------------------------------------------------------------------


def test_a_crash_point_alone_is_refused() -> None:
    """A variable that leaked into production stops the start with a sentence."""
    with pytest.raises(ValueError, match="crash_points is not set"):
        FaultSettings(crash_at="daemon.create.built")


@pytest.mark.parametrize("address", ["0.0.0.0:8080", "192.0.2.1:80", "[::]:80", "example.org:80"])
def test_crash_points_are_refused_to_a_daemon_that_others_can_reach(address: str) -> None:
    """A daemon that serves a network is no test."""
    with pytest.raises(ValueError, match="loopback"):
        Config(listen=("127.0.0.1:1", address), testing=FaultSettings(crash_points=True))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:80", "localhost:1", "unix:/run/x.sock"])
def test_crash_points_are_for_this_machine_and_are_told_at_the_start(address: str) -> None:
    """A notice says so."""
    config = Config(listen=(address,), testing=FaultSettings(crash_points=True))
    assert any("crash" in notice for notice in config.notices())


@pytest.mark.parametrize(
    "at", ["nsinit.create.nothing", "nsinit.create.cgroup:0", "x:y", "nsinit.create.cgroup:1:1", ":"]
)
def test_nsinit_knows_no_other_points(at: str) -> None:
    """The daemon's word is checked."""
    with pytest.raises(InvalidName):
        _crash(at, None)


def test_nsinit_crashes_for_no_daemon_that_gave_root_away() -> None:
    """An intruder in that daemon must not be able to end processes that are out of reach."""
    with pytest.raises(InvalidName):
        _crash("nsinit.create.cgroup", Grant("/data", 61100, ALLOWANCE))
    crash = _crash("nsinit.create.cgroup:2", None)
    assert isinstance(crash, Crash)
    assert crash.name == "nsinit.create.cgroup"
    assert _crash("", Grant("/data", 61100, ALLOWANCE)) is None
