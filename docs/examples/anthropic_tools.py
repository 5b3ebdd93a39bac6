"""Claude works in a sandbox with the tools it was trained with, by the tool runner of the package `anthropic`.

Needs sandkasten-runtime[anthropic]. SANDKASTEN_URL, SANDKASTEN_API_KEY and ANTHROPIC_API_KEY name the servers.
"""

import asyncio
import sys

from anthropic import AsyncAnthropic

from sandkasten import SandboxClient
from sandkasten.adapters.anthropic import sandbox_tools

TASK = sys.argv[1] if len(sys.argv) > 1 else "Write a program that prints the first ten primes, and run it."


async def main() -> None:
    async with (
        SandboxClient.from_env() as client,
        await client.create_session(image="python") as box,
        AsyncAnthropic() as claude,
    ):
        runner = claude.beta.messages.tool_runner(
            model="claude-sonnet-5-5",
            max_tokens=4096,
            tools=sandbox_tools(box),
            messages=[{"role": "user", "content": TASK}],
        )
        async for message in runner:
            for block in message.content:
                print(block.text if block.type == "text" else f"[{block.name}] {block.input}")


asyncio.run(main())
