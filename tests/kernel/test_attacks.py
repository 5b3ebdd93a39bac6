"""Every attempt of the catalogue, as each user, on one field; and that an attempt can fail.

What is proved twice is the verdict: an attempt must be held in a session, and must be BROKEN where what it attacks is
not protected (in the neighbour itself, outside as root, with a layer switched off).
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from sandkasten.config import Config, DiskSettings, EgressSettings, SecuritySettings
from sandkasten.security.attacks.field import USERS, open_field
from sandkasten.security.attacks.package import pack_probes
from sandkasten.security.attacks.ways_out import own_address
from sandkasten.security.campaign import Result, attack, catalogue, choose, make_all, show_controls
from sandkasten.security.probes.attempt import BROKEN, HELD, NOT_APPLICABLE, Attempt, OutsideFacts, judge
from sandkasten.security.probes.inside import INSIDE
from tests.waiting import patience, slowness

ISSUED = (
    *("processes", "proc", "sys", "devices", "namespaces", "mounts", "ptrace", "signals", "descriptors", "sockets"),
    *("keyrings", "ttys", "io_uring", "userfaultfd", "bpf", "setuid"),
    *("files", "workspaces", "imports", "front", "exhaustion", "quotas", "memory", "runner", "archives"),
    *("egress", "egress_process", "previews", "secrets"),
)
"""The classes that there must be."""

Results = dict[tuple[str, str], Result]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """The attempts of all tests of this run, made once: longer than a test may take on its own."""
    faulthandler.cancel_dump_traceback_later()
    tests = (each for each in request.session.items if isinstance(each, pytest.Function))
    wanted: list[Any] = [each.callspec.params["attempt"] for each in tests if "results" in each.fixturenames]
    with tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory:
        made = trio.run(_attack, Config(data_dir=Path(directory)), [each.id for each in wanted])
        assert os.listdir(directory) == []
    return {(each.attempt.id, each.user): each for each in made}


async def _attack(config: Config, wanted: Sequence[str]) -> list[Result]:
    return await attack(config, users=USERS, only=wanted, patience=slowness())


@pytest.mark.parametrize("attempt", catalogue(), ids=lambda each: each.id)
def test_the_attempt_is_held(results: Results, attempt: Attempt) -> None:
    """An attempt, made by any user, gives the expected answer; an attempt that says nothing on this machine
    says why.
    """
    made = {user: results[attempt.id, user] for user in attempt.users}
    missing = {user: each.seen for user, each in made.items() if each.verdict == NOT_APPLICABLE}
    broken = {user: each.seen for user, each in made.items() if each.is_broken}
    assert broken == {}
    if set(missing) == set(made):
        pytest.skip(f"{missing}")


def test_the_catalogue_is_what_was_promised() -> None:
    """Sixty attempts and more, each with a name of its own, all classes, and CVE numbers that look like such."""
    attempts = catalogue()
    assert len({each.id for each in attempts}) == len(attempts) >= 60
    assert set(ISSUED) <= {each.group for each in attempts}
    assert {"files.symlink-race", "files.hard-link-race"} <= {each.id for each in attempts}
    named = [each.stands_for for each in attempts if each.stands_for.startswith("CVE")]
    assert len(named) > 20
    assert all(re.fullmatch(r"CVE-20\d\d-\d{4,7}", each) for each in named)
    assert all(each.what and each.expected for each in attempts)


async def test_what_looks_for_the_neighbour_finds_it_where_it_is(config: Config) -> None:
    """In the neighbour's own session the same attempts are BROKEN, so the things that they look for are really there.
    An attempt that looks for something that is not there says nothing.
    """
    async with open_field(config, patience=slowness()) as field:
        shown = await show_controls(field)
        astray = attrs.evolve(field, target=replace(field.target, neighbour_port=1))
        (blind,) = await make_all(
            astray, choose(["sockets.neighbour"]), users=("sandbox",), report=lambda _result: None
        )
    expected = [each.id for each in INSIDE if each.control == "neighbour"]
    assert {name: outcome.verdict for name, outcome in shown.items()} == dict.fromkeys(expected, BROKEN)
    assert len(expected) >= 5
    assert blind.verdict == NOT_APPLICABLE


@pytest.fixture
def probes(tmp_path: Path) -> tuple[Path, OutsideFacts]:
    """The packed attempts on the host, and a target with a readable file."""
    path, secret = tmp_path / "probes.zip", tmp_path / "secret"
    path.write_bytes(pack_probes())
    secret.write_text("here")
    return path, OutsideFacts(outside_pid=os.getpid(), outside_paths=(str(secret),))


@pytest.mark.parametrize("name", [each.id for each in INSIDE if each.control == "host"])
def test_without_a_sandbox_the_attempt_succeeds(probes: tuple[Path, OutsideFacts], name: str) -> None:
    """The same attempt is BROKEN outside, by root, in throw-away mount, host name and IPC namespaces."""
    path, target = probes
    kinds = ["--mount", "--uts", "--ipc", *(["--net"] if name in ("sockets.links", "sockets.routes") else [])]
    command = ["unshare", *kinds, sys.executable, "-I", "-B", str(path), json.dumps(asdict(target)), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(30), check=True)
    found = json.loads(done.stdout)
    assert (found["id"], found["verdict"]) == (name, BROKEN), found


@pytest.mark.parametrize(
    ("layer", "weak", "least"),
    [("seccomp", {"security": SecuritySettings(seccomp="off")}, 8), ("disk", {"disk": DiskSettings(mode="none")}, 2)],
    ids=["filter", "disk"],
)
async def test_without_a_layer_what_only_it_holds_is_broken(
    config: Config, layer: str, weak: dict[str, Any], least: int
) -> None:
    """With one protection off, each attempt that names it as its only protection is BROKEN."""
    attempts = [each for each in choose(()) if each.layer == layer]
    async with open_field(attrs.evolve(config, **weak), patience=slowness()) as field:
        made = await make_all(field, attempts, users=("sandbox",), report=lambda _result: None)
    held = {each.attempt.id: each.seen for each in made if each.verdict not in (BROKEN, NOT_APPLICABLE)}
    assert held == {}
    assert sum(each.is_broken for each in made) >= least


async def test_with_the_node_permitted_its_listeners_are_reached(config: Config) -> None:
    """Attempts on the node's own services are BROKEN where the operator permits its addresses: what they dial is heard,
    and the other attempts on ways out are held as before."""
    own = ("127.0.0.0/8", *filter(None, [own_address()]))
    permitted = attrs.evolve(config, egress=EgressSettings(permit=own))
    async with open_field(permitted, patience=slowness()) as field:
        attempts = choose(["egress.node", "egress.own-name", "egress.proxy", "egress.other-addresses"])
        made = await make_all(field, attempts, users=("sandbox",), report=lambda _result: None)
    node, name, by_proxy, other = made
    assert node.verdict in (BROKEN, NOT_APPLICABLE), node.seen
    for each in (name, by_proxy):
        assert each.is_broken
        assert re.search("listener: heard [1-9]", each.seen), each.seen
    assert other.verdict == HELD, other.seen


async def test_a_crowd_that_never_forms_ends_with_its_program(config: Config) -> None:
    """Where an operator denies the name that leads to the attack's server, the attempt says so, and does not wait for
    connections that can't come."""
    denied = attrs.evolve(config, egress=EgressSettings(always_deny=("localhost",)))
    async with open_field(denied, patience=100) as field:
        with trio.fail_after(patience(20)):
            (made,) = await make_all(field, choose(["upstream.crowd"]), users=("sandbox",), report=lambda _result: None)
    assert made.is_broken
    assert "a crowd of 0 that has ended proves nothing: the way out gives localhost no address: code 3" in made.seen


def test_a_machine_without_the_name_has_no_attempts_by_it(data_dir: Path, tmp_path: Path) -> None:
    """Where hosts(5) lacks `localhost`, as in the least of Debian, attempts by that name are not applicable."""
    (tmp_path / "nsswitch").write_text("hosts: files\n")
    program = f'mount --bind /dev/null /etc/hosts; mount --bind {tmp_path}/nsswitch /etc/nsswitch.conf; exec "$@"'
    command = ["unshare", "--mount", "sh", "-ec", program, "sh", sys.executable, "-m", "sandkasten", "security"]
    command += ["--attack", "--user", "sandbox", "--only", "upstream.", "--data-dir", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert re.search(r"^4 attempts in .*: 4 not applicable$", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_an_answer_that_nobody_expected_is_no_hold() -> None:
    """An unexpected answer does not count as held, nor does a missing one."""
    assert judge(("EPERM",), {"a": "EPERM"}).verdict == HELD
    assert judge(("EPERM",), {"a": "EPERM", "b": "EINVAL"}).verdict == BROKEN
    assert judge(("EPERM",), {"a": "ok"}).verdict == BROKEN
    assert judge(("EPERM",), {}).verdict == BROKEN
