"""The recipes of docs/network.md as they stand there, each in a session with a world outside."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from sandkasten.actors.tree import LocalSupervisor
from sandkasten.api.resources.fields import parse
from sandkasten.api.resources.sessions import CreateRequest, PatchRequest
from sandkasten.config import Config
from sandkasten.config.files import load_config
from sandkasten.config.values import BUILT_IN_GROUPS
from sandkasten.model import ExecSpec, Session, SessionSpec
from sandkasten.model.network import NewSecret
from tests.kernel import tool_servers as servers
from tests.kernel.test_network import SITE, served
from tests.kernel.world import World, http, world
from tests.waiting import patience

PAGE = Path(__file__).parents[2].joinpath("docs/network.md").read_text()
RECIPES = PAGE.split("\n## Recipes\n")[1].split("\n## ")[0]
MIRROR, MIRROR_NAME = "10.20.0.5", "packages.internal.example"
INDEX = BUILT_IN_GROUPS["python"]
NAMES = (*INDEX, "api.example.org", "paste.example.org", MIRROR_NAME)
VALUE = "the value of this test"


def blocks(text: str, kind: str) -> list[str]:
    """Return the blocks of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


ASKED = [json.loads(each) for each in blocks(RECIPES, "json")]
REACH = """
import json, ssl, sys, urllib.request
reached = []
for name in sys.argv[1:]:
    request = urllib.request.Request(f"https://{name}/", headers={"Authorization": os.environ.get("API_TOKEN", "")})
    try:
        urllib.request.urlopen(request, timeout=20, context=ssl._create_unverified_context()).read()
    except OSError:
        continue
    reached.append(name)
print(json.dumps(reached))
"""


def spec_of(asked: dict[str, Any], **env: str) -> SessionSpec:
    """Return the spec of a body as the API reads it, with more variables."""
    spec = parse(asked, CreateRequest).to_spec(default_limits=Config().defaults.limits, key_header=None)
    return attrs.evolve(spec, env={**spec.env, **env})


async def reached(supervisor: LocalSupervisor, session: Session, names: Sequence[str] = NAMES) -> list[str]:
    """Return the names that a program inside gets an answer from over TLS."""
    argv = ("python3", "-c", f"import os\n{REACH}", *names)
    with trio.fail_after(patience(60)):
        result = await supervisor.exec(session.id, ExecSpec(argv=argv))
    assert result.end.exit_code == 0, result.output
    return list(json.loads(result.stdout))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, f"{SITE}/32", f"{MIRROR}/32") as made:
        made.name({**dict.fromkeys(NAMES, SITE), MIRROR_NAME: MIRROR})
        yield made


@pytest.fixture
def authority(tmp_path: Path) -> servers.Authority:
    return servers.Authority(tmp_path, *NAMES)


def test_the_requests_of_the_page_are_taken() -> None:
    """Each block of JSON that has a network, as a create or as a change."""
    found = [json.loads(each) for each in blocks(PAGE, "json")]
    for asked in found:
        parse(asked, PatchRequest if "if_revision" in asked else CreateRequest)
    assert len(found) >= 8


async def test_each_reaches_what_it_says(
    config: Config, outside: World, authority: servers.Authority, tmp_path: Path
) -> None:
    """Nothing else is reached; the key of the API is with the API, and not inside."""
    pytest.importorskip("cryptography", reason="needs the extra secrets")
    index, api, with_key, all_but_one, _mirror = ASKED
    heads: list[bytes] = []

    def keep_and_answer(connection: socket.socket) -> None:
        heads.append(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    outside.serve(SITE, 443, authority.over_tls(keep_and_answer))
    async with served(config, outside, ca_file=tmp_path / "ca.pem") as supervisor:
        await supervisor.put_secret(NewSecret("api-key", VALUE, ["api.example.org"]))
        wanted = [(index, list(INDEX)), (api, ["api.example.org"]), (with_key, ["api.example.org"])]
        wanted.append((all_but_one, [*INDEX, "api.example.org"]))
        for asked, names in wanted:
            session = await supervisor.create(spec_of(asked))
            assert await reached(supervisor, session) == names
            if asked is api:
                limits = (await supervisor.network(session.id)).network.limits
                assert limits.bytes_up == 10 * 1024 * 1024
            is_shown = await supervisor.exec(session.id, ExecSpec("env | grep -c 'value of this test'"))
            assert is_shown.stdout == b"0\n"
            assert [VALUE.encode() in each for each in heads] == [asked is with_key] * len(names)
            heads.clear()


async def test_a_mirror_takes_the_place_of_the_index(
    config: Config, outside: World, authority: servers.Authority, tmp_path: Path
) -> None:
    """With the operator's settings of the page pip installs from it, and the public index is not there."""
    (settings,) = blocks(RECIPES, "yaml")
    file = tmp_path / "sandkasten.yaml"
    file.write_text(settings)
    said = attrs.asdict(load_config(file, environ={}).egress, recurse=False)
    outside.serve(MIRROR, 443, authority.over_tls(servers.python_index()))
    outside.serve(SITE, 443, authority.over_tls(http(b"public")))
    async with served(config, outside, **said) as supervisor:
        session = await supervisor.create(spec_of(ASKED[-1], PIP_CERT="/tmp/ca.pem"))
        for command in (f"cat >/tmp/ca.pem <<'END'\n{authority.certificate}\nEND", "python3 -m pip install greeter"):
            with trio.fail_after(patience(90)):
                result = await supervisor.exec(session.id, ExecSpec(f"{command} 2>&1"))
            assert result.end.exit_code == 0, result.output
        assert b"Successfully installed greeter" in result.output
        assert await reached(supervisor, session, [*INDEX, "api.example.org"]) == []
