"""An agent of the OpenAI Agents SDK works in a sandbox, with a shell, patches and files.

Needs sandkasten-runtime[agents]. SANDKASTEN_URL, SANDKASTEN_API_KEY and OPENAI_API_KEY name the servers.
"""

import asyncio
import sys

from agents import RunConfig, Runner
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File

from sandkasten.adapters.openai_agents import SandkastenSandboxClient, SandkastenSandboxClientOptions

TASK = sys.argv[1] if len(sys.argv) > 1 else "Count the words of notes.txt with a shell command."


async def main() -> None:
    agent = SandboxAgent(
        name="coder",
        model="gpt-5.5",
        instructions="Work in the sandbox, and answer in a sentence.",
        default_manifest=Manifest(entries={"notes.txt": File(content=b"three small words\n")}),
    )
    options = SandkastenSandboxClientOptions(image="python", on_exit="end")  # or "pause", or "keep"
    sandbox = SandboxRunConfig(client=SandkastenSandboxClient(), options=options)
    result = await Runner.run(agent, TASK, run_config=RunConfig(sandbox=sandbox))
    print(result.final_output)


asyncio.run(main())
