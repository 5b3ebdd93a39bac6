"""Agent frameworks that reach a sandbox by E2B's SDKs, each driven by a model with a script: a line of JSON for each.

It knows nothing of this repository; the argument is of no meaning.
"""

from __future__ import annotations

import asyncio
import json

from agents import Model, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions, E2BSandboxType
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from deepagents import create_deep_agent
from e2b import Sandbox
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_e2b import E2BSandbox
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage
from smolagents import ChatMessage, CodeAgent, LogLevel
from smolagents import Model as CodeModel

set_tracing_disabled(True)


class Responses(Model):
    """A model of the OpenAI Agents SDK: makes the calls of a list, then says `done`."""

    def __init__(self, *calls):
        self.calls, self.seen = list(calls), []

    async def get_response(self, system_instructions, input, *_, **__):
        self.seen = input
        if self.calls:
            name, arguments = self.calls.pop(0)
            number = f"call_{len(self.calls)}"
            output = ResponseFunctionToolCall(
                call_id=number, name=name, arguments=json.dumps(arguments), type="function_call"
            )
        else:
            text = {"type": "output_text", "text": "done", "annotations": []}
            output = ResponseOutputMessage.model_validate(
                {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
            )
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    async def stream_response(self, *_, **__):
        raise NotImplementedError
        yield


class Chat(BaseChatModel):
    """A model of LangChain's: the same."""

    calls: list[tuple[str, dict]]
    turn: int = 0

    @property
    def _llm_type(self):
        return "script"

    def bind_tools(self, _tools, **_):
        return self

    def _generate(self, _messages, *_, **__):
        message = AIMessage("done")
        if self.turn < len(self.calls):
            name, arguments = self.calls[self.turn]
            message = AIMessage(
                "", tool_calls=[{"name": name, "args": arguments, "id": str(self.turn), "type": "tool_call"}]
            )
        self.turn += 1
        return ChatResult(generations=[ChatGeneration(message=message)])


class Code(CodeModel):
    """A model of smolagents': writes the code of a list."""

    def __init__(self, *turns):
        super().__init__()
        self.turns = list(turns)

    def generate(self, _messages, **_):
        return ChatMessage(role="assistant", content=f"Thought: go\n<code>\n{self.turns.pop(0)}\n</code>")


async def openai_agents():
    script = Responses(
        ("exec_command", {"cmd": "id -un; cat a.txt; echo more > b.txt"}),
        ("exec_command", {"cmd": "cat b.txt; exit 3"}),
    )
    options = E2BSandboxClientOptions(sandbox_type=E2BSandboxType.E2B, on_timeout="kill", auto_resume=False)
    config = SandboxRunConfig(
        client=E2BSandboxClient(), options=options, manifest=Manifest(entries={"a.txt": File(content=b"one\n")})
    )
    ran = await Runner.run(SandboxAgent(name="coder", model=script), "go", run_config=RunConfig(sandbox=config))
    said = [str(each["output"]) for each in script.seen if isinstance(each, dict) and "output" in each]
    return [ran.final_output, *(each.partition("Output:\n")[2].split() for each in said), "code 3" in said[1]]


async def langchain():
    with Sandbox.create() as box:
        calls = [
            ("write_file", {"file_path": "/home/user/src/a.py", "content": "print(6 * 7)\n"}),
            ("edit_file", {"file_path": "/home/user/src/a.py", "old_string": "7", "new_string": "8"}),
            ("execute", {"command": "python3 src/a.py; id -un"}),
            ("read_file", {"file_path": "/home/user/src/a.py"}),
        ]
        agent = create_deep_agent(model=Chat(calls=calls), backend=E2BSandbox(sandbox=box))
        ended = agent.invoke({"messages": [{"role": "user", "content": "go"}]})
    answers = [str(each.content) for each in ended["messages"] if isinstance(each, ToolMessage)]
    return [ended["messages"][-1].content, answers[2].split()[:2], "6 * 8" in answers[3]]


async def smolagents():
    def solve():
        model = Code("x = 6 * 7\nprint('thinking')", "import os\nfinal_answer([x, os.getcwd()])")
        with CodeAgent(tools=[], model=model, executor_type="e2b", verbosity_level=LogLevel.OFF) as agent:
            return agent.run("go")

    return await asyncio.to_thread(solve)


async def main():
    for scenario in (openai_agents, langchain, smolagents):
        print(json.dumps({"name": scenario.__name__, "value": await scenario()}), flush=True)


asyncio.run(main())
