"""Tool use without a framework: Claude works in a sandbox, by a loop over the messages API.

Needs sandkasten-runtime and anthropic. SANDKASTEN_URL, SANDKASTEN_API_KEY and ANTHROPIC_API_KEY name the servers.
"""

import sys

import anthropic

from sandkasten.sync import SandboxClient

TASK = sys.argv[1] if len(sys.argv) > 1 else "Which Python is installed, and what is 2 to the power of 100?"
TOOLS = [{"type": "bash_20250124", "name": "bash"}]
messages = [{"role": "user", "content": TASK}]

with SandboxClient.from_env() as client, client.create_session(image="python") as box, anthropic.Anthropic() as claude:
    while True:
        reply = claude.messages.create(model="claude-sonnet-5-5", max_tokens=4096, tools=TOOLS, messages=messages)
        messages.append({"role": "assistant", "content": reply.content})
        results = []
        for block in reply.content:
            if block.type == "text":
                print(block.text)
            elif block.type == "tool_use":
                done = box.exec(block.input.get("command", "exit 0"), timeout_ms=120_000, on_timeout="result")
                text = f"{done.output[-30_000:]}\n[{done.cause}, exit code {done.exit_code}]"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": text})
        if not results:
            break
        messages.append({"role": "user", "content": results})
