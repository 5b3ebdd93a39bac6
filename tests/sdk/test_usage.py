"""The clients in use, against a daemon with real sandboxes."""

from __future__ import annotations

import functools
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import daemon as daemon  # one daemon for this file
from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.e2e.test_published_client import PROGRAM, SCRIPT
from tests.sdk import usage
from tests.sdk.twin import FLAVOURS, run
from tests.waiting import patience

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("command_seed")]

USES_OVER_A_RESTART = (usage.a_restart, usage.a_restart_during_a_command)


@pytest.fixture
def make(daemon: Daemon) -> Iterator[Callable[[Any], Any]]:
    """Maker of a client of the daemon; every session it made is gone afterwards."""
    yield lambda cls: cls(base_url=daemon.wait_url(), api_key=KEY)
    with daemon.client() as client:
        for session in client.get("/v1/sessions").json():
            client.delete(f"/v1/sessions/{session['id']}")


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("use", usage.USES, ids=lambda use: use.__name__)
def test_uses(use: Callable[..., Any], flavour: str, make: Callable[[Any], Any]) -> None:
    """Each is what its docstring says, on asyncio, on trio and in a thread."""
    run(flavour, use, make)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_files(flavour: str, make: Callable[[Any], Any], tmp_path: Path) -> None:
    """Contents, directories, changes and edits, with local files beside them."""
    run(flavour, usage.files, make, tmp_path)


_LARGE = """
import sys
from pathlib import Path
from tests.sdk import twin, usage
flavour, url, key, directory = sys.argv[1:]
twin.run(flavour, usage.large_files, lambda cls: cls(base_url=url, api_key=key), Path(directory))
"""


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_large_files_take_little_memory(flavour: str, daemon: Daemon, tmp_path: Path) -> None:
    """In a process of its own, as one can't say afterwards what a process needed before."""
    command = [sys.executable, "-c", _LARGE, flavour, daemon.wait_url(), KEY, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=patience(60), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shutil.rmtree(tmp_path)


def test_a_daemon_that_is_killed_is_a_lost_connection(tmp_path: Path) -> None:
    """Streams, commands and processes go on with the next daemon, nothing twice and nothing missing."""
    unix = ("--listen", f"unix:{tmp_path}/daemon.sock")
    begun = [threading.Event() for _ in range(2 * len(FLAVOURS))]
    with ThreadPoolExecutor(len(begun)) as threads:
        with running_daemon(tmp_path / "data", *unix) as first:
            url = first.wait_url()
            # httpcore2's blocking connect to a unix socket that nobody listens on leaves the socket to the collector.
            addresses = {flavour: url if flavour == "sync" else unix[1] for flavour in FLAVOURS}
            waiting = [
                threads.submit(run, flavour, use, functools.partial(_patient, addresses[flavour]), event)
                for (flavour, use), event in zip(product(FLAVOURS, USES_OVER_A_RESTART), begun, strict=True)
            ]
            for event, each in zip(begun, waiting, strict=True):
                while not event.wait(0.1) and not each.done():
                    pass
            first.stop(signal.SIGKILL)
        with running_daemon(tmp_path / "data", *unix, "--listen", url.removeprefix("http://")) as second:
            second.wait_url()
            for each in waiting:
                each.result()


def _patient(address: str, cls: Any) -> Any:  # the class of a client, and the client
    return cls(base_url=address, api_key=KEY, timeout=patience(60))


def test_the_programs_of_the_docs_print_what_is_shown(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each program of the README and of docs/sdk.md, as it stands."""
    monkeypatch.setenv("SANDKASTEN_URL", daemon.wait_url())
    monkeypatch.setenv("SANDKASTEN_API_KEY", KEY)
    text = "".join((Path(__file__).parents[2] / page).read_text() for page in ("README.md", "docs/sdk.md"))
    programs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(programs) == text.count("```python") >= 6
    for program, shown in programs:
        exec(compile(program, "docs/sdk.md", "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out == shown


def test_programs_of_the_published_client_run_here(daemon: Daemon, tmp_path: Path) -> None:
    """The same programs that are run with the client of PyPI."""
    command = [sys.executable, "-c", SCRIPT, daemon.wait_url(), KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.stdout == "every call worked\n", done.stderr
    (tmp_path / ".sandkasten").mkdir()
    (tmp_path / ".sandkasten/api-key").write_text(KEY + "\n")
    command = [sys.executable, "-c", PROGRAM.replace("http://127.0.0.1:8080", daemon.wait_url())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=patience(60), check=False)
    assert done.stdout == "0 hello from the sandbox\n1\n2\n3\n", done.stderr
