"""A Python file with an agent and evaluators that run, to be filled in with those of another harness."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

_AGENT = '''\
"""The agent and the scores of {source}. Put your own code in; what is here runs and knows little."""

import etude


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    """One run of the agent on one example: for now, the question and the model's answer to it.

    Code that works with an OpenAI client keeps doing so: `client = episode.openai()`.
    """
    reply = await episode.chat([{{"role": "user", "content": str(example.inputs["question"])}}])
    return reply.text
'''

_EVALUATOR = '''

@etude.evaluator
def {name}(example: etude.Example, output: str) -> float:
    """In place of the evaluator {told}: 1.0 for exactly the expected answer."""
    return float(output.strip() == str(example.expected).strip())
'''

_TAKEN = {"play", "etude", "float", "str"}


def function_names(names: Iterable[str]) -> dict[str, str]:
    """A Python name for each of the evaluators, no two alike."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not plain.isidentifier() or keyword.iskeyword(plain) or plain in _TAKEN:
            plain = f"evaluator_{plain}"
        while plain in found.values():
            plain += "_"
        found[name] = plain
    return found


def agent_file(source: str, functions: dict[str, str]) -> str:
    """The content of the file. `functions` has a Python name for each evaluator."""
    scores = [_EVALUATOR.format(name=plain, told=ascii(name)) for name, plain in functions.items()]
    return _AGENT.format(source=ascii(source)) + "".join(scores)
