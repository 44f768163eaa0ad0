"""The text in which a model family writes a tool call with JSON arguments, read off its chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass

from etude.models.probe import ARGUMENTS, NAME


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the names and the JSON arguments of the tool calls of one answer.

    An answer with one call is `prefix NAME between ARGUMENTS suffix` and the token that ends the turn; with
    two calls it is `prefix NAME between ARGUMENTS separator NAME between ARGUMENTS suffix`.
    """

    prefix: str
    """Begins where the prompt ends. Of a family that always writes its thinking, an empty one is in it."""
    between: str
    suffix: str
    separator: str | None
    """None where an answer of the family has one call only."""

    def write(self, *calls: tuple[str, str]) -> str:
        """The answer with these calls: the name and the JSON text of the arguments of each.

        Raises ValueError for several calls where the family writes one only.
        """
        if self.separator is None and len(calls) > 1:
            raise ValueError("the model's chat template writes one tool call an answer")
        written = (f"{name}{self.between}{arguments}" for name, arguments in calls)
        return f"{self.prefix}{(self.separator or '').join(written)}{self.suffix}"


def call_form(single: str, double: str | None) -> CallForm | None:
    """The form that two renderings show: of an answer with one call, and of one with two calls or None.

    None where the arguments do not stand in the text as JSON.
    """
    match _pieces(single):
        case [prefix, between, suffix]:
            pass
        case _:
            return None
    match _pieces(double or ""):
        case [first, inside, separator, again, _] if [first, inside, again] == [prefix, between, between]:
            return CallForm(prefix, between, suffix, separator)
        case _:
            return CallForm(prefix, between, suffix, None)


def _pieces(text: str) -> list[str]:
    """The text between the probed names and arguments; a single piece where there is none."""
    pieces, rest = [], text
    while NAME in rest:
        before, _, after = rest.partition(NAME)
        start = next((at for at, sign in enumerate(after) if sign == "{" and _json_end(after, at)), None)
        if start is None:
            break
        pieces += [before, after[:start]]
        rest = after[_json_end(after, start) :]
    return [*pieces, rest]


def _json_end(text: str, start: int) -> int:
    """Where the probed arguments end that start at `start`; 0 if they do not stand there."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return 0
    return end if value == ARGUMENTS else 0
