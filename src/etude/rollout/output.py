"""What a workflow returned, as an episode keeps it."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from etude.core.call import Call, Completion
from etude.core.data_model import kind_of
from etude.core.episode import EpisodeRecord
from etude.core.example import Example
from etude.rollout.reply import Reply, ToolCall
from etude.store.plain import plain

_CLIENTS = ("openai", "anthropic", "langchain_core", "litellm", "pydantic_ai")
"""Libraries whose objects are answers, or what stands around them: as JSON they would be scored as if
they were what the agent says."""

_OURS = (Call, Completion, EpisodeRecord, Example, ToolCall)


class NoOutput(Exception):
    """What a workflow returned is no output: a sentence that says what came, and what to return."""


def output_of(returned: Any) -> Any:
    """`returned` as JSON keeps it; of a `Reply` its text.

    Raises NoOutput for what cannot be kept and for what was surely not meant.
    """
    if returned is None:
        raise NoOutput("the workflow returned None; return its answer")
    try:
        output = plain(_meant(returned))
        json.dumps(output)
    except NoOutput:
        raise
    except RecursionError as error:
        raise NoOutput("the output holds itself, or is too deep to be kept; return something flat") from error
    except Exception as error:
        raise NoOutput(
            f"the output cannot be kept: {error or type(error).__name__}; "
            "return text, numbers, lists or dicts"
        ) from error
    return output


def _meant(value: Any) -> Any:
    """The value with the text of each `Reply` in its place. Raises NoOutput for what is no output."""
    if isinstance(value, Reply):
        return _text(value)
    if isinstance(value, Mapping):
        return {key: _meant(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_meant(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    kind = kind_of(value)
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()  # Or Python would warn that nobody awaited it.
        raise NoOutput(f"the workflow returned {kind} that nobody awaited; write `return await …`")
    if isinstance(value, Iterator | AsyncIterator):
        raise NoOutput(
            f"the workflow returned {kind} (does it `yield`?); return all of it, as a list or text"
        )
    if isinstance(value, _OURS):
        raise NoOutput(f"the workflow returned {kind} of etude; return the answer, such as `reply.text`")
    if type(value).__module__.partition(".")[0] in _CLIENTS:
        package = type(value).__module__.partition(".")[0]
        raise NoOutput(f"the workflow returned {kind} of {package}; return the text of the answer in it")
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        raise NoOutput(f"the workflow returned {kind_of(value)}; return it as a list: `.tolist()`")
    if isinstance(value, type) or (callable(value) and not _is_data(value)):
        raise NoOutput(f"the workflow returned {value!r:.80}, which can be called; return its result")
    return value


def _is_data(value: Any) -> bool:
    return hasattr(value, "model_dump") or dataclasses.is_dataclass(value)


def _text(reply: Reply) -> str:
    if reply.tool_calls and not reply.text:
        names = ", ".join(call.name for call in reply.tool_calls)
        raise NoOutput(
            f"the workflow returned a Reply without text that calls tools ({names}); call them and ask "
            "again, or return `reply.message` if the calls are the answer"
        )
    return reply.text
