"""E2B's SDKs as published, beside our own SDK doing the same: a command, a create, a file of 100 MiB both ways.

Each SDK has a process of its own, which is asked for one thing at a time by a line, so that rows come in random blocks.
A command of E2B's is a login shell with a text; ours is the same program with the same arguments. A sandbox of E2B's
has a way out unless its client says otherwise; so has ours. A file that is read is in memory then. The SDKs come with
`make .venv-e2b/.installed`; without that the section has no rows.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench import daemon

if TYPE_CHECKING:
    from bench.sections import Bench

MIB = 1024 * 1024
FILE_MIB = 100
OURS, E2B_PYTHON, E2B_JAVASCRIPT = "our SDK", "E2B's SDK, Python", "E2B's SDK, JavaScript"
_SDKS = Path(__file__).parents[1] / ".venv-e2b"

_OF_OURS = """
import sys, time
from sandkasten.sync import SandboxClient
url, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = SandboxClient(base_url=url, api_key=key, timeout=600)
box, made, data = client.create_session(limits={"disk_mb": 1024}), [], bytes(size)
def read():
    assert len(box.files.read_bytes("big")) == size
works = {
    "run": lambda: box.exec(["/bin/bash", "-l", "-c", "true"]).check(),
    "create": lambda: made.append(client.create_session(network="open")),
    "kill": lambda: made.pop().destroy(),
    "up": lambda: box.files.write("big", data),
    "down": read,
}
"""

_OF_PYTHON = """
import sys, time
from e2b import Sandbox
size = int(sys.argv[3])
box, made, data = Sandbox.create(), [], bytes(size)
def read():
    assert len(box.files.read("big", format="bytes")) == size
works = {
    "run": lambda: box.commands.run("true"),
    "create": lambda: made.append(Sandbox.create()),
    "kill": lambda: made.pop().kill(),
    "up": lambda: box.files.write("big", data),
    "down": read,
}
"""

_LOOP = """
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    works[line.strip()]()
    print((time.perf_counter() - began) * 1000, flush=True)
box.kill() if hasattr(box, "kill") else box.destroy()
"""

_OF_JAVASCRIPT = """
const { Sandbox } = require('e2b')
async function main() {
  const size = Number(process.argv[4]), made = [], data = new Uint8Array(size).buffer
  const box = await Sandbox.create()
  const works = {
    run: () => box.commands.run('true'),
    create: async () => made.push(await Sandbox.create()),
    kill: () => made.pop().kill(),
    up: () => box.files.write('big', data),
    down: async () => {
      if ((await box.files.read('big', { format: 'bytes' })).length !== size) throw new Error('cut off')
    },
  }
  console.log('ready')
  for await (const line of require('node:readline').createInterface({ input: process.stdin })) {
    const began = process.hrtime.bigint()
    await works[line]()
    console.log(Number(process.hrtime.bigint() - began) / 1e6)
  }
  await box.kill()
}
main().catch((error) => { console.error(error); process.exit(1) })
"""


def programs() -> Mapping[str, list[str]]:
    """Return how each SDK's program is started, by its name; those of E2B that are installed."""
    found = {OURS: [sys.executable, "-c", _OF_OURS + _LOOP]}
    if (_SDKS / ".installed").exists():
        found[E2B_PYTHON] = [str(_SDKS / "bin/python"), "-c", _OF_PYTHON + _LOOP]
        if (node := shutil.which("node")) and (_SDKS / "node_modules/e2b").exists():
            script = _SDKS.parent / "build" / "bench-e2b.cjs"
            script.parent.mkdir(exist_ok=True)
            script.write_text(_OF_JAVASCRIPT)
            found[E2B_JAVASCRIPT] = [node, str(script)]
    return found


def row(work: str, sdk: str) -> str:
    """Return the name of a row."""
    return {"run": "bash -l -c true", "create": "create"}.get(work, f"whole file {work}") + f", {sdk}"


async def e2b(bench: Bench) -> None:
    """Measure all SDKs against one daemon."""
    size = bench.count(FILE_MIB, 8) * MIB
    with ExitStack() as stack:
        settings = {"SANDKASTEN_E2B_ENABLED": "true"}
        _, address = stack.enter_context(daemon.running(bench.scratch / "e2b", **settings))
        url = f"http://{address[0]}:{address[1]}"
        asked = {name: stack.enter_context(_Sdk(words, url, size)) for name, words in programs().items()}
        if len(asked) == 1:
            bench.facts["E2B's SDKs"] = "not installed"
            return
        for each in asked.values():
            each.ask("run")
        for work, count in (("run", 100), ("create", 30), ("up", 5), ("down", 5)):
            for name in bench.rounds(list(asked), count):
                time.sleep(0.002)  # noqa: ASYNC251 - nothing else goes on
                bench.table.row(row(work, name)).values.append(asked[name].ask(work))
                if work == "create":
                    asked[name].ask("kill")
    for work in ("run", "create", "up", "down"):
        values = bench.table.row(row(work, OURS)).values
        ours = statistics.median(values) if values else math.nan  # there was no time for it
        for name in asked:
            if name != OURS:
                bench.facts[f"{row(work, name)}, by ours"] = round(bench.table.row(row(work, name)).median / ours, 2)


class _Sdk:
    """A process with an SDK."""

    def __init__(self, words: list[str], url: str, size: int) -> None:
        ours = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": daemon.KEY}
        ours["NODE_PATH"] = str(_SDKS / "node_modules")
        self._process = subprocess.Popen(
            [*words, url, daemon.KEY, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ours,
        )

    def __enter__(self) -> _Sdk:
        assert self._read() == "ready"
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ask(self, work: str) -> float:
        """Have one thing done and return its milliseconds. Raises `RuntimeError` if the SDK failed."""
        assert self._process.stdin is not None
        print(work, file=self._process.stdin, flush=True)
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the SDK's process ended")
        return line.strip()
