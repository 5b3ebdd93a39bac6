"""An evaluation of inspect-ai, each sample in a sandbox of its own.

Needs sandkasten-runtime[inspect]. SANDKASTEN_URL and SANDKASTEN_API_KEY name the server. Then
`inspect eval inspect_task.py --model anthropic/claude-sonnet-5-5`, or with a scripted model `python inspect_task.py`.
"""

import sys
import tempfile

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec

from sandkasten.adapters.inspect import SandkastenSandboxConfig


@task
def word_count() -> Task:
    return Task(
        dataset=[Sample(input="How many words has notes.txt?", target="3", files={"notes.txt": "three small words\n"})],
        solver=[use_tools(bash(timeout=60)), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("sandkasten", SandkastenSandboxConfig(image="python")),
    )


if __name__ == "__main__":
    outputs = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "wc -w <notes.txt"}),
        ModelOutput.from_content("mockllm/model", "It has 3 words."),
    ]
    for each in outputs:
        each.usage = ModelUsage()
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(word_count(), model=get_model("mockllm/model", custom_outputs=outputs), log_dir=logs)
        print([each.text for each in log.samples[0].messages if each.role == "tool"], log.results.scores[0].metrics)
    sys.exit(log.status != "success")
