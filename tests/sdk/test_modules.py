"""Modules of the clients: the blocking ones are what the asynchronous ones give, and no server is imported."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import sandkasten.sdk
import sandkasten.sync
from sandkasten.sdk import waiting
from sandkasten.sync import waiting as blocking
from tests.sdk import twin
from tests.waiting import slowness


@pytest.mark.parametrize("module", twin.MODULES)
def test_the_twin_is_made_anew(module: str) -> None:
    """No file of the blocking client was edited by hand, or forgotten: `python -m tests.sdk.twin` makes them."""
    assert (twin.TARGET / f"{module}.py").read_text() == twin.make(module)


def test_all_modules_have_a_twin_or_are_shared() -> None:
    """A new module of the asynchronous client is thought of."""
    shared = {"__init__", "archives", "wire", "text", "types", twin.BY_HAND}
    assert {path.stem for path in twin.SOURCE.glob("*.py")} == {*twin.MODULES, *shared}
    assert {path.stem for path in twin.TARGET.glob("*.py")} == {*twin.MODULES, "__init__", twin.BY_HAND}


@pytest.mark.parametrize("name", sandkasten.sdk.__all__)
def test_both_have_the_same_interface(name: str) -> None:
    """Every public method, with its arguments and their defaults."""
    mine, other = getattr(sandkasten.sdk, name), getattr(sandkasten.sync, name)
    renamed = {"aclose": "close"}
    for method, value in inspect.getmembers(mine, inspect.isfunction):
        if not method.startswith("_"):
            found = inspect.signature(getattr(other, renamed.get(method, method)))
            assert list(found.parameters.values()) == list(inspect.signature(value).parameters.values()), method


def test_the_part_by_hand_has_all_names() -> None:
    """Each primitive is there for both."""
    assert {"Lock", "Turns", "sleep", "shield", "in_thread", "FileOf"} <= set(vars(waiting)) & set(vars(blocking))


_SERVER = (
    "attrs",
    "attr",
    "cattrs",
    "hypercorn",
    "orjson",
    "prometheus_client",
    "quart",
    "quart_trio",
    "re2",
    "trio",
    "yaml",
)
_BLOCKED = f"""
import sys
for name in {_SERVER}:
    sys.modules[name] = None
import sandkasten, sandkasten.client, sandkasten.session, sandkasten.types, sandkasten.exceptions
from sandkasten import SandboxClient, sync
with sync.SandboxClient(base_url="http://127.0.0.1:9") as client:
    pass
try:
    sandkasten.Config
except ImportError as error:
    print(error)
try:
    client.node()
except sandkasten.SandkastenError as error:
    print(type(error).__name__)
"""


def test_the_clients_need_no_package_of_the_server() -> None:
    """With every package of the server blocked they are imported and used, and what needs one says which extra."""
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["Config needs the server: pip install 'sandkasten-runtime[server]'", "Lost"]


def test_an_import_loads_no_http_library() -> None:
    """The first client loads the library, so a program that only looks at names starts at once."""
    code = (
        "import sys, sandkasten.sdk, sandkasten.sync; print({'httpcore2', 'wsproto', 'trio', 'ssl'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_command_of_the_server_says_which_extra_it_needs() -> None:
    """Without the server's packages, in one sentence."""
    code = f"import sys; sys.modules |= dict.fromkeys({_SERVER}); "
    code += "from sandkasten.cli.main import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("sandkasten: this command needs the server, whose package ")
    assert done.stderr.endswith(" is not installed: pip install 'sandkasten-runtime[server,mcp]'\n")


@pytest.mark.parametrize("module", ["sandkasten.sync", "sandkasten"])
def test_an_import_is_quick(module: str) -> None:
    """Of each client with its HTTP library, in processor time, without the server's packages."""
    code = (
        f"import sys, time; sys.modules |= dict.fromkeys({_SERVER}); began = time.process_time()\n"
        f"from {module} import SandboxClient; SandboxClient(); print(time.process_time() - began)"
    )
    took_s = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]
    assert min(took_s) < 0.15 * slowness()
