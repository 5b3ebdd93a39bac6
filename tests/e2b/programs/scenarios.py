"""E2B's Python SDK as published, against a server of ours: each scenario prints what came of it as a line of JSON.

The same program for both clients: `sync` or `async` is the argument. It knows nothing of this repository.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import http.client
import inspect
import io
import json
import sys
import time
import urllib.error
import urllib.request

from e2b import AsyncSandbox, CommandExitException, PtySize, Sandbox, SandboxQuery, TimeoutException

IS_SYNC = sys.argv[1] == "sync"
API = Sandbox if IS_SYNC else AsyncSandbox
PATIENCE_S = 60.0


async def done(value):
    """Return a value, awaited if that is what it takes."""
    return await value if inspect.isawaitable(value) else value


async def caught(call):
    """Return the name of the error of a call, None without one."""
    try:
        await done(call())
    except Exception as error:  # its class is the result
        return type(error).__name__
    return None


async def until(condition):
    """Wait until a condition is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.05)


async def sandbox(**options):
    return await done(API.create(**options))


# Commands


async def commands(box):
    run = box.commands.run

    async def ended(text, **options):
        try:
            result = await done(run(text, **options))
        except CommandExitException as error:
            return [error.exit_code, error.error]
        return [result.exit_code, result.error]

    first = await done(run("echo hi $X; echo e >&2"))
    yield "run", [first.stdout, first.stderr, first.exit_code]
    yield "exits", [await ended(text) for text in ("exit 3", "exit 137", "kill -9 $$", "no-such-program")]
    yield "users", [(await done(run("id -un; pwd", user=user))).stdout for user in (None, "root")]
    yield "closed input", (await done(run("readlink /proc/self/fd/0"))).stdout
    yield "large output", len((await done(run("head -c 3000000 /dev/zero | tr '\\0' a"))).stdout)
    try:
        await done(run("sleep 1000", timeout=1))
    except TimeoutException:
        pass

    async def none_goes_on():
        return await done(box.commands.list()) == []

    await until(none_goes_on)
    yield "time limit", "ended"
    refused = [
        await caught(lambda: run("true", cwd="/no-such")),
        await caught(lambda: run("true", user="nobody-there")),
        await caught(lambda: run("true " + "x" * 200_000)),
    ]
    yield "refused commands", refused


async def processes(box):
    handle = await done(box.commands.run("cat; echo over", background=True, stdin=True))
    listed = [[each.cmd, list(each.args), each.pid == handle.pid] for each in await done(box.commands.list())]
    again = await done(box.commands.connect(handle.pid))
    await done(box.commands.send_stdin(handle.pid, "line\n"))
    await done(box.commands.close_stdin(handle.pid))
    yield "background", [listed, (await done(handle.wait())).stdout, (await done(again.wait())).stdout]
    handle = await done(box.commands.run("wc -c", background=True, stdin=True))
    if IS_SYNC:
        box.commands.stream_input(handle.pid, ["a" * 1000] * 30)
    else:
        stream = box.commands.stream_input(handle.pid)
        for _ in range(30):
            await stream.send("a" * 1000)
        await stream.close()
    await done(box.commands.close_stdin(handle.pid))
    yield "stream of input", (await done(handle.wait())).stdout
    handle = await done(box.commands.run("sleep 1000", background=True))
    killed = [await done(box.commands.kill(handle.pid)), await done(box.commands.kill(999_999))]
    try:
        await done(handle.wait())
    except CommandExitException as error:
        killed += [error.exit_code, error.error]
    yield "kill", killed
    seen = []
    if IS_SYNC:
        terminal = box.pty.create(PtySize(rows=10, cols=40))
    else:
        terminal = await box.pty.create(PtySize(rows=10, cols=40), on_data=seen.append)
    await done(box.pty.resize(terminal.pid, PtySize(rows=20, cols=50)))
    await done(box.pty.send_stdin(terminal.pid, b"stty size; exit 5\n"))
    try:
        terminal.wait(on_pty=seen.append) if IS_SYNC else await terminal.wait()
    except CommandExitException as error:
        yield "terminal", [b"20 50" in b"".join(seen), error.exit_code]


# Files


async def files(box):
    fs = box.files
    written = await done(fs.write("a/b.txt", "é\n"))
    several = await done(fs.write_files([{"path": "c/1", "data": "1"}, {"path": "/tmp/ü x", "data": b"\0\xff"}]))
    yield "write", [written.path, written.name, [each.path for each in several]]
    yield "read", [await done(fs.read("a/b.txt")), list(await done(fs.read("/tmp/ü x", format="bytes")))]
    large = bytes(range(256)) * 8000
    sizes = []
    for zipped in (False, True):
        await done(fs.write("large", io.BytesIO(large), gzip=zipped))
        read = await done(fs.read("large", format="bytes"))
        sizes.append(hashlib.sha256(read).hexdigest() == hashlib.sha256(large).hexdigest())
    stream = await done(fs.read("large", format="stream"))
    pieces = list(stream) if IS_SYNC else [piece async for piece in stream]
    yield "large file", [*sizes, b"".join(pieces) == large]
    made = [await done(fs.make_dir("d/e")), await done(fs.make_dir("d/e"))]
    renamed = await done(fs.rename("c/1", "new/sub/2"))
    await done(box.commands.run("ln -s a/b.txt link; chmod 640 a/b.txt"))
    entries = {each.path: each for each in await done(fs.list("/home/user", depth=2))}
    link, plain = entries["/home/user/link"], entries["/home/user/a/b.txt"]
    yield "tree", [made, renamed.path, "/home/user/new/sub/2" in entries, "/home/user/new/sub" in entries]
    yield "link", [link.type.value, link.symlink_target]
    yield "entry", [plain.type.value, plain.size, plain.mode, plain.permissions, plain.owner]
    removed = [await done(fs.exists("d")), await done(fs.remove("d")), await done(fs.exists("d"))]
    yield "removed", removed
    await done(fs.write("/etc/of-root", "1", user="root"))
    yield "owner", (await done(fs.get_info("/etc/of-root"))).owner
    calls = [
        lambda: fs.read("none"),
        lambda: fs.list("none"),
        lambda: fs.list("a/b.txt"),
        lambda: fs.make_dir("a/b.txt"),
        lambda: fs.remove("none"),
        lambda: fs.rename("none", "else"),
        lambda: fs.write("/etc/passwd", "1"),
    ]
    yield "refused files", [await caught(call) for call in calls]


async def watching(box):
    await done(box.files.make_dir("w"))
    events = []
    if IS_SYNC:
        handle = box.files.watch_dir("w", recursive=True)
    else:
        handle = await box.files.watch_dir("w", on_event=events.append, recursive=True)
    await done(box.commands.run("mkdir w/sub; echo 1 > w/a; mv w/a w/b; chmod 600 w/b; rm w/b; echo > w/last"))

    async def has_all():
        if IS_SYNC:
            events.extend(handle.get_new_events())
        return any(event.name == "last" for event in events)

    await until(has_all)
    await done(handle.stop())
    told = {f"{event.type.value} {event.name}" for event in events}
    yield "watch", sorted(told & {"create sub", "create a", "rename a", "create b", "chmod b", "remove b"})
    options = {} if IS_SYNC else {"on_event": events.append}
    yield "watch nothing", await caught(lambda: box.files.watch_dir("none", **options))


async def signed(box):
    await done(box.files.write("sig ned.txt", "signed"))
    url = await done(box.download_url("sig ned.txt", use_signature_expiration=1000))
    yield "signed", urllib.request.urlopen(url).read().decode()
    upload = urllib.request.Request(await done(box.upload_url("sent.txt")), b"sent")
    upload.add_header("Content-Type", "application/octet-stream")
    with urllib.request.urlopen(upload) as answer:
        yield "signed upload", [answer.status, await done(box.files.read("sent.txt"))]
    statuses = []
    for bad in (
        url.replace("=v1_", "=v1_A"),
        url.replace("ned", "nee"),
        url[:-1] + ("2" if url.endswith("1") else "1"),
    ):
        try:
            urllib.request.urlopen(bad)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    yield "badly signed", statuses


async def repository(box):
    git = box.git
    await done(git.init("repo", initial_branch="main"))
    await done(git.configure_user("A", "a@example.org"))
    await done(box.files.write("repo/f", "1"))
    before = await done(git.status("repo"))
    await done(git.add("repo"))
    await done(git.commit("repo", "one"))
    after = await done(git.status("repo"))
    yield "git", [before.is_clean, after.is_clean, after.current_branch]


# Ports


def fetch(host, headers):
    """Return the status of a request to a port by its name, which is one of this machine's loopback."""
    connection = http.client.HTTPConnection("127.0.0.1", int(host.rpartition(":")[2]))
    try:
        connection.request("GET", "/", headers={"Host": host, **headers})
        return connection.getresponse().status
    finally:
        connection.close()


async def ports(box):
    closed = await sandbox(network={"allow_public_traffic": False})
    token = {"E2B-Traffic-Access-Token": closed.traffic_access_token}
    statuses = [fetch(box.get_host(8000), {})]
    for each in (box, closed):
        await done(each.commands.run("python3 -m http.server 8000", background=True))
        await done(each.commands.run("until (: </dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done"))
        statuses += [fetch(each.get_host(8000), {}), fetch(each.get_host(8000), token)]
    yield "ports", statuses
    await done(closed.kill())


# Sandboxes


async def control(box):
    info = await done(box.get_info())
    found = API.list(query=SandboxQuery(metadata={"a b": "c&d é"}))
    others = API.list(query=SandboxQuery(metadata={"a b": "c"}))
    yield "info", [info.template_id, info.metadata, info.state.value, info.cpu_count, info.memory_mb]
    yield "list", [len(await done(found.next_items())), len(await done(others.next_items()))]
    long_ago = datetime.datetime.fromtimestamp(1000, datetime.UTC)
    metrics = [each.mem_total for each in await done(box.get_metrics())][-1:]
    yield "metrics", [*metrics, await done(box.get_metrics(end=long_ago))]
    await done(box.set_timeout(1000))
    left = ((await done(box.get_info())).end_at - info.started_at).total_seconds()
    yield "timeout", 1000 <= left < 1000 + PATIENCE_S
    await done(API.connect(box.sandbox_id, timeout=10))
    again = ((await done(box.get_info())).end_at - info.started_at).total_seconds()
    yield "connect shortens nothing", again == left


async def pausing(box):
    await done(box.files.write("kept", "kept"))
    paused = [await done(box.pause()), await done(box.pause()), await done(box.is_running())]
    state = (await done(box.get_info())).state.value
    error = await caught(lambda: box.commands.run("true"))
    other = await done(API.connect(box.sandbox_id, timeout=600))
    yield "pause", [*paused, state, error, await done(other.is_running()), await done(box.files.read("kept"))]
    mine = await sandbox(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": True})

    async def is_paused():
        return (await done(mine.get_info())).state.value == "paused"

    await until(is_paused)
    result = await done(mine.commands.run("echo awake"))
    info = await done(mine.get_info())
    yield "pause at the end", [result.stdout, info.state.value, info.lifecycle["on_timeout"].value]
    await done(mine.kill())


async def refused(box):
    calls = [
        lambda: API.create(api_key="e2b_" + "0" * 40),
        lambda: API.create("no-such-template"),
        lambda: API.connect("0123456789abcdef01234567"),
        lambda: box.create_snapshot(),
        lambda: API.create(metadata={"e2b.template": "mine"}),
    ]
    yield "refused", [await caught(call) for call in calls]
    alone = await sandbox(allow_internet_access=False)
    pages, listed = [], API.list(limit=1)
    while listed.has_next:
        pages.append([each.sandbox_id for each in await done(listed.next_items())])
    yield "pages", [page for page in pages if page] == [[alone.sandbox_id], [box.sandbox_id]]
    yield "alone", [(await done(alone.get_info())).allow_internet_access, await done(alone.kill())]
    reaches = []
    for network in ({"deny_out": ["0.0.0.0/0"]}, {}):
        await done(box.update_network(network))
        reaches.append((await done(box.get_info())).allow_internet_access)
    yield "another network", reaches


async def dying(box):
    handle = await done(box.commands.run("sleep 1000", background=True))
    waiting = None if IS_SYNC else asyncio.ensure_future(handle.wait())
    killed = await done(box.kill())
    error = await caught(handle.wait if IS_SYNC else lambda: waiting)
    after = [await done(box.is_running()), await done(box.kill()), await caught(lambda: box.commands.run("true"))]
    yield "killed", [killed, error, *after]


async def main():
    box = await sandbox(metadata={"a b": "c&d é"}, envs={"X": "1"})
    for part in (commands, processes, files, watching, signed, repository, ports, control, pausing, refused, dying):
        async for name, value in part(box):
            print(json.dumps({"name": name, "value": value}), flush=True)


asyncio.run(main())
