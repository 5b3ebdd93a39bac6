"""The published Python client, from its own environment, unchanged, against a running daemon."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.daemon import KEY, Daemon
from tests.waiting import patience

CLIENT = "sandkasten==0.3.0"

SCRIPT = """
import asyncio, sys, tempfile, os
from sandkasten import SandboxClient


async def main(url, key):
    async with SandboxClient(base_url=url, api_key=key) as client:
        async with await client.create_session() as session:
            result = await session.exec("echo 'Hello from sandbox'")
            assert (result.exit_code, result.output, result.cwd) == (0, "Hello from sandbox\\n", "/workspace"), result
            await session.exec("cd /tmp && export KEPT=1")
            assert (await session.exec("echo $KEPT; pwd")).output == "1\\n/tmp\\n"

            await session.write("hello.py", "print('Hello, World!')")
            assert (await session.exec("python3 /workspace/hello.py")).output == "Hello, World!\\n"
            await session.write("empty", b"")
            assert (await session.read("empty")).content == b""
            data = bytes(range(256)) * 4096
            await session.write("data.bin", data)
            read = await session.read("data.bin")
            assert read.content == data and not read.truncated
            assert (await session.read("data.bin", max_bytes=10)).truncated

            chunks = [chunk async for chunk in session.exec_stream("printf 'a\\\\u2028b\\\\n'; echo err >&2; exit 3")]
            assert "".join(chunk.output for chunk in chunks) == "a\\u2028b\\nerr\\n", chunks
            assert chunks[-1].done and chunks[-1].exit_code == 3
            big = [chunk async for chunk in session.exec_stream("seq 1 50000")]
            assert "".join(chunk.output for chunk in big) == "".join(f"{n}\\n" for n in range(1, 50001))

            with tempfile.NamedTemporaryFile(suffix=".bin") as file:
                file.write(data)
                file.flush()
                (path,) = await session.upload(file.name, dest_path="/workspace/up")
                assert path == f"/workspace/up/{os.path.basename(file.name)}"
                assert (await session.read(path)).content == data

            stats = await session.stats()
            assert stats.memory_bytes > 0 and stats.memory_limit > 0 and stats.cpu_usage_usec > 0
            info = await session.info()
            assert (info.id, info.status, info.image) == (session.id, "running", "python")
            assert session.id in [each.id for each in await client.list_sessions()]
            again = await client.get_session(session.id)
            assert (await again.exec("echo same")).output == "same\\n"
        assert (await session.info()).status == "destroyed"
        assert session.id not in [each.id for each in await client.list_sessions()]

        kept = await client.create_session(workspace_id="user-1", ttl_seconds=60)
        await kept.write("note.txt", "kept")
        await kept.destroy()
        later = await client.create_session(workspace_id="user-1")
        assert (await later.read("note.txt")).content == b"kept"
        await later.destroy()


asyncio.run(main(*sys.argv[1:]))
print("every call worked")
"""


@pytest.fixture(scope="module")
def client_python() -> Path:
    """The interpreter of an environment that holds the published client and nothing of this project."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sandkasten"
    directory = cache / f"client-{CLIENT.partition('==')[2]}-py{sys.version_info[0]}{sys.version_info[1]}"
    python = directory / "bin/python"
    marker = directory / "complete"
    if not marker.exists():
        venv.create(directory, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", CLIENT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(300), check=False)
        if done.returncode:
            pytest.skip(f"the published client can't be installed here: {done.stderr.strip()[-300:]}")
        marker.touch()
    return python


def test_the_published_client_works_unchanged(daemon: Daemon, client_python: Path, tmp_path: Path) -> None:
    """Creates, execs, streams, writes, reads, uploads, lists and destroys."""
    script = tmp_path / "use_client.py"
    script.write_text(SCRIPT)
    command = [str(client_python), str(script), daemon.wait_url(), KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert done.stdout == "every call worked\n", done.stderr + "\n".join(daemon.log)


PROGRAM = """import asyncio
from pathlib import Path

from sandkasten import SandboxClient


async def main():
    key = Path(".sandkasten/api-key").read_text().strip()
    async with SandboxClient(base_url="http://127.0.0.1:8080", api_key=key) as client:
        async with await client.create_session() as session:
            await session.write("hello.py", "print('hello from the sandbox')")
            result = await session.exec("python3 hello.py")
            print(result.exit_code, result.output, end="")
            async for chunk in session.exec_stream("for i in 1 2 3; do echo $i; sleep 0.2; done"):
                print(chunk.output, end="", flush=True)


asyncio.run(main())
"""


def test_a_program_with_a_key_in_a_file_runs(daemon: Daemon, client_python: Path, tmp_path: Path) -> None:
    """A program as users have it runs unchanged but for the daemon's address, with the key in its directory."""
    (tmp_path / ".sandkasten").mkdir()
    (tmp_path / ".sandkasten/api-key").write_text(KEY + "\n")
    command = [str(client_python), "-c", PROGRAM.replace("http://127.0.0.1:8080", daemon.wait_url())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False, cwd=tmp_path)
    assert done.stdout == "0 hello from the sandbox\n1\n2\n3\n", done.stderr + "\n".join(daemon.log)
