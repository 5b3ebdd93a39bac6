"""E2B's code interpreter SDK for Python as published, against a server of ours: each scenario prints what came of it as
a line of JSON.

The same program for both clients: `sync` or `async` is the argument. It knows nothing of this repository.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys

from e2b_code_interpreter import AsyncSandbox, Sandbox

IS_SYNC = sys.argv[1] == "sync"
API = Sandbox if IS_SYNC else AsyncSandbox

PLOT = """
import matplotlib.pyplot as plt
plt.plot([0, 1], [1, 3], label="a")
plt.title("T"); plt.xlabel("time (s)")
plt.show()
"""
SHOWN = """
from IPython.display import HTML, JSON, Latex, Markdown, SVG, display
class Own:
    def _repr_mimebundle_(self, **_):
        return {"text/plain": "own", "application/x-own": "1"}
    def _repr_e2b_data_(self):
        return {"a": 1}
display(HTML("<b>"), Markdown("*m*"), Latex("$l$"), JSON({"a": [1]}), SVG("<svg/>"), Own())
"""


async def done(value):
    """Return a value, awaited if that is what it takes."""
    return await value if inspect.isawaitable(value) else value


async def caught(call):
    """Return the name of the error of a call and the beginning of its text, None without one."""
    try:
        await done(call())
    except Exception as error:  # its class is the result
        return [type(error).__name__, str(error)]
    return None


async def texts(box):
    heard = []
    code = "import sys; print('é'); print('e', file=sys.stderr); 'm'"
    ran = await done(box.run_code(code, on_stdout=lambda line: heard.append(line.line)))
    yield "text", [ran.text, ran.logs.stdout, ran.logs.stderr, heard, ran.error, ran.execution_count]
    assert (await done(box.run_code("x = 1"))).results == []
    yield "state", (await done(box.run_code("x + 1"))).text
    printed = (await done(box.run_code("!id -un; pwd; echo $HOME"))).logs.stdout
    yield "program", " ".join("".join(printed).split())
    await done(box.files.write("json.py", "raise SystemExit"))
    failed = (await done(box.run_code("print(1)\n1 / 0"))).error
    yield "error", [failed.name, failed.value, "ZeroDivisionError" in failed.traceback]
    env = "import os; os.environ.get('A')"
    told = [(await done(box.run_code(env, envs=envs))).text for envs in ({"A": "here"}, None)]
    yield "variables", [*told, (await done(box.run_code("os.environ['B']"))).text]
    large = await done(box.run_code("print('x' * 3_000_000)"))
    yield "large output", sum(map(len, large.logs.stdout))
    large = await done(box.run_code("'x' * 9_000_000"))
    yield "too large a result", [len(large.results), large.logs.stderr[0][:40]]


async def shows(box):
    ran = await done(box.run_code(PLOT))
    assert ran.error is None, ran.error.traceback
    [plot] = ran.results
    chart = plot.chart.to_dict()
    yield "plot", [plot.png[:11], chart["type"], chart["title"], chart["x_unit"], chart["elements"][0]["points"]]
    ran = await done(box.run_code(SHOWN))
    names = [sorted(set(each.formats()) - {"text"}) for each in ran.results]
    yield "formats", names
    own = ran.results[-1]
    yield "own", [own.text, own.data]


async def contexts(box):
    await done(box.run_code("x = 1"))
    await done(box.files.make_dir("w"))
    other = await done(box.create_code_context(cwd="/home/user/w"))
    yield (
        "context",
        [other.language, other.cwd, (await done(box.run_code("import os; os.getcwd()", context=other))).text],
    )
    yield "apart", (await done(box.run_code("x", context=other))).error.name
    listed = await done(box.list_code_contexts())
    yield "listed", [len(listed), other.id in [each.id for each in listed], await done(box.commands.list())]
    await done(box.run_code("y = 1", context=other))
    await done(box.restart_code_context(other))
    yield "restarted", (await done(box.run_code("y", context=other))).error.name
    died = await done(box.run_code("import os; os._exit(3)", context=other))
    yield "died", [died.error.name, (await done(box.run_code("1 + 1", context=other))).text]
    await done(box.remove_code_context(other.id))
    gone = await caught(lambda: box.run_code("1", context=other))
    refused = [
        (await caught(lambda: box.run_code("1", language="r")))[0],
        (await caught(lambda: box.create_code_context(cwd="/no-such")))[0],
        (await caught(lambda: box.restart_code_context("no-such")))[0],
        (await caught(lambda: box.remove_code_context("no-such")))[0],
    ]
    yield "refused", [gone[0], *refused]


async def interrupts(box):
    endless = "import time\nprint('on')\nwhile True: time.sleep(0.01)"
    timed_out = await caught(lambda: box.run_code(endless, timeout=1))
    yield "time limit", [timed_out[0], (await done(box.run_code("'goes on'"))).text]


async def main():
    box = await done(API.create(envs={"B": "b"}))
    try:
        for scenario in (texts, shows, contexts, interrupts):
            async for name, value in scenario(box):
                print(json.dumps({"name": name, "value": value}), flush=True)
    finally:
        await done(box.kill())


asyncio.run(main())
