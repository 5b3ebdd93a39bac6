"""The wheel as users install it: its top-level names, and a program beside it that has modules of its own."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.waiting import patience

ROOT = Path(__file__).parents[2]
SOURCES = ("README.md", "LICENSE", "pyproject.toml", "setup.py", "sandkasten", "nsinit", "runner", "egress")
PACKAGES = {"sandkasten", "sandkasten_nsinit", "sandkasten_runner", "sandkasten_egress"}
IMPORT = re.compile(r"\s*(from|import) (nsinit|runner|egress)\b")
PROGRAM = """
import sys
import nsinit, runner
import sandkasten, trio

async def main() -> None:
    async with sandkasten.open_supervisor(sandkasten.Config(data_dir=sys.argv[1])) as supervisor:
        session = await supervisor.create(sandkasten.SessionSpec())
        result = await supervisor.exec(session.id, sandkasten.ExecSpec("echo from inside"))
        print(result.stdout.decode(), end="")

trio.run(main)
print(nsinit.OWNER, runner.OWNER, "sandkasten_runner.wire.protocol" in sys.modules)
"""

pytestmark = pytest.mark.e2e


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the command of docs/sdk.md, without an index, of a copy, so that the tree gets no build directories."""
    place = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    (words,) = re.findall(r"`\.venv/bin/(pip wheel [^`]+)`", (ROOT / "docs/sdk.md").read_text())
    _run(sys.executable, "-m", *words.split(), "-q", "--no-index", "--no-build-isolation", cwd=place)
    (built,) = (place / "dist").iterdir()
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The Python of an environment with this wheel; what it depends on comes from the environment of the tests."""
    _run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps")
    _run(*pip, f"{wheel}[server,mcp]", cwd=tmp_path)
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (packages / "of_the_tests.pth").write_text("\n".join(site.getsitepackages()))  # its own .pth files are not read
    tmp_path.chmod(0o755)
    return python


def test_the_wheel_has_no_name_that_another_could_have(wheel: Path) -> None:
    """`nsinit`, `runner` and `egress` are the tree's names; every import of them was renamed with them."""
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
        lines = [
            line for name in names if name.suffix == ".py" for line in archive.read(str(name)).decode().splitlines()
        ]
        (top_level,) = (archive.read(str(name)).decode() for name in names if name.name == "top_level.txt")
    assert {name.parts[0] for name in names if not name.parts[0].endswith(".dist-info")} == PACKAGES
    assert set(top_level.split()) == PACKAGES
    assert [line for line in lines if IMPORT.match(line)] == []
    tree = {path.relative_to(ROOT) for top in ("nsinit", "runner", "egress") for path in (ROOT / top).rglob("*.py")}
    assert {f"sandkasten_{path}" for path in tree} <= {str(name) for name in names}


def test_the_wheel_has_the_files_beside_the_code(wheel: Path) -> None:
    """Units of the service manager for `install-service`, the database's schema, the mark of a typed package, and
    recipes of images."""
    beside = {path for path in (ROOT / "sandkasten").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert {path.suffix for path in beside} == {".service", ".sysusers", ".sql", ".typed", ".yaml"}
    with zipfile.ZipFile(wheel) as archive:
        assert {str(path.relative_to(ROOT)) for path in beside} <= set(archive.namelist())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_with_modules_of_those_names_runs_sandboxes(installed: Path, tmp_path: Path) -> None:
    """The program keeps its `nsinit` and `runner`, and the library, the privileged process and PID 1 have theirs."""
    for name in ("nsinit", "runner"):
        (tmp_path / f"{name}.py").write_text("OWNER = 'the program'\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    assert _run(installed, "program.py", tmp_path / "data", cwd=tmp_path).splitlines() == [
        "from inside",
        "the program the program True",
    ]


def test_the_installed_command_answers(installed: Path, tmp_path: Path) -> None:
    """As a console script of the environment."""
    assert _run(installed.with_name("sandkasten"), "version", cwd=tmp_path) == "1.0.0.dev0\n"
