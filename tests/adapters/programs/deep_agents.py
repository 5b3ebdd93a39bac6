"""Scenarios for LangChain's deepagents: its agent drives the sandbox for a model with a script."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from scenarios import box, live, run_all, running, until

from sandkasten.adapters import langchain
from sandkasten.adapters.langchain import EMPTY_FILE, SandkastenSandbox
from sandkasten.sync import SandboxClient


class Script(BaseChatModel):
    """A model that makes the calls of a list, one a turn, then says `done`."""

    calls: list[tuple[str, dict[str, Any]]]
    turn: int = 0

    @property
    def _llm_type(self) -> str:
        return "script"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        message = AIMessage("done")
        if self.turn < len(self.calls):
            name, arguments = self.calls[self.turn]
            call = {"name": name, "args": arguments, "id": uuid.uuid4().hex, "type": "tool_call"}
            message = AIMessage("", tool_calls=[call])
        self.turn += 1
        return ChatResult(generations=[ChatGeneration(message=message)])


def _answers(result: Any) -> list[str]:
    return [str(each.content) for each in result["messages"] if isinstance(each, ToolMessage)]


_GO: Any = {"messages": [{"role": "user", "content": "go"}]}
_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"file_path": "/workspace/src/a.py", "content": "one = 1\nprint(one)\n"}),
    ("edit_file", {"file_path": "/workspace/src/a.py", "old_string": "one = 1", "new_string": "one = 42"}),
    ("read_file", {"file_path": "/workspace/src/a.py"}),
    ("execute", {"command": "python3 src/a.py; id -un; exit 3"}),
    ("ls", {"path": "/workspace"}),
    ("glob", {"pattern": "*.py", "path": "/workspace"}),
    ("grep", {"pattern": "one", "path": "/workspace", "output_mode": "content"}),
    ("read_file", {"file_path": "/workspace/missing"}),
    ("execute", {"command": "sleep 600", "timeout": 1}),
]


def _check(answers: list[str]) -> None:
    _, edited, read, ran, listed, found, matched, missing, late = answers
    assert "src/a.py" in edited, edited
    assert "one = 42" in read, read
    assert "42\nsandbox\n" in ran and "exit code 3" in ran, ran
    assert "/workspace/src" in listed and "/workspace/src/a.py" in found, (listed, found)
    assert "one = 42" in matched and "print(one)" in matched, matched
    assert "not_found" in missing, missing
    assert "timed out" in late and "124" in late, late


async def an_agent_works_in_a_session() -> None:
    """Asynchronously: every tool of the framework does its work in the sandbox, which ends with the block."""
    with SandkastenSandbox.create(labels={"test": "deep"}) as sandbox:
        assert await live("test=deep") == [sandbox.id]
        agent = create_deep_agent(model=Script(calls=_CALLS), backend=sandbox)
        result = await agent.ainvoke(_GO, {"recursion_limit": 100})
        assert result["messages"][-1].content == "done"
        _check(_answers(result))
    assert await live("test=deep") == []


async def an_agent_works_without_an_event_loop() -> None:
    """The blocking methods give the same, over a session of the caller's, which is left."""
    async with box() as session:

        def work() -> None:
            with SandboxClient.from_env() as client, SandkastenSandbox(client.get_session(session.id)) as sandbox:
                agent = create_deep_agent(model=Script(calls=_CALLS), backend=sandbox)
                _check(_answers(agent.invoke(_GO, {"recursion_limit": 100})))

        await asyncio.to_thread(work)
        assert (await session.info()).status == "running"


async def a_cancelled_agent_ends_its_command() -> None:
    """Nothing runs on in the sandbox."""
    with SandkastenSandbox.create() as sandbox:
        script = Script(calls=[("execute", {"command": "sleep 600"})])
        task = asyncio.create_task(create_deep_agent(model=script, backend=sandbox).ainvoke(_GO))
        await until(lambda: running(sandbox.id))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        assert await running(sandbox.id) == []


async def commands_are_beside_each_other_or_in_one_shell() -> None:
    """Fresh shells by default; the persistent one if asked for. Output is text, and cut as the server cuts it."""
    with SandkastenSandbox.create() as sandbox:
        sandbox.execute("cd /tmp")
        assert sandbox.execute("pwd; echo err >&2").output == "/workspace\nerr\n"
        assert sandbox.execute("printf 'a\\377b'").output == "a\ufffdb"
        big = sandbox.execute("head -c 6000000 /dev/zero | tr '\\0' x")
        assert big.truncated
        assert len(big.output) < 6_000_000
        both = await asyncio.gather(*(sandbox.aexecute("sleep 0.5; date +%s%N") for _ in range(2)))
        assert [each.exit_code for each in both] == [0, 0]
        stateful = SandkastenSandbox(sandbox._session, is_stateful=True)
        stateful.execute("cd /tmp; X=1")
        assert stateful.execute("pwd; echo $X").output == "/tmp\n1\n"
        assert sandbox.execute("kill -9 $$").exit_code == 137


async def files_have_any_content() -> None:
    """Bytes go up and down as they are; what fails has the framework's word, and the others succeed."""
    with SandkastenSandbox.create() as sandbox:
        data = os.urandom(5_000_000)
        wrote = sandbox.upload_files([("/workspace/d/a.bin", data), ("/etc/x", b""), ("/workspace/d", b"")])
        assert [each.error for each in wrote] == [None, "permission_denied", "is_directory"], wrote
        read = sandbox.download_files(["/workspace/d/a.bin", "/workspace/none", "/workspace/d", "/etc/shadow"])
        assert read[0].content == data
        assert [each.error for each in read[1:]] == ["file_not_found", "is_directory", "permission_denied"], read[1:]
        langchain.MAX_DOWNLOAD_BYTES = 5_000_000 - 1
        (refused,) = sandbox.download_files(["/workspace/d/a.bin"])
        assert (refused.content, refused.error) == (None, "the file has more than 4999999 bytes"), refused
        assert sandbox.delete("/workspace/d").error is None
        assert "not found" in (sandbox.delete("/workspace/d").error or "")
        assert "path_not_found" in (sandbox.ls("/workspace/d").error or "")


async def pages_are_those_of_the_base_class() -> None:
    """Texts by lines, with where to go on; other files in base64; the same results as the framework's own program."""
    with SandkastenSandbox.create() as sandbox:
        sandbox.execute(
            "seq 1 3000 >seq; printf 'a\\r\\nb\\rc' >ends; : >empty; printf '\\377\\376x' >bytes; mkdir dir; "
            "head -c 600000 /dev/zero | tr '\\0' x >long; seq -f %0200g 1 10000 >big; printf png >p.png"
        )
        for name, offset, limit in (
            ("seq", 0, 2000),
            ("seq", 2000, 2000),
            ("seq", 2999, 5),
            ("seq", 3000, 5),
            ("seq", -5, 2),
            ("seq", 0, 0),
            ("seq", 0, -1),
            ("ends", 0, 10),
            ("ends", 1, 1),
            ("empty", 0, 10),
            ("bytes", 0, 10),
            ("dir", 0, 10),
            ("none", 0, 10),
            ("p.png", 0, 10),
            ("big", 0, 10),
            ("big", 9999, 10),
        ):
            path = f"/workspace/{name}"
            mine, theirs = (
                sandbox.read(path, offset, limit),
                super(SandkastenSandbox, sandbox).read(path, offset, limit),
            )
            if theirs.error:
                assert mine.error, (name, offset, limit, mine)
            else:
                assert mine == theirs, (name, offset, limit, str(mine)[:500], str(theirs)[:500])
        assert sandbox.read("/workspace/empty").file_data == {"content": EMPTY_FILE, "encoding": "utf-8"}
        for name in ("long", "big"):
            page = sandbox.read(f"/workspace/{name}", 0, 20_000)
            assert page.file_data is not None
            content = page.file_data["content"]
            assert "truncated" in content and 500_000 < len(content) <= 512_000, len(content)
            assert page.next_offset is None or page.next_offset == page.end_line


async def edits_and_searches_are_those_of_the_base_class() -> None:
    """Line ends are kept; patterns choose as the framework's own program does."""
    with SandkastenSandbox.create() as sandbox:
        sandbox.execute(
            "printf 'one\\r\\ntwo\\r\\n' >crlf; printf 'x x\\n' >twice; mkdir -p src/.hidden .dot/in node/.git; "
            "touch src/a.py src/.b.py src/.hidden/c.py .dot/in/d.py top.py 'a b.py' top.txt; ln -s top.py link.py; "
            "ln -s src dirlink.py; echo NEEDLE >src/a.py; cp src/a.py node/.git/x; "
            "printf 'NEEDLE 1\\nNEEDLE 2\\n' >top.txt"
        )
        assert sandbox.edit("/workspace/crlf", "one\ntwo", "1\n2").occurrences == 1
        assert sandbox.download_files(["/workspace/crlf"])[0].content == b"1\r\n2\r\n"
        assert "multiple" in (sandbox.edit("/workspace/twice", "x", "y").error or "")
        assert sandbox.edit("/workspace/twice", "x", "y", replace_all=True).occurrences == 2
        for name, text in (("twice", "absent"), ("none", "x"), ("twice", "")):
            assert (sandbox.edit(f"/workspace/{name}", text, "z").error or "").startswith("Error"), name
        for pattern in (
            "*.py",
            "**/*.py",
            "/*.py",
            "src/*.py",
            "src/**",
            ".*",
            "*.{py,txt}",
            "[!t]*.py",
            "../*",
            "none",
        ):
            mine = sandbox.glob(pattern, "/workspace")
            theirs = super(SandkastenSandbox, sandbox).glob(pattern, "/workspace")
            assert (mine.error is None) == (theirs.error is None), (pattern, mine, theirs)
            assert _paths(mine.matches) == _paths(theirs.matches), (
                pattern,
                _paths(mine.matches),
                _paths(theirs.matches),
            )
        assert _paths(sandbox.glob("top.py").matches) == ["/workspace/top.py"]
        assert not sandbox.glob("*.py").truncated
        langchain.MAX_MATCHES = 1
        cut = sandbox.glob("top.*")
        assert (_paths(cut.matches), cut.truncated) == (["/workspace/top.py"], True), cut
        langchain.MAX_MATCHES = 10_000
        for pattern, glob in (("NEEDLE", None), ("NEEDLE", "*.py"), ("NEEDLE", "src/*.py"), ("absent", None)):
            mine = sandbox.grep(pattern, "/workspace", glob)
            theirs = super(SandkastenSandbox, sandbox).grep(pattern, "/workspace", glob)
            assert _lines(mine.matches) == _lines(theirs.matches), (pattern, glob, mine, theirs)
        assert len(sandbox.grep("1\n2", "/workspace/top.txt").matches or ()) == 2
        assert sandbox.grep("NEEDLE", max_count=2).truncated
        assert not sandbox.grep("NEEDLE", max_count=3).truncated
        assert (await sandbox.agrep("NEEDLE", "/workspace", max_count=1)).truncated


def _paths(matches: Any) -> list[str]:
    return sorted(each["path"] for each in matches or ())


def _lines(matches: Any) -> list[tuple[str, int, str]]:
    return sorted((each["path"], each["line"], each["text"]) for each in matches or ())


if __name__ == "__main__":
    run_all(globals())
