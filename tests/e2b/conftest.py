"""An environment with E2B's SDKs as published, an image with ipykernel, and one daemon that serves E2B's API."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from sandkasten.images.catalog import Catalog
from sandkasten.model.image import ImageConfig
from tests.e2e.daemon import KEY, Daemon, running_daemon
from tests.waiting import patience

ROOT = Path(__file__).parents[2]
SDKS = ROOT / os.environ.get("E2B_SDKS", ".venv-e2b")
PROGRAMS = Path(__file__).parent / "programs"
_SECONDS = 60
_PACKAGES = "/opt/kernel"
_UNNEEDED = {"jedi", "tzdata"}
"""Packages that a kernel does without, with a third of the files."""

Scenarios = dict[str, Any]
"""Results of a program's scenarios, JSON values, by their names."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="sandkasten-test-") as directory,
        running_daemon(
            Path(directory), SANDKASTEN_E2B_ENABLED="true", SANDKASTEN_PREVIEW_LISTEN="127.0.0.1:0"
        ) as daemon,
        daemon.client() as client,
    ):
        # The process of the ways out begins with the first session that has one, and lasts as long as its daemon.
        first = client.post("/v1/sessions", json={"network": "open"}).json()["id"]
        client.delete(f"/v1/sessions/{first}")
        yield daemon


@pytest.fixture(scope="module")
def run(daemon: Daemon) -> Callable[..., Scenarios]:
    """Runs a program of scenarios in a language with the published SDK; they leave no sandbox."""

    def run(language: str, program: str = "scenarios") -> Scenarios:
        python = SDKS / "bin/python"
        node = shutil.which("node")
        if not (SDKS / ".installed").exists() or (
            language == "javascript" and not (SDKS / "node_modules/e2b").exists()
        ):
            pytest.skip("needs E2B's SDKs: `make .venv-e2b/.installed`, with npm for JavaScript's")
        command = {
            "python": [str(python), str(PROGRAMS / f"{program}.py"), "sync"],
            "python, async": [str(python), str(PROGRAMS / f"{program}.py"), "async"],
            "javascript": [str(node), str(PROGRAMS / f"{program}.cjs")],
        }[language]
        url = daemon.wait_url()
        ours = ("E2B", "PYTHON", "NODE", "SANDKASTEN")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        variables |= {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY, "NO_PROXY": "127.0.0.1"}
        variables["NODE_PATH"] = str(SDKS / "node_modules")
        done = subprocess.run(
            command,
            env=variables,
            cwd=daemon.data_dir,
            capture_output=True,
            text=True,
            timeout=patience(_SECONDS),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        with daemon.client() as client:
            assert client.get("/v1/sessions").json() == []
        return {value["name"]: value["value"] for value in map(json.loads, done.stdout.splitlines())}

    return run


def publish_interpreter(data_dir: Path) -> None:
    """Make the image `code-interpreter-v1` of the machine's own system, with ipykernel. Skips where that can't be."""
    packages = next(SDKS.glob("lib/python3.*/site-packages"), None)
    version = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True, check=False).stdout
    if packages is None or not version.startswith(f"Python {packages.parent.name.removeprefix('python')}."):
        pytest.skip("needs the packages of `make .venv-e2b/.installed`, for the machine's own python3")
    catalog = Catalog(data_dir)
    with catalog.building("code-interpreter-v1") as directory:
        files = directory / "rootfs"
        (files / "opt").mkdir(exist_ok=True)
        _copy("--archive", f"{catalog.trees('host')[0]}/.", files)
        (files / _PACKAGES[1:]).mkdir()
        needed = sorted(_needed(packages, "ipykernel", "matplotlib", "e2b-charts"))
        if not _copy("--archive", "--link", *needed, files / _PACKAGES[1:]):  # it is on another file system
            assert _copy("--archive", *needed, files / _PACKAGES[1:])
        config = ImageConfig(env={"PYTHONPATH": _PACKAGES})
        catalog.publish(directory, attrs.evolve(catalog.get("host"), name="code-interpreter-v1", config=config))


def _needed(packages: Path, *names: str) -> set[Path]:
    """Return the directories and files of packages, and of all that they need."""
    found = {_plain(each.name): each for each in importlib.metadata.distributions(path=[str(packages)])}
    todo, seen, files = list(names), set(_UNNEEDED), set()
    while todo:
        name = _plain(todo.pop())
        if name in seen or name not in found:
            continue
        seen.add(name)
        files |= {packages / path.parts[0] for path in found[name].files or () if path.parts[0] != ".."}
        todo += [re.split(r"[^\w.-]", each)[0] for each in found[name].requires or () if "extra ==" not in each]
    return files - {packages / "__pycache__"}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _copy(*arguments: object) -> bool:
    return subprocess.run(["cp", *map(str, arguments)], stderr=subprocess.DEVNULL, check=False).returncode == 0
