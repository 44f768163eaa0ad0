"""Tokens and logprobs in an endpoint's answer: reading them, and what cannot be or is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from etude.core.call import Completion, Token, TopLogprobs
from etude.core.errors import ImpossibleCall

_NAMED = "token_id:"
"""How vLLM names a token by its id."""

_ROUNDING = 1e-4
"""By which a logprob may lie above 0."""
_LARGEST_ID = 2**31 - 1


def require_asked(
    completion: Completion,
    *,
    logprobs: bool = False,
    top: int = 0,
    prompt: bool = False,
) -> None:
    """Raise ImpossibleCall, with its name, for what was asked for and is not in an answer that has tokens."""
    if prompt and len(completion.prompt_ids or ()) != len(completion.prompt_logprobs) + 1:
        missing = "prompt_logprobs"
    elif completion.usage.completion_tokens == 0:
        return
    elif top and not completion.top_logprobs:
        missing = "top_logprobs"
    elif logprobs and completion.logprobs is None:
        missing = "logprobs"
    else:
        return
    raise ImpossibleCall(
        f"the answer lacks what {missing} asks for; leave it out of the request or the config, or take an "
        "endpoint that gives it",
        param=missing,
    )


def require_possible(
    logprobs: Sequence[float], ids: Sequence[int] = (), vocabulary: int | None = None
) -> None:
    """Raise ValueError for logprobs that are none, and for ids that no token of the vocabulary has."""
    if logprobs and not (all(map(math.isfinite, logprobs)) and max(logprobs) <= _ROUNDING):
        impossible = next(value for value in logprobs if not -math.inf < value <= _ROUNDING)
        raise ValueError(f"{impossible} is no logprob")
    largest = _LARGEST_ID if vocabulary is None else vocabulary - 1
    if ids and not (min(ids) >= 0 and max(ids) <= largest):
        unknown = next(token for token in ids if not 0 <= token <= largest)
        raise ValueError(f"there is no token with the id {unknown}; the largest is {largest}")


def read_prompt_logprobs(
    rows: Sequence[Mapping[str, Any] | None] | None, ids: Sequence[int] | None, count: int
) -> list[tuple[float, TopLogprobs]]:
    """From vLLM's `prompt_logprobs`, of each token but the first: its own logprob, and the likeliest ones.

    Raises KeyError, TypeError and ValueError for what is none.
    """
    scores: list[tuple[float, TopLogprobs]] = []
    for token, row in zip(ids[1:], rows[1:], strict=True) if rows and ids is not None else ():
        if row is None:
            raise TypeError("a token of the prompt has no logprobs")
        values: dict[Token, float] = {int(other): float(entry["logprob"]) for other, entry in row.items()}
        scores.append((values[token], likeliest(values, count)))
    return scores


def likeliest(values: Mapping[Token, float], count: int) -> TopLogprobs:
    """The likeliest tokens, best first; vLLM adds the one that is there, where it is not among them."""
    return tuple(sorted(values.items(), key=lambda pair: -pair[1])[:count])


def named_ids(tokens: Any) -> tuple[int, ...] | None:
    """The ids in tokens like `token_id:42`; None where the tokens are called by their text."""
    named = [str(token.get("token", "")) for token in tokens]
    if not named or not all(name.startswith(_NAMED) and name[len(_NAMED) :].isdecimal() for name in named):
        return None
    return tuple(int(name[len(_NAMED) :]) for name in named)


def texts_of(tokens: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The text of each token; none where the endpoint tells none."""
    texts = tuple([str(token.get("token", "")) for token in tokens])
    return texts if any(texts) else ()


def tops_of(tokens: Sequence[Mapping[str, Any]], count: int) -> tuple[TopLogprobs, ...]:
    """Of each token the likeliest ones, by their ids where they are named so; none where there are none."""
    tops = [token.get("top_logprobs") or () for token in tokens]
    if not any(tops):
        return ()
    return tuple(
        likeliest({_token(str(each["token"])): float(each["logprob"]) for each in top}, count) for top in tops
    )


def _token(name: str) -> Token:
    number = name.removeprefix(_NAMED)
    return int(number) if number != name and number.isdecimal() else name
