"""From an answer to an action: one of some words, a number, text, or what a function makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from etude.config.import_path import import_object
from etude.core.errors import RequestError

Reader: TypeAlias = Callable[[str], Any]
"""Gives the action that an answer stands for. Raises ValueError, whose message the model is shown."""

Written: TypeAlias = "list[str] | dict[str, Any] | str | None"
"""How a config says it: the words of actions 0, 1, …; words with their actions; `module:function`; or not."""


@dataclass(frozen=True)
class Choice:
    """Reads an answer as one of some words: alone, whatever the case, or the only one that it mentions."""

    actions: Mapping[str, Any]

    def __call__(self, text: str) -> Any:
        """The action of the word. Raises ValueError where none is meant, or several could be."""
        words = {word.casefold(): action for word, action in self.actions.items()}
        answer = text.strip().casefold()
        if answer in words:
            return words[answer]
        mentioned = [word for word in words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer)]
        if len(mentioned) == 1:
            return words[mentioned[0]]
        reason = "several of the actions are in it" if mentioned else "it is none of the actions"
        raise ValueError(f"{reason}. Answer with one of: {', '.join(self.actions)}")


def as_text(text: str) -> str:
    """The answer itself, without white space around it."""
    return text.strip()


def reader_of(written: Written, space: Any) -> Reader:
    """The reader of actions that the config names, or else one for the environment's space of actions.

    Raises RequestError where neither tells.
    """
    if isinstance(written, str):
        function: Reader = import_object(written)
        if not callable(function):
            raise RequestError(f"action: '{written}' is no function of the answer's text")
        return function
    if isinstance(written, list):
        start = int(getattr(space, "start", 0))
        return Choice({word: start + number for number, word in enumerate(written)})
    if isinstance(written, dict):
        return Choice(written)
    kind = type(space).__name__
    if kind == "Discrete":
        return Choice({str(number): number for number in range(int(space.start), int(space.start + space.n))})
    if kind in ("Text", "NoneType"):
        return as_text
    raise RequestError(
        f"action: nothing says how an answer becomes an action of {space}; name a function of the answer's "
        "text, `action: module:function`, which raises ValueError for what is none"
    )
