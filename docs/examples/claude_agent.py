"""Claude Code's agent works in a sandbox, by the Claude Agent SDK: the server's MCP tools take the place of its own.

Needs sandkasten-runtime and claude-agent-sdk. SANDKASTEN_URL, SANDKASTEN_API_KEY and ANTHROPIC_API_KEY name the
servers.
"""

import asyncio
import os
import sys

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, TextBlock, query

from sandkasten.adapters.anthropic import claude_agent_options

TASK = sys.argv[1] if len(sys.argv) > 1 else "Write a program that prints the first ten primes, and run it."
SANDBOX = claude_agent_options(os.environ["SANDKASTEN_URL"], os.environ.get("SANDKASTEN_API_KEY"), sandbox="primes")


async def main() -> None:
    options = ClaudeAgentOptions(model="claude-sonnet-5-5", **SANDBOX)
    async for message in query(prompt=TASK, options=options):
        if isinstance(message, AssistantMessage):
            for block in message.content:
                print(block.text if isinstance(block, TextBlock) else f"[{block}]")


asyncio.run(main())
