"""The filters of our own processes in a running installation: who is under how many, and what says so."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import httpx

from tests.e2e.daemon import Daemon, running_daemon
from tests.e2e.test_privilege import children, helpers, status_of

OFF = {"SANDKASTEN_OWN_FILTERS": "false"}


def filters_of(pid: int | str) -> tuple[str, str]:
    """Return a process's seccomp mode and its number of filters."""
    status = status_of(pid)
    return status["Seccomp"], status["Seccomp_filters"]


def filters_of_threads(pid: int) -> set[tuple[str, str]]:
    """Return the filters of a process's threads, but of those that end meanwhile."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.add(filters_of(f"{pid}/task/{thread}"))
    return found


def protection(client: httpx.Client) -> dict[str, str]:
    (found,) = [each for each in client.get("/v1/system").json()["protections"] if each["name"] == "own_filters"]
    return dict(found)


def by_name(nsinit: int) -> dict[str, set[tuple[str, str]]]:
    """Return the filters of nsinit's children by their names."""
    found: dict[str, set[tuple[str, str]]] = {}
    for pid in children(nsinit):
        with suppress(FileNotFoundError, ProcessLookupError):  # some make one thing and end
            found.setdefault(status_of(pid)["Name"], set()).add(filters_of(pid))
    return found


def test_every_process_of_ours_is_under_a_filter(daemon: Daemon, client: httpx.Client) -> None:
    """Each thread of the daemon has one. The launcher has one, which all below inherit, and each process with work of
    its own has another; what becomes a sandbox has the launcher's alone."""
    session = client.post("/v1/sessions", json={})
    assert session.status_code == 201
    launcher, nsinit = helpers(daemon)
    pid = daemon.process.pid
    assert filters_of_threads(pid) == {("2", "1")}
    assert (filters_of(launcher), filters_of(nsinit)) == (("2", "1"), ("2", "2"))
    found = by_name(nsinit)
    assert {name: found[name] for name in ("nsinit-seed", "nsinit-forker")} == {
        "nsinit-seed": {("2", "1")},
        "nsinit-forker": {("2", "1")},
    }
    for name in ("nsinit-builder", "nsinit-cgroups", "nsinit-emptier"):
        assert found[name] <= {("2", "2"), ("2", "3")}
    assert protection(client)["state"] == "on"


def test_the_filters_can_be_switched_off_and_everything_says_so(data_dir: Path) -> None:
    """For debugging: no process has one, the start and the API say so, and sessions run as ever."""
    with running_daemon(data_dir, **OFF) as bare, bare.client() as client:
        assert client.post("/v1/sessions", json={}).status_code == 201
        launcher, nsinit = helpers(bare)
        found = {filters_of(pid) for pid in (bare.process.pid, launcher, nsinit)}
        assert by_name(nsinit)["nsinit-builder"] == by_name(nsinit)["nsinit-cgroups"] == {("0", "0")}
        assert found == {("0", "0")}
        assert protection(client)["state"] == "off"
        assert any("own_filters is off" in line for line in bare.printed)
        bare.wait_log("no_filter_of_nsinit")
