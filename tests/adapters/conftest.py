"""The frameworks' environment, one daemon for each file of tests, and programs that run against it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents/bin/python"
PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = ROOT / "docs/examples"
_SECONDS = 240
_LEFT = re.compile(r"unclosed <?(?:socket|ssl|transport)|was never (?:awaited|retrieved)|destroyed but it is pending")
"""Python's complaints of a program that leaves connections or tasks behind; frameworks leave queues of their own."""

Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that serves previews."""
    with running_daemon(tmp_path_factory.mktemp("data"), SANDKASTEN_PREVIEW_LISTEN="127.0.0.1:0") as daemon:
        daemon.wait_url()
        yield daemon


@pytest.fixture(scope="module")
def run(daemon: Daemon) -> Callable[..., Ran]:
    """Runs a file with the frameworks' interpreter, and checks that nothing is left: session, warning, complaint."""
    if not (PYTHON.parent.parent / ".installed").exists():
        pytest.skip("needs the agent frameworks: `make .venv-agents/.installed`")
    url = daemon.wait_url()

    def run(path: Path, *arguments: str, **environment: str) -> Ran:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SANDKASTEN"))}
        variables |= {"SANDKASTEN_URL": url, "SANDKASTEN_API_KEY": KEY, **_QUIET, **environment}
        done = subprocess.run(
            [str(PYTHON), "-W", "always::ResourceWarning", str(path), *arguments],
            env=variables,
            cwd=daemon.data_dir,
            capture_output=True,
            text=True,
            timeout=patience(_SECONDS / 4),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not _LEFT.search(done.stderr), done.stderr
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            left = client.get("/v1/sessions").json()
            for each in left:
                client.delete(f"/v1/sessions/{each['id']}")
        assert left == [] or arguments, left
        return done

    return run


_QUIET: Mapping[str, str] = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "DO_NOT_TRACK": "1",
    "INSPECT_DISPLAY": "none",
    "NO_PROXY": "127.0.0.1",
}
"""Nothing is sent to anybody, and no key is needed."""


def results(done: Ran) -> dict[str, Any]:
    """Return what a program of scenarios printed, by the names of the scenarios."""
    return {value["name"]: value for value in map(json.loads, done.stdout.splitlines())}


def scenarios(program: str) -> list[str]:
    """Return the names of a program's scenarios, without running it: the frameworks are not here."""
    return re.findall(r"^async def ([a-z]\w+)\(\) -> None:", (PROGRAMS / program).read_text(), re.MULTILINE)
