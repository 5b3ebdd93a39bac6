"""Rules of imports: four trust domains with arrows one way, and layers inside the daemon."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest
from grimp import Layer

ROOT = Path(__file__).resolve().parents[2]

# Highest first; packages of one line don't import each other unless the line says so.
LAYERS: dict[str, tuple[Layer, ...]] = {
    "sandkasten": (
        Layer("__main__"),
        Layer("cli"),
        Layer("security"),
        Layer("app"),
        Layer("actors", "api"),
        Layer("links", "admission", "host", "images", "output", independent=False),
        Layer("store", "journal", "counters", "supervisor"),
        Layer("config", "log"),
        Layer("model", "crash", "logcontext"),
        Layer("adapters"),
        Layer("building", "client", "session", "types", "exceptions", "agents", "sync", "testing", "mcp"),
        Layer("sdk"),
        Layer("contexts"),
        Layer("installation", "errors", "image_names"),
    ),
    "sandkasten.actors": (
        Layer("tree"),
        Layer("tree_work", "tree_workspaces", "node_view", "diagnosis", independent=False),
        Layer("node"),
        Layer("session"),
        Layer("runs", "workspaces"),
        Layer("services"),
        Layer("supervision"),
        Layer("core"),
    ),
    "sandkasten.sdk": (
        Layer("client"),
        Layer("session"),
        Layer("run", "files", "terminal"),
        Layer("channels"),
        Layer("streams"),
        Layer("transport"),
        Layer("wire", "waiting", "archives"),
        Layer("types", "text"),
    ),
    "sandkasten.mcp": (
        Layer("server"),
        Layer("tools"),
        Layer("sandboxes", "text"),
    ),
    "sandkasten.api": (
        Layer("app"),
        Layer("routes"),
        Layer("openapi"),
        Layer("examples"),
        Layer("e2b", "websocket"),
        Layer("resources"),
        Layer("http"),
    ),
    "nsinit": (
        Layer("__main__"),
        Layer("tools"),
        Layer("server"),
        Layer("helpers"),
        Layer("sandbox"),
        Layer("storage"),
        Layer("cgroup"),
        Layer("wire"),
        Layer("steps", "own_filters"),
        Layer("kernel", "log", "scheduler", "spawn"),
    ),
    "runner": (
        Layer("server"),
        Layer("files", "programs"),
        Layer("shell"),
        Layer("process", "streams"),
        Layer("loop"),
        Layer("wire"),
    ),
    "egress": (
        Layer("__main__"),
        Layer("gateway", "broker", "barrier"),
        Layer("authority"),
        Layer("safe"),
        Layer("server", "confinement"),
        Layer("way_out"),
        Layer("connection"),
        Layer("guarded", "state"),
        Layer("handed", "substitution", "upstream"),
        Layer("relay", "resolver", "names", "pacing"),
        Layer("preview"),
        Layer("knocking", "brokering"),
        Layer("protocol"),
        Layer("addresses", "dns", "hello", "proxy"),
        Layer("http"),
        Layer("policy"),
    ),
}
CONTRACTS = {
    "runner.wire.protocol",
    "runner.wire.codec",
    "nsinit.wire.protocol",
    "nsinit.wire.launching",
    "nsinit.wire.listing",
    "nsinit.spawn",
    "nsinit.cgroup.beside",
    "egress.protocol",
    "egress.knocking",
    "egress.brokering",
    "egress.policy",
    "egress.names",
    "egress.addresses",
}
"""All that the daemon may know of the other domains: what is said, how processes are started, what a rule is, and which
addresses are special."""
AT_THE_DROP = ("sandkasten.cli.privilege", "nsinit.tools.drop")
"""The one piece of privileged code that runs in the daemon's process: it gives the privilege away."""
SHARED = {"runner.wire.codec", "runner.wire.tarheaders"}
CHILD_ENTRY = {"nsinit.__main__", "nsinit.sandbox.child"}
"""Where the privileged process turns into PID 1 of a sandbox, and so hands over to `runner`."""


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "sandkasten",
        "nsinit",
        "runner",
        "egress",
        include_external_packages=True,
        exclude_type_checking_imports=False,
        cache_dir=None,  # grimp's cache of a checkout whose files moved names modules that are gone
    )


def imports(package: str) -> set[tuple[str, str]]:
    """Return (importer, imported) for every direct import made by a module of `package`."""
    return {
        (module, imported)
        for module in graph().modules
        if module == package or module.startswith(f"{package}.")
        for imported in graph().find_modules_directly_imported_by(module)
    }


def top(module: str) -> str:
    return module.partition(".")[0]


def test_the_daemon_knows_only_the_wire_contracts() -> None:
    """`sandkasten` imports no module of the privileged or the inner domain but their protocols."""
    foreign = {edge for edge in imports("sandkasten") if top(edge[1]) in ("nsinit", "runner", "egress")}
    assert {edge for edge in foreign if edge[1] not in CONTRACTS} == {AT_THE_DROP}
    assert foreign


IN_THE_JAIL = ("nsinit.tools.unpack", "backports")
"""The one import of privileged code from elsewhere: the decoder of zstd, called in the unpacker's jail alone."""


@pytest.mark.parametrize("package", ["nsinit", "runner"])
def test_privileged_and_inner_code_is_standard_library_only(package: str) -> None:
    """Nothing from a package index runs as root or beside hostile code, but for what reads one compression of
    archives."""
    edges = {(module, top(imported)) for module, imported in imports(package)}
    outside = {edge for edge in edges if edge[1] not in ("nsinit", "runner", *sys.stdlib_module_names)}
    assert outside - {IN_THE_JAIL} == set()


def test_the_way_out_imports_little() -> None:
    """Nothing of the other domains and three packages, with one more in the module that makes certificates; one package
    for the modules that the daemon imports, too."""
    outside = {(module, top(name)) for module, name in imports("egress") if top(name) != "egress"}
    foreign = {(module, name) for module, name in outside if name not in sys.stdlib_module_names}
    assert {name for _, name in foreign - {("egress.authority", "cryptography")}} <= {"trio", "attrs", "h11"}
    assert {name for module, name in foreign if module in CONTRACTS} == {"attrs"}
    own = {name for module, name in imports("egress") if module in CONTRACTS and top(name) == "egress"}
    assert own <= CONTRACTS


def test_the_runner_imports_nothing_once_it_runs() -> None:
    """PID 1 has another root by then: a module would be missing, or be the session's own."""
    late = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "runner").rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def test_the_runner_imports_nothing_of_the_others() -> None:
    """PID 1 of a sandbox carries its own code alone."""
    assert {edge for edge in imports("runner") if top(edge[1]) in ("nsinit", "sandkasten", "egress")} == set()


def test_only_the_child_entry_of_nsinit_knows_the_runner() -> None:
    """Everything else privileged shares the wire codec and the reading of tar headers with it, no more."""
    edges = {edge for edge in imports("nsinit") if top(edge[1]) == "runner" and edge[1] not in SHARED}
    assert {edge for edge in edges if edge[0] not in CHILD_ENTRY} == set()
    assert {edge for edge in imports("nsinit") if top(edge[1]) in ("sandkasten", "egress")} == set()


def test_what_reads_archives_is_a_program_of_its_own() -> None:
    """No module of the fork server, which has all privileges, can come to run what takes an archive apart, or what
    reads the trees of strangers."""
    for name in ("unpack", "pack"):
        assert graph().find_modules_that_directly_import(f"nsinit.tools.{name}") == set()


@pytest.mark.parametrize("container", LAYERS)
def test_imports_go_down_the_layers(container: str) -> None:
    """No package imports one above it, type-only imports included."""
    broken = graph().find_illegal_dependencies_for_layers(layers=LAYERS[container], containers={container})
    assert {(each.importer, each.imported) for each in broken} == set()


@pytest.mark.parametrize("container", LAYERS)
def test_every_package_has_a_layer(container: str) -> None:
    """A new package or module must say where it belongs."""
    children = {module.rpartition(".")[2] for module in graph().find_children(container)}
    assert children - {name for layer in LAYERS[container] for name in layer.module_tails} == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither at run time nor for types alone: a reader can begin at the bottom."""
    assert circles() == set()


def circles() -> set[frozenset[str]]:
    """Return the sets of modules that import each other in a circle (strongly connected components)."""
    sorter = graphlib.TopologicalSorter(
        {module: graph().find_modules_directly_imported_by(module) for module in graph().modules}
    )
    reachable = {module: graph().find_upstream_modules(module) for module in graph().modules}
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return {
            frozenset({module} | {other for other in reachable[module] if module in reachable.get(other, ())})
            for module in graph().modules
            if module in reachable[module] or any(module in reachable.get(other, ()) for other in reachable[module])
        }
    return set()


def test_the_clients_import_errors_and_contexts_and_nothing_else_of_ours() -> None:
    """The SDK runs where no server is installed."""
    edges = {edge for package in ("sandkasten.sdk", "sandkasten.sync") for edge in imports(package)}
    ours = {imported for _, imported in edges if top(imported) in ("sandkasten", "nsinit", "runner", "egress")}
    assert {name for name in ours if not name.startswith(("sandkasten.sdk", "sandkasten.sync"))} == {
        "sandkasten.contexts",
        "sandkasten.errors",
    }
    assert {edge for edge in imports("sandkasten.contexts") if top(edge[1]) not in sys.stdlib_module_names} == {
        ("sandkasten.contexts", "sandkasten.installation")
    }
    below = imports("sandkasten.errors") | imports("sandkasten.installation")
    assert {name for _, name in below if top(name) not in sys.stdlib_module_names} == {"yaml"}


def test_the_adapters_import_the_clients_and_nobody_imports_the_adapters() -> None:
    """Each is over the clients alone, knows no other, and loads its framework for the one that imports it."""
    package = "sandkasten.adapters"
    edges = {edge for edge in imports(package) if top(edge[1]) in ("sandkasten", "nsinit", "runner", "egress")}
    clients = ("sandkasten.sdk", "sandkasten.sync", "sandkasten.errors", "sandkasten.mcp.tools")
    assert edges
    assert {edge for edge in edges if not edge[1].startswith(clients) and edge[1] != "sandkasten"} == set()
    adapters = {module for module in graph().modules if module.startswith(package)}
    importers = {each for adapter in adapters for each in graph().find_modules_that_directly_import(adapter)}
    assert importers - adapters == set()


def test_one_file_of_the_clients_knows_their_http_library() -> None:
    """A change of the library is a change of one file, and its twin."""
    edges = {edge for package in ("sandkasten.sdk", "sandkasten.sync") for edge in imports(package)}
    outside = {
        (top(imported), importer) for importer, imported in edges if top(imported) not in sys.stdlib_module_names
    }
    assert {edge for edge in outside if edge[0] != "sandkasten"} == {
        ("anyio", "sandkasten.sdk.waiting"),
        *((name, f"sandkasten.{twin}.transport") for name in ("httpcore2", "wsproto") for twin in ("sdk", "sync")),
    }


def test_what_is_sent_into_sessions_is_standard_library_only() -> None:
    """The attempts made inside import nothing that a session's own Python lacks, and nothing of the daemon's."""
    package = "sandkasten.security.probes"
    foreign = {edge for edge in imports(package) if not edge[1].startswith(package)}
    assert {name for _, name in foreign if top(name) not in sys.stdlib_module_names} == set()
    assert foreign


def test_importing_the_library_loads_no_web_framework() -> None:
    """A program that embeds the supervisor pays for neither Quart nor hypercorn."""
    code = (
        "import sys, sandkasten, sandkasten.app, sandkasten.supervisor\n"
        "print(sorted({'quart', 'hypercorn', 'h11', 'werkzeug'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def attributes(path: Path, *wanted: str) -> set[str]:
    """Return which of these attributes a file uses; one that names none is not parsed."""
    text = path.read_text()
    if not any(name in text for name in wanted):
        return set()
    return {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)} & set(wanted)


def test_only_one_file_loads_a_c_library() -> None:
    """System calls have one home; the fork server's entry only loads a library early that would else be loaded late.

    The attempts that are sent into sessions bring their own: they run there, not here. So does the way out, which
    imports nothing of nsinit's.
    """
    found = set()
    for package in ("sandkasten", "nsinit", "runner", "egress"):
        for path in (ROOT / package).rglob("*.py"):
            if attributes(path, "CDLL", "PyDLL", "LoadLibrary"):
                found.add(str(path.relative_to(ROOT)))
    probes = {f"sandkasten/security/probes/{name}.py" for name in ("kernel", "network")}
    assert found == {"nsinit/kernel/syscalls.py", "nsinit/__main__.py", "egress/confinement.py"} | probes


def test_signals_are_received_by_the_command_line_alone() -> None:
    """As a library the daemon leaves the signals of its host alone."""
    found = set()
    for path in (ROOT / "sandkasten").rglob("*.py"):
        if attributes(path, "add_signal_handler", "open_signal_receiver", "set_wakeup_fd"):
            found.add(str(path.relative_to(ROOT)))
    assert found == {f"sandkasten/cli/{name}.py" for name in ("serve", "terminal")}


PACKAGES = sorted(path.parent.relative_to(ROOT) for domain in LAYERS for path in (ROOT / domain).glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_says_what_it_imports_and_where_to_begin(package: Path) -> None:
    """Packages beside it that it imports are named, and no others, unless the sentence says all or those below."""
    text = " ".join((ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or "").split())
    assert "Begin with" in text
    assert re.search(r"\bimports? it\b|may (?:import|read)", text)
    (said,) = re.findall(r"\bImports (.+?)(?:;|\.(?: |$))", text)
    if re.search(r"\b(?:below|every|nothing|alone)\b", said):
        return
    name = ".".join(package.parts)
    beside = {each.name for each in PACKAGES if each.parent == package.parent} - {package.name}
    imported = {
        edge[1].split(".")[len(package.parts) - 1] for edge in imports(name) if edge[1].startswith(f"{top(name)}.")
    }
    assert set(re.findall(r"`(\w+)`", said)) & beside == imported & beside


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_is_described_in_three_to_eight_lines(package: Path) -> None:
    """Less says too little, and more belongs to the modules."""
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    assert 3 <= len(text.splitlines()) <= 8
