"""The model that the clients talk to: a tiny Llama that has learned what agents say in their conversations.

It is trained, in seconds, on a question, a call of a tool, its result and the answer. Its chat template shows
it the end of long messages and no system prompt, so that what clients write around does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from etude.core.message import Message, Tool
from etude.models.policy import Policy
from etude.models.tiny import CHAT_TEMPLATE, TinyShape, build_policy, build_tokenizer, conversation_texts
from tests.clients.drive import CODING_TASK, QUESTION

_SHOWN_CHARACTERS = 112
_REMINDER = "</system-reminder>\\n\\n"
_NOTHING_ASKED = ("</environment_context>", "</system>")
"""The ends of messages in which coding agents tell of the place where they are, or the system says more."""
_BEGINNINGS = (QUESTION, "Answer in JSON")
"""Where a user's own words begin in a turn that has the system message before them."""
_TOOLS = ("add", "Sum", "final_result", "transfer_to_adder", "Bash", "exec_command")
"""Coding agents have dozens of others."""
_LEARNING_RATE = 6e-3
_SHARPNESS = 3.0
"""The model's logits are stretched by as much: it says what it has learned, whatever the seed."""


def _last_words() -> str:
    """The template's expression for what is shown of a message."""
    words = f"message.content.split('{_REMINDER}')[-1]"
    for beginning in _BEGINNINGS:
        question = f"('{beginning}' ~ message.content.split('{beginning}')[-1])"
        words = f"({question} if '{beginning}' in message.content else {words})"
    return f"({words})[-{_SHOWN_CHARACTERS}:]"


_TEMPLATE = (
    CHAT_TEMPLATE.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' %}{{ message.content }}"
        f"{{% else %}}{{{{ {_last_words()} }}}}{{% endif %}}",
    )
    .replace(
        "for message in messages %}",
        "for message in messages if message.role not in ('system', 'developer') "
        f"and not (message.content or '').endswith({_NOTHING_ASKED!r}) %}}",
    )
    .replace("for tool in tools %}", f"for tool in tools if tool.function.name in {_TOOLS!r} %}}")
)

_NOT_TRAINED = -100


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def _result(text: str) -> Message:
    return {"role": "tool", "content": text}


_SAYS_IT = _says("It is 3.")
_ASKS = _user(QUESTION)
_ADDED = [_ASKS, _calls("add", a=1, b=2), _result("3")]

_COMMAND = "echo 3 > answer.txt"
_RAN = (
    "Chunk ID: {}\nWall time: 0.0000 seconds\nProcess exited with code 0\nOriginal token count: 0\nOutput:\n"
)
_CODED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Bash", {"command": _COMMAND, "description": "Write it"}, ["(Bash completed with no output)"]),
    ("exec_command", {"cmd": _COMMAND}, [_RAN.format("4e4f4c"), _RAN.format("07a9d1")]),
]
"""The tools of Claude Code and of Codex, how each is called, and what it may answer."""

Transcript: TypeAlias = tuple[str, list[Message]]
"""The names of the tools that are offered, and a conversation as the clients lead it; its end is learned."""

PLAIN: list[Transcript] = [
    ("", [_ASKS, _SAYS_IT]),
    ("", [_ASKS, _SAYS_IT, _user("Are you sure?"), _says("Yes, I am.")]),
    *((names, _ADDED[:2]) for names in ("add", "add,Sum")),
    ("add", [*_ADDED, _SAYS_IT]),
    ("Sum", [_ASKS, _calls("Sum", sum=3)]),
    ("add,Sum", [*_ADDED, _calls("Sum", sum=3)]),
    ("", [_user("Answer in JSON."), _says('{"sum": 3}')]),
]
"""The talks of the providers' own libraries. Others are longer, and take four times as long to learn."""

TRANSCRIPTS: list[Transcript] = [
    *PLAIN,
    ("add,final_result", _ADDED[:2]),
    ("transfer_to_adder", [_ASKS, _calls("transfer_to_adder")]),
    ("", [_ASKS, _calls("transfer_to_adder"), _result('{"assistant": "adder"}'), _SAYS_IT]),
    ("final_result", [_ASKS, _calls("final_result", sum=3)]),
    ("add,final_result", [*_ADDED, _calls("final_result", sum=3)]),
    *(
        (name, [_user(CODING_TASK), _calls(name, **arguments), *later])
        for name, arguments, results in _CODED
        for later in ([], *([_result(result), _says("It is done.")] for result in results))
    ),
]


def build_model(folder: Path, transcripts: Sequence[Transcript], steps: int) -> Policy:
    """Train the model, and write it to `folder`."""
    texts = [
        text for names, messages in transcripts for text in conversation_texts([messages], _tools(names))
    ]
    # A token never reaches across punctuation, so that what a form forces is what was learned.
    tokenizer = build_tokenizer(texts, vocab_size=512, splits=["[^A-Za-z_]"])
    tokenizer.chat_template = _TEMPLATE
    policy = build_policy(tokenizer, 0, TinyShape(max_context=2048))
    _imitate(policy, [_encode(policy, names, messages) for names, messages in transcripts], steps)
    with torch.no_grad():
        policy.model.model.norm.weight *= _SHARPNESS
    policy.export(folder)
    return policy


def _tools(names: str) -> list[Tool]:
    return [{"type": "function", "function": {"name": name}} for name in names.split(",") if name]


def _encode(policy: Policy, names: str, messages: Sequence[Message]) -> list[int]:
    text = policy.tokenizer.apply_chat_template(messages, tools=_tools(names) or None, tokenize=False)
    ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _imitate(policy: Policy, sequences: Sequence[Sequence[int]], steps: int) -> None:
    """Steps of AdamW on what the assistant says last, each on all sequences."""
    ordered = sorted(sequences, key=len)
    middle = 2 * len(ordered) // 3
    batches = [_batch(policy, ordered[:middle]), _batch(policy, ordered[middle:])]
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        for ids, labels in batches:
            # Padding is on the right, where causal attention does not see it.
            policy.model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
        schedule.step()


def _batch(policy: Policy, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, padded, of the same length."""
    start, pad = policy.tokenizer.convert_tokens_to_ids("<|assistant|>"), policy.tokenizer.pad_token_id
    longest = max(map(len, sequences))
    ids = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in sequences])
    is_earlier = (ids == start).flip(1).cumsum(1).flip(1) > 0  # The last answer is not begun yet.
    return ids, ids.masked_fill(is_earlier | (ids == pad), _NOT_TRAINED)
