"""`sandkasten image build -f`: images by Dockerfiles, at a daemon."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandkasten.images.catalog import Catalog
from sandkasten.images.layers import open_store
from sandkasten.model.image import ImageConfig
from tests.cli.conftest import Command
from tests.e2e.daemon import Daemon
from tests.kernel.test_layers import base_layer, unpack

ROOT = Path(__file__).parents[2]
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def base(daemon: Daemon) -> None:
    """An image of one program, with a configuration to build on."""
    config = ImageConfig(env={"BASE": "1"}, cmd=("cat",), labels={"kept": "yes"}, exposed_ports=("80/tcp",))
    with open_store(daemon.data_dir) as store:
        store.publish_image("base", layers=[unpack(store, base_layer())], config=config)


@pytest.fixture(scope="module")
def _way_out(command: Command) -> None:
    """The daemon's helpers for networks, which are there from the first session with one on and are no leak of a
    test."""
    command.out("run", "--allow", "a.example", "--", "true")


def built(command: Command, directory: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Build an image by a Dockerfile in a directory that its files come from."""
    (directory / "Dockerfile").write_text(text)
    return command.run("image", "build", *options, str(directory))


def interrupted(command: Command, api: httpx.Client, directory: Path, name: str, *options: str) -> dict[str, Any]:
    """Interrupt a build in the midst of a step; return its session, which is gone by then."""
    (directory / "Dockerfile").write_text("FROM base\nRUN echo begun; while :; do sleep 1; done\n")
    with command.started("image", "build", "--name", name, *options, str(directory)) as process:
        assert process.stderr is not None
        while process.stderr.readline() != b"begun\n":
            pass
        (session,) = api.get("/v1/sessions", params={"label": f"sandkasten.build={name}"}).json()
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert (process.returncode, api.get("/v1/sessions").json()) == (130, [])
    return dict(session)


def inside(command: Command, image: str, script: str, *options: str) -> str:
    """Return what a script prints in a session on an image, as the image has its sessions but for options."""
    done = command.run("run", *options, image, "--", "sh", "-c", script)
    assert done.returncode == 0, done
    return done.stdout


def steps_of(data_dir: Path) -> set[str]:
    """Return the names of the images that builds keep."""
    return {each.name for each in Catalog(data_dir).cached_steps(0)}


FILE = """
ARG TAG=base
FROM ${TAG}
ARG WHO=world
ENV GREETING="hello $WHO" PATH=$PATH:/bin
WORKDIR /app
RUN echo $GREETING $BASE > greeting; id -u; pwd; cat; echo to-stderr >&2
COPY --chmod=640 one* dir /app/sub/
USER 7:8
RUN id -u; id -g; test ! -w /app
LABEL made="by $WHO" other=x
EXPOSE 80 81-82/udp
ENTRYPOINT ["cat"]
CMD ["greeting"]
"""


def test_an_image_is_built_and_built_again_from_what_is_kept(
    command: Command, daemon: Daemon, api: httpx.Client, tmp_path: Path
) -> None:
    """Commands run as the instructions before them say, without input, and their output is passed on; the image has
    files, configuration and a layer for each step that changed some. A second build runs nothing. Another argument, or
    another file, runs what comes behind it. Lists leave out what is kept, and a prune removes it, not the image. An
    export from the server comes back to it as the same image."""
    (tmp_path / "dir").mkdir()
    (tmp_path / "one").write_text("1")
    (tmp_path / "dir" / "two").write_text("2")
    first = built(command, tmp_path, FILE, "--name", "made")
    assert (first.returncode, first.stdout.split(",")[0]) == (0, "made: 3 layers"), first
    lines = first.stderr.splitlines()
    assert lines[:1] + lines[4:10] == [
        "sandkasten: [1/12] FROM ${TAG}",
        "sandkasten: [5/12] RUN echo $GREETING $BASE > greeting; id -u; pwd; cat; echo to-stderr >&2",
        "0",
        "/app",
        "to-stderr",
        "sandkasten: [6/12] COPY --chmod=640 one* dir /app/sub/",
        "sandkasten: [7/12] USER 7:8",
    ]
    said = api.get("/v1/images/made").json()
    config: dict[str, Any] = said["config"]
    assert config["env"] == {"BASE": "1", "GREETING": "hello world", "PATH": f"{SYSTEM_PATH}:/bin"}
    assert (config["user"], config["working_dir"]) == ("7:8", "/app")
    assert (config["entrypoint"], config["cmd"]) == (["cat"], ["greeting"])
    assert config["labels"] == {"kept": "yes", "made": "by world", "other": "x"}
    assert [each.split()[0] for each in config["history"]] == ["RUN", "COPY"]
    assert (config["exposed_ports"], said["source"]) == (["80/tcp", "81/udp", "82/udp"], "commit of a session of base")
    seen = inside(command, "made", "cat greeting; cd sub; stat -c '%n %a %u:%g' *; id -u")
    assert seen == "hello world 1\none 640 0:0\ntwo 640 0:0\n7\n"
    assert command.run("run", "made").stdout == "hello world 1\n"
    kept = steps_of(daemon.data_dir)
    again = built(command, tmp_path, FILE, "--name", "again", "--json")
    assert (again.stderr.count("(as before)"), steps_of(daemon.data_dir)) == (3, kept), again
    assert json.loads(again.stdout)["layers"] == said["layers"]
    other = built(
        command, tmp_path, FILE, "--name", "made", "--replace", "--build-arg", "WHO=you", "--build-arg", "X=1"
    )
    assert (other.stderr.count("(as before)"), "no ARG has taken --build-arg X" in other.stderr) == (0, True), other
    (tmp_path / "one").write_text("11")
    changed = built(command, tmp_path, FILE, "--name", "again", "--replace")
    assert changed.stderr.count("(as before)") == 1, changed
    taken = built(command, tmp_path, FILE, "--name", "made")
    assert (taken.returncode, "--replace takes its place" in taken.stderr) == (1, True)
    elsewhere = Command.of(tmp_path)
    key_file = daemon.data_dir / "api-key"
    elsewhere.out("context", "add", "server", daemon.wait_url(), "--key-file", key_file)
    assert elsewhere.run("image", "export", "again", "-o", "out.tar").returncode == 0
    moved = elsewhere.run("image", "import", "out.tar", "--name", "moved")
    assert (moved.returncode, moved.stdout.startswith("moved: sha256:")) == (0, True), moved
    assert elsewhere.run("image", "import", "dir", "--name", "no").returncode == 125
    there, back = (api.get(f"/v1/images/{name}").json() for name in ("again", "moved"))
    assert (back["config"], back["layers"][1:]) == (there["config"], there["layers"][1:])
    assert {each["name"] for each in api.get("/v1/images").json()["images"]} == {
        *("base", "host", "made", "again", "moved")
    }


STAGES = """
FROM base AS first
RUN mkdir -p /out/deep && echo made > /out/deep/file && echo top > /out/top && ln -s top /out/link && chmod 700 /out/top
FROM base AS unused
RUN exit 1
FROM first AS second
RUN echo more > /out/more
FROM base
RUN echo 'app:x:70:71::/:' >> /etc/passwd; echo 'crew:x:72:' >> /etc/group; mkdir real; ln -s real linked
COPY --from=first /out/deep /copied/
COPY --from=second --chown=app:crew /out/t* /out/more /mine/new/
COPY --from=0 /out/top /one
COPY --chown=app dir /linked/app/
ARG WORD=word
COPY --chmod=600 --chown=app <<ONE <<"TWO" /linked/app/
it's "$WORD"
ONE
$WORD
TWO
COPY <<THREE /three
three
THREE
USER app:crew
RUN <<EOF
id -u; id -g
cat /mine/new/top > /tmp/gone
EOF
"""


def test_stages_owners_and_here_documents(command: Command, api: httpx.Client, tmp_path: Path) -> None:
    """Files come from stages by name and number, by patterns, for whom --chown says, as are directories that are made
    for them. A stage that nobody needs is not built. The target may be another stage. One layer is made with --squash,
    which keeps nothing, and neither does --no-cache."""
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    (tmp_path / "dir" / "sub" / "file").write_text("x")
    done = built(command, tmp_path, STAGES, "--name", "staged", "--no-cache")
    assert (done.returncode, "\n70\n72\n" in done.stderr) == (0, True), done
    script = (
        "cd /; stat -c '%n %U:%G %a' copied/file mine mine/new/* one real/app real/app/sub/file;"
        "stat -c %U:%a real/app/ONE three; cat one mine/new/more real/app/ONE real/app/TWO three"
    )
    seen = (
        "copied/file root:root 644\nmine app:crew 755\nmine/new/more app:crew 644\nmine/new/top app:crew 700\n"
        "one root:root 700\nreal/app app:UNKNOWN 755\nreal/app/sub/file app:UNKNOWN 644\n"
        'app:600\nroot:644\ntop\nmore\nit\'s "word"\n$WORD\nthree\n'
    )
    assert inside(command, "staged", script, "--user", "root") == seen
    other = built(command, tmp_path, STAGES, "--name", "squashed", "--squash", "--target", "SECOND")
    assert (other.returncode, other.stdout.split(",")[0]) == (0, "squashed: 3 layers"), other
    whole = built(command, tmp_path, STAGES, "--name", "squashed", "--squash", "--replace")
    assert (whole.returncode, whole.stdout.split(",")[0]) == (0, "squashed: 2 layers"), whole
    assert inside(command, "squashed", script, "--user", "root") == seen
    tagged = built(command, tmp_path, STAGES, "--name", "app:v1", "--target", "first", "--squash")
    assert (tagged.returncode, api.get("/v1/images/app:v1").json()["references"]) == (0, ["app:v1"]), tagged
    taken = built(command, tmp_path, STAGES, "--name", "app:v1")
    assert (taken.returncode, "--replace takes its place" in taken.stderr) == (1, True)
    unused = built(command, tmp_path, STAGES, "--name", "unused", "--target", "unused")
    assert (unused.returncode, f"{tmp_path}/Dockerfile:5: ended with status 1: RUN exit 1" in unused.stderr) == (
        1,
        True,
    )


def test_a_build_that_fails_or_is_interrupted_leaves_no_session_and_no_image(
    command: Command, daemon: Daemon, api: httpx.Client, tmp_path: Path
) -> None:
    """The message has the line; what was done before is kept for the next build, and a prune removes that. What is
    asked for and can't be is refused before a session is made, and so is a file from outside."""
    kept = steps_of(daemon.data_dir)
    text = "FROM base\nRUN echo one > /one\nRUN echo out; sh -c 'kill -9 $$'\n"
    failed = built(command, tmp_path, text, "--name", "failed")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert f"{tmp_path}/Dockerfile:3: ended with signal 9" in failed.stderr.splitlines()[-1]
    assert len(steps_of(daemon.data_dir) - kept) == 1
    debugged = built(command, tmp_path, text, "--name", "failed", "--debug")
    (left,) = api.get("/v1/sessions").json()
    assert f"the session is left for 10 minutes: sandkasten shell {left['id']}" in debugged.stderr
    assert command.out("exec", left["id"], "--", "cat", "/one") == "one\n"
    command.out("rm", left["id"])
    session = interrupted(command, api, tmp_path, "failed")
    assert session["network"]["mode"] == "none"
    refused = {
        "FROM base\nWORKDIR /tmp/new\nRUN echo > x\nRUN ls | grep x": "Dockerfile:4: ended with status 1",
        "FROM base\nEXPOSE 80-79": "Dockerfile:2: '80-79' is neither",
        "FROM $NONE": "Dockerfile:1: the image has no name",
        "FROM none": "Dockerfile:1: the server has no image 'none'",
        "FROM host": "Dockerfile:1: image 'host' is the server's own /usr",
        "FROM scratch": "Dockerfile:1: scratch has no system",
        "FROM base\nCOPY ../x /": "Dockerfile:2: '../x' leads out",
        "FROM base\nCOPY Dockerfile /tmp/": "Dockerfile:2: /tmp is no part of an image",
        "FROM base\nENV A=${B": "Dockerfile:2: a } is missing",
        "FROM base\nUSER none:none\nRUN true": "Dockerfile:3: the image has no 'none' in /etc/passwd",
        "FROM base\nUSER none\nRUN true": "Dockerfile:3: RUN true",
        "FROM base\nCOPY --from=base /none /x": "Dockerfile:2: the image has no '/none'",
    }
    for text, why in refused.items():
        done = built(command, tmp_path, text, "--name", "failed")
        assert (done.returncode in (1, 125), why in done.stderr) == (True, True), (text, done)
    assert (api.get("/v1/images/failed").status_code, api.get("/v1/sessions").json()) == (400, [])
    for name, why in (("a:b:c", "is no name for an image"), ("build-cache.x", "is no name for an image")):
        assert why in built(command, tmp_path, "FROM base\nRUN echo no", "--name", name).stderr
    counted, pruned = (
        api.post("/v1/images/prune", json={"older_than_s": 0, "dry_run": dry_run}).json() for dry_run in (True, False)
    )
    assert counted == pruned
    assert (pruned["images"] > 0, steps_of(daemon.data_dir)) == (True, set())
    assert inside(command, "base", "echo still") == "still\n"


@pytest.mark.usefixtures("_way_out")
def test_a_build_has_the_network_and_the_limits_that_are_asked_for(
    command: Command, api: httpx.Client, tmp_path: Path
) -> None:
    """Each of its sessions, as `sandkasten run` has them."""
    asked = ("--allow", "pypi.example", "--deny", "bad.example", "-m", "64m", "--cpus", "0.5")
    session = interrupted(command, api, tmp_path, "asked", *asked)
    network, limits = session["network"], session["limits"]
    assert (network["mode"], network["allow"], network["deny"]) == ("allow", ["pypi.example"], ["bad.example"])
    assert (limits["memory_mb"], limits["cpu"]) == (64, 0.5)


def test_two_builds_of_one_file_at_once_make_the_same_image(
    command: Command, daemon: Daemon, api: httpx.Client, tmp_path: Path
) -> None:
    """The step that ends first is taken by the other build, and neither fails. The documentation has the file."""
    found = re.search(r"```dockerfile\n(.*?)```", (ROOT / "docs/images.md").read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "Dockerfile").write_text(found[1])
    (tmp_path / ".dockerignore").write_text(".*\nDockerfile\n")
    (tmp_path / "first").write_text("")
    words = ("image", "build", "--build-arg", "BASE=base", "--name")
    with (
        command.started(*words, "left", str(tmp_path)) as left,
        command.started(*words, "right", str(tmp_path)) as right,
    ):
        told = [process.communicate()[1] for process in (left, right)]
    assert (left.returncode, right.returncode) == (0, 0), told
    assert command.out("run", "left") == command.out("run", "right") == "version 1 of first\n"
    assert len(steps_of(daemon.data_dir)) == 2
    images = [api.get(f"/v1/images/{name}").json() for name in ("left", "right")]
    assert (len(images[0]["layers"]), images[0]["layers"]) == (3, images[1]["layers"])
