"""A deep agent of LangChain works in a sandbox, with files, search and commands.

Needs sandkasten-runtime[langchain]. SANDKASTEN_URL, SANDKASTEN_API_KEY and ANTHROPIC_API_KEY name the servers.
"""

import asyncio
import sys

from deepagents import create_deep_agent

from sandkasten.adapters.langchain import SandkastenSandbox

TASK = sys.argv[1] if len(sys.argv) > 1 else "Write /workspace/primes.py, which prints ten primes, and run it."


async def main() -> None:
    with SandkastenSandbox.create(image="python") as sandbox:
        agent = create_deep_agent(model="anthropic:claude-sonnet-5-5", backend=sandbox)
        result = await agent.ainvoke({"messages": [{"role": "user", "content": TASK}]})
        print(result["messages"][-1].text)


asyncio.run(main())
