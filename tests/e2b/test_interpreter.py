"""E2B's code interpreter SDK as published, unchanged, against the real daemon."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import attrs
import pytest

from sandkasten.images.catalog import Catalog
from sandkasten.model.image import ImageConfig
from tests.e2b.conftest import SDKS, Scenarios
from tests.e2e.daemon import Daemon

_PACKAGES = "/opt/kernel"
_UNNEEDED = {
    "e2b",
    "jedi",
    "opentelemetry",
    "pip",
    "pkg_resources",
    "protobuf",
    "rich",
    "setuptools",
    "tzdata",
}
"""Packages that a kernel does without, with most of the files."""


@pytest.fixture(scope="module")
def image(daemon: Daemon) -> None:
    """The machine's own system with ipykernel, as the template that the SDK asks for."""
    packages = next(SDKS.glob("lib/python3.*/site-packages"), None)
    version = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True, check=False).stdout
    if packages is None or not version.startswith(f"Python {packages.parent.name.removeprefix('python')}."):
        pytest.skip("needs the packages of `make .venv-e2b/.installed`, for the machine's own python3")
    catalog = Catalog(daemon.data_dir)
    with catalog.building("code-interpreter-v1") as directory:
        files = directory / "rootfs"
        (files / "opt").mkdir(exist_ok=True)
        _copy("--archive", f"{catalog.trees('host')[0]}/.", files)
        (files / _PACKAGES[1:]).mkdir()
        needed = [each for each in packages.iterdir() if each.name.lower().partition("-")[0] not in _UNNEEDED]
        if not _copy("--archive", "--link", *needed, files / _PACKAGES[1:]):  # it is on another file system
            assert _copy("--archive", *needed, files / _PACKAGES[1:])
        config = ImageConfig(env={"PYTHONPATH": _PACKAGES})
        catalog.publish(directory, attrs.evolve(catalog.get("host"), name="code-interpreter-v1", config=config))


def _copy(*arguments: object) -> bool:
    return subprocess.run(["cp", *map(str, arguments)], stderr=subprocess.DEVNULL, check=False).returncode == 0


_RESULTS = {
    "text": ["m", ["é\n"], ["e\n"], ["é\n"], None, 1],
    "state": "2",
    "program": "user /home/user /home/user",
    "error": ["ZeroDivisionError", "division by zero", True],
    "variables": ["here", None, "b"],
    "large output": 3_000_001,
    "too large a result": [0, "a result of 9000018 bytes is not shown: "],
    "plot": ["iVBORw0KGgo", "line", "T", "s", [[0, 1], [1, 3]]],
    "formats": [["html"], ["markdown"], ["latex"], ["json"], ["svg"], ["application/x-own", "data"]],
    "own": ["own", {"a": 1}],
    "context": ["python", "/home/user/w", "/home/user/w"],
    "apart": "NameError",
    "listed": [2, True, []],
    "restarted": "NameError",
    "died": ["KernelDied", "2"],
}
"""Results of the scenarios that are the same in every language."""

_OF_PYTHON = {
    "refused": ["NotFoundException", "SandboxException", "SandboxException", "NotFoundException", "NotFoundException"],
    "time limit": ["TimeoutException", "goes on"],
}
_OF_JAVASCRIPT = {
    "refused": ["NotFoundError", "SandboxError", "SandboxError", "NotFoundError", "NotFoundError"],
    "time limit": ["TimeoutError", "goes on"],
}


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize("language", ["python", "python, async", "javascript"])
def test_code_runs_unchanged(language: str, run: Callable[..., Scenarios]) -> None:
    """Code, its output, results and errors, contexts, restarts and time limits are what each SDK expects."""
    expected = {**_RESULTS, **(_OF_JAVASCRIPT if language == "javascript" else _OF_PYTHON)}
    assert run(language, "interpreter") == expected
