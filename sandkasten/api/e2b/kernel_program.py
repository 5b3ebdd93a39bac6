"""The program of a code context, run as text by a sandbox's `python3`: it keeps one Jupyter kernel of the image.

Nothing of the daemon imports it. It needs jupyter_client and ipykernel, which lie beside each other, and speaks lines:

* On its input, JSON objects: `{"op": "run", "id", "code", "env"}`, and `interrupt` and `restart` with an `id`. Where
  it waited in a pool, `{"op": "claim", "env"}` with the variables of the sandbox that it has become part of.
* On its output, an id, a space and a JSON object in ASCII. The objects of a run are those of E2B's `/execute`, with
  `{"type": "end"}` as the last. The id `*` says that the kernel is `ready` or `failed`.

Runs wait for each other. The kernel is reached by sockets in a directory of the user's, so no network is needed.
Source: "Messaging in Jupyter" (jupyter-client's documentation).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

LIMIT = 8 * 1024 * 1024
"""Longest line of output, in bytes."""
PIECE = 64 * 1024
START_S = 60
TURN_S = 0.25
AGAIN_S = 1.0

OF_ACCOUNT = {"HOME", "LOGNAME", "PWD", "USER"}
"""Variables that a program has of its user and its directory, whatever the sandbox's are."""
AT_START = re.compile(r"(GLIBC_|IPYTHON|JUPYTER|LC_|LD_|MALLOC_|PYTHON)|(LANG|LANGUAGE|TZ)\Z")
"""Variables that are read as Python begins: ld.so(8), locale(7), mallopt(3), tzset(3), and Python's manual page."""

FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

BOOT = r"""
def _boot():
    import json, os, sys, types
    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    class Data(BaseFormatter):
        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = dict

    class Chart(BaseFormatter):
        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = dict
        def __call__(self, shown):
            figures = sys.modules.get("matplotlib.figure")  # IPython takes figures out of formatters at their first use
            if figures is None or not isinstance(shown, figures.Figure):
                return super().__call__(shown)
            try:
                from e2b_charts import chart_figure_to_dict
                return chart_figure_to_dict(shown) or None
            except Exception:  # the package is not there, or can't read this figure
                return None

    formatters = get_ipython().display_formatter.formatters
    for each in (Data, Chart):
        formatter = each(parent=get_ipython().display_formatter)
        formatters[formatter.format_type] = formatter
    def columns(frame):
        if frame.size > 100_000:
            return None
        table = json.loads(frame.to_json(orient="split"))
        return {str(name): [row[at] for row in table["data"]] for at, name in enumerate(table["columns"])}
    formatters["e2b/data"].for_type_by_name("pandas.core.frame", "DataFrame", columns)

    kept = {}
    def enter(env):
        kept.update((name, os.environ.get(name)) for name in env)
        os.environ.update(env)
    def leave():
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        kept.clear()
    module = types.ModuleType("_e2b")
    module.enter, module.leave = enter, leave
    sys.modules["_e2b"] = module
_boot()
del _boot
"""
"""Run in each new kernel: formats of E2B's, and variables that last for one run."""


def say(to: str, /, **fields: Any) -> None:
    """Write a line."""
    sys.stdout.write(f"{to} {json.dumps(fields)}\n")
    sys.stdout.flush()


def say_result(name: str, data: dict[str, Any], is_main: bool) -> None:
    """Write a result, or that it is too large."""
    fields = {FIELDS[kind]: value for kind, value in data.items() if kind in FIELDS}
    text = fields.get("text")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] == "'":  # as E2B shows a string
        fields["text"] = text[1:-1]
    for kind in ("png", "jpeg"):
        if isinstance(fields.get(kind), str):
            fields[kind] = fields[kind].rstrip()  # IPython before 8.6 ends them with a newline
    extra = {kind: value for kind, value in data.items() if kind not in FIELDS}
    size = len(json.dumps([fields, extra]))
    if size > LIMIT - 1024:
        say_text(name, "stderr", f"a result of {size} bytes is not shown: the most is {LIMIT}\n")
        return
    say(name, type="result", is_main_result=is_main, **fields, **({"extra": extra} if extra else {}))


def say_text(name: str, stream: str, text: str) -> None:
    """Write output, in pieces."""
    for start in range(0, len(text), PIECE):
        say(name, type=stream, text=text[start : start + PIECE], timestamp=time.time_ns())


def say_error(name: str, kind: str, value: str, traceback: str = "") -> None:
    """Write an error, cut to what a line may hold."""
    say(name, type="error", name=kind[:PIECE], value=value[:PIECE], traceback=traceback[: LIMIT // 16])


class Ended(Exception):
    """The kernel died, or is to be started anew."""


class KernelContext:
    """One kernel, and what is asked of it."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, str, dict[str, str]] | None] = asyncio.Queue()
        self.restarts: list[str] = []
        self.news: dict[str, str] = {}
        self.dropped: set[str] = set()
        self.current: str | None = None
        self.is_busy = self.is_interrupted = False
        self.told_at = 0.0
        self.manager: Any = None
        self.client: Any = None

    async def start(self) -> None:
        """Start the kernel and wait until it answers."""
        from jupyter_client.manager import AsyncKernelManager

        where = tempfile.mkdtemp(prefix="kernel-")
        self.manager = AsyncKernelManager(transport="ipc", connection_file=os.path.join(where, "k.json"))
        await self.manager.start_kernel(
            extra_arguments=["--HistoryManager.enabled=False"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await self.meet()

    async def meet(self) -> None:
        """Connect to a new kernel and prepare it."""
        if self.client is not None:
            self.client.stop_channels()
        self.client = self.manager.client()
        self.client.start_channels()
        await self.client.wait_for_ready(timeout=START_S)
        await self.silently(BOOT)

    async def renew(self) -> None:
        """Start the kernel anew, which has nothing of the old one."""
        self.news.clear()
        await self.manager.restart_kernel(now=True)
        await self.meet()

    async def heard(self, get: Any) -> Any:
        """Return the next message of a channel; raises `Ended`."""
        while True:
            if self.restarts and self.current is not None:
                raise Ended("ContextRestarted", "the context was restarted")
            if self.is_busy and self.is_interrupted and time.monotonic() > self.told_at + AGAIN_S:
                await self.interrupt()  # again: a signal that came before its code is lost
            with contextlib.suppress(queue.Empty):
                return await get(timeout=TURN_S)
            if not await self.manager.is_alive():
                raise Ended("KernelDied", "the kernel died and was started anew; its variables are gone")

    async def interrupt(self) -> None:
        """Send the kernel SIGINT."""
        self.told_at = time.monotonic()
        with contextlib.suppress(Exception):  # it has just died: `heard` sees that
            await self.manager.interrupt_kernel()

    async def silently(self, code: str) -> None:
        """Run code of ours."""
        message_id = self.client.execute(code, silent=True, store_history=False, allow_stdin=False)
        while (await self.heard(self.client.get_shell_msg))["parent_header"].get("msg_id") != message_id:
            pass

    async def run(self, name: str, code: str, env: dict[str, str]) -> None:
        """Run a client's code; raises `Ended`."""
        if env:
            await self.silently(f"__import__('sys').modules['_e2b'].enter({env!r})")
        if not self.is_interrupted:
            while await self.client.shell_channel.msg_ready():  # answers to earlier code
                await self.client.get_shell_msg(timeout=TURN_S)
            self.is_busy = True
            message_id = self.client.execute(code, allow_stdin=False, stop_on_error=False)
            while await self.followed(name, message_id):
                pass
            self.is_busy = False
        if env:
            await self.silently("__import__('sys').modules['_e2b'].leave()")

    async def followed(self, name: str, message_id: str) -> bool:
        """Write what one message of the kernel says; return whether more come."""
        message = await self.heard(self.client.get_iopub_msg)
        kind, content = message["header"]["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != message_id:
            return True
        if kind == "stream":
            say_text(name, "stderr" if content["name"] == "stderr" else "stdout", content["text"])
        elif kind in ("display_data", "execute_result"):
            say_result(name, content["data"], kind == "execute_result")
        elif kind == "error":
            say_error(name, content["ename"], content["evalue"], "\n".join(content["traceback"]))
        elif kind == "execute_input":
            say(name, type="number_of_executions", execution_count=content["execution_count"])
        return not (kind == "status" and content["execution_state"] == "idle")

    async def work(self) -> None:
        """Do what is asked, one after another."""
        try:
            await self.start()
        except Exception as error:  # noqa: BLE001 - whatever the image lacks
            say("*", type="failed", reason=f"{type(error).__name__}: {error}"[:1000])
            return
        say("*", type="ready")
        while True:
            asked = await self.asked.get()
            if self.restarts:
                await self.renew()
                while self.restarts:
                    say(self.restarts.pop(), type="restarted")
            if asked is None:
                continue
            if asked[0] not in self.dropped:
                await self.serve(*asked)
            self.dropped.discard(asked[0])
            say(asked[0], type="end")

    async def serve(self, name: str, code: str, env: dict[str, str]) -> None:
        """Run code, whatever happens to the kernel meanwhile."""
        self.current, self.is_busy, self.is_interrupted = name, False, False
        try:
            if not await self.manager.is_alive():
                say_text(name, "stderr", "the kernel had died and was started anew; its variables are gone\n")
                await self.renew()
            if self.news:
                await self.silently(f"__import__('os').environ.update({self.news!r})")
                self.news.clear()
            await self.run(name, code, env)
        except Ended as ended:
            say_error(name, *ended.args)
            self.current, self.is_busy = None, False
            if not self.restarts:
                await self.renew()
        finally:
            self.current = None

    def claim(self, env: dict[str, str]) -> None:
        """Have the sandbox's variables, in the kernel before its first code. A kernel whose begin they change begins
        anew."""
        self.news = {k: v for k, v in env.items() if k not in OF_ACCOUNT and os.environ.get(k) != v}
        os.environ.update(self.news)
        if any(map(AT_START.match, self.news)):
            self.restarts.append("*")
            self.asked.put_nowait(None)

    async def take(self, asked: dict[str, Any]) -> None:
        """Take one line of input."""
        if asked["op"] == "claim":
            self.claim(asked["env"])
            return
        name = asked["id"]
        if asked["op"] == "run":
            self.asked.put_nowait((name, asked["code"], asked["env"]))
        elif asked["op"] == "restart":
            self.restarts.append(name)
            self.asked.put_nowait(None)
        elif name == self.current:
            self.is_interrupted = True
            if self.is_busy:
                await self.interrupt()
        else:
            self.dropped.add(name)


async def main() -> None:
    """Take lines until the input ends, or there is no kernel."""
    context = KernelContext()
    working = asyncio.ensure_future(context.work())
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while True:
        reading = asyncio.ensure_future(reader.readline())
        await asyncio.wait({reading, working}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() or not reading.result():
            break
        with contextlib.suppress(ValueError, KeyError, TypeError):  # the end of a line whose sender left: no request
            await context.take(json.loads(reading.result()))
    if context.manager is not None and context.manager.has_kernel:
        await context.manager.shutdown_kernel(now=True)
    os._exit(1)


asyncio.run(main())
