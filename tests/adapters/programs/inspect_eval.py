"""Scenarios for inspect-ai: real evaluations with its scripted model, and its own checks of a sandbox."""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
from contextlib import redirect_stdout
from typing import Any

from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.context import SandboxUnavailableError
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from scenarios import live, raises, run_all, running, until

from sandkasten import SandboxClient
from sandkasten.adapters.inspect import SandkastenSandboxConfig, SandkastenSandboxEnvironment

TOO_LARGE = {"test_exec_large_command": "a server takes 1 MiB of command (server.max_command_bytes)"}


@scorer(metrics=[accuracy()])
def _file_has(text: str) -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="C" if text in await sandbox().read_file("out.txt") else "I")

    return score


def _task(name: str, *calls: tuple[str, dict[str, Any]]) -> tuple[Task, Any]:
    outputs = [ModelOutput.for_tool_call("mockllm/model", tool, arguments) for tool, arguments in calls]
    outputs.append(ModelOutput.from_content("mockllm/model", "done"))
    for each in outputs:
        each.usage = ModelUsage()  # else they are counted with a vocabulary from the network
    config = SandkastenSandboxConfig(env={"WHO": "inspect"})
    task = Task(
        name=name,
        dataset=[Sample(input="go", files={"in.txt": "given\n"}, setup="echo set up >setup.txt")],
        solver=[use_tools(bash(timeout=30), python(timeout=30)), generate()],
        scorer=_file_has("inspect given set up 42"),
        sandbox=SandboxEnvironmentSpec("sandkasten", config),
    )
    return task, get_model("mockllm/model", custom_outputs=outputs)


_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("bash", {"command": "echo $WHO $(cat in.txt setup.txt) >out.txt; ls missing"}),
    ("python", {"code": "open('out.txt', 'a').write(str(6 * 7)); print(open('out.txt').read().replace('\\n', ' '))"}),
    ("bash", {"command": "tr '\\n' ' ' <out.txt >o && mv o out.txt; cat out.txt"}),
]


async def _eval(task: Task, model: Any, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        (found,) = await eval_async(task, model=model, log_dir=directory, **options)
        return read_eval_log(found.location)  # whole, while the file is there


async def an_evaluation_works_in_sessions_and_ends_them() -> None:
    """Files of a sample, its set-up, tools and scorer meet in one session, and none is left."""
    task, model = _task("works", *_CALLS)
    result = await _eval(task, model)
    assert result.status == "success", result.error
    (sample,) = result.samples
    answers = [each.text for each in sample.messages if each.role == "tool"]
    assert "No such file" in answers[0], answers
    assert answers[1].strip() == "inspect given set up 42", answers
    assert result.results.scores[0].metrics["accuracy"].value == 1.0, answers
    assert os.environ["SANDKASTEN_API_KEY"] not in result.model_dump_json()
    assert await live("inspect") == []


async def sessions_are_left_when_asked_and_ended_by_the_command_line() -> None:
    """`--no-sandbox-cleanup` leaves them, and `inspect sandbox cleanup` ends them."""
    task, model = _task("kept", *_CALLS)
    await _eval(task, model, sandbox_cleanup=False)
    (kept,) = await live("inspect=kept")
    await SandkastenSandboxEnvironment.cli_cleanup(kept)
    assert await live("inspect") == []
    async with SandboxClient.from_env() as client:
        await client.create_session(labels={"inspect": "\x1b]0;title\x07"})
    printed = io.StringIO()
    with redirect_stdout(printed):
        await SandkastenSandboxEnvironment.cli_cleanup(None)
    assert printed.getvalue().endswith(r" of '\x1b]0;title\x07'" + "\n"), printed.getvalue()


async def a_cancelled_evaluation_ends_its_sessions() -> None:
    """With the command that runs in them."""
    task, model = _task("cancelled", ("bash", {"command": "sleep 600"}))
    work = asyncio.create_task(_eval(task, model))
    await until(lambda: live("inspect=cancelled"))
    (found,) = await live("inspect=cancelled")
    await until(lambda: running(found))
    work.cancel()
    await asyncio.wait([work])
    assert await live("inspect") == []


async def inspects_own_checks_hold() -> None:
    """Each check of `inspect_ai.util._sandbox.self_check` in a session of its own, but for those named in TOO_LARGE."""
    names = [name for name in vars(self_check) if name.startswith("test_") and name not in TOO_LARGE]
    assert len(names) > 35
    gate = asyncio.Semaphore(16)
    troubles: dict[str, str] = {}

    async def check(name: str) -> None:
        async with gate:
            made = await SandkastenSandboxEnvironment.sample_init(name, None, {})
            try:
                await getattr(self_check, name)(made["default"])
            except Exception as error:
                troubles[name] = repr(error)
            finally:
                await SandkastenSandboxEnvironment.sample_cleanup(name, None, made, False)

    await asyncio.gather(*map(check, names))
    assert troubles == {}, troubles
    assert await live("inspect") == []


async def output_is_bounded_and_input_is_any() -> None:
    """Limits of the framework hold for each stream; input and output of any size do not wait for each other."""
    made = await SandkastenSandboxEnvironment.sample_init("bounds", "python", {})
    box = made["default"]
    try:
        script = "head -c 8000000 /dev/zero | tr '\\0' x; head -c 7000000 /dev/zero | tr '\\0' y >&2"
        both = await box.exec(["sh", "-c", script])
        assert (len(both.stdout), len(both.stderr)) == (8_000_000, 7_000_000)
        for program, given in (("head -c 12000000 /dev/zero", None), ("cat", b"x" * 12_000_000)):
            error = await raises(OutputLimitExceededError, box.exec(["sh", "-c", program], input=given))
            assert "10 MiB" in str(error) and len(error.truncated_output) == 10 * 1024 * 1024
        with override_max_exec_output_size(10):
            await raises(OutputLimitExceededError, box.exec(["echo", "more than ten"]))
        echoed = await box.exec(["cat"], input=b"\xff\0" * 2_000_000)
        assert echoed.stdout == "\ufffd\0" * 2_000_000
        assert (await box.exec(["true"], input=b"x" * 5_000_000)).success
        await raises(TimeoutError, box.exec(["sleep", "600"], input=b"x", timeout=1))
        assert (await box.exec(["cat"], input=b"")).success
        assert not (await box.exec(["pwd"], cwd="missing")).success
        assert (await box.connection()).command.endswith(made["default"].session.id)
        async with SandboxClient.from_env() as client:
            await (await client.get_session(box.session.id)).destroy()
        await raises(SandboxUnavailableError, box.exec(["true"]))
        await raises(SandboxUnavailableError, box.read_file("x"))
        await raises(ConnectionError, box.connection())
    finally:
        await SandkastenSandboxEnvironment.sample_cleanup("bounds", None, made, False)


if __name__ == "__main__":
    run_all(globals())
