"""Model calls between a runner and the head: each as the difference to one that both ends know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from etude.core.call import Call, ChatRequest, Completion, Delta
from etude.store.encode import decode_call, encode_call, parent_name

Known: TypeAlias = dict[int, Call]
"""The calls of an episode that both ends know, by the runner's numbers."""


def encode_request(request: ChatRequest, model: str, number: int, known: Known) -> dict[str, Any]:
    """JSON of a request; the calls before it that the other end does not know go along, and are known then.

    `known` changes, as it does at the other end.
    """
    numbers = {id(call.completion): each for each, call in known.items()}
    earlier: list[int] = []
    sent: list[Any] = []
    for call in request.earlier:
        if id(call.completion) not in numbers:
            each = -1 - len(known) - len(sent)  # Of calls that were asked for here they are not negative.
            sent.append([each, encode_call(call, _last(earlier, known))])
            known[each] = call
            numbers[id(call.completion)] = each
        earlier.append(numbers[id(call.completion)])
    asked = Call(0, "", model, replace(request, earlier=(), on_delta=None))
    return {
        "number": number,
        "conversation": request.conversation,
        "call": encode_call(asked, _last(earlier, known)),
        "earlier": earlier,
        "sent": sent,
        "streams": request.on_delta is not None,
    }


def decode_request(data: Mapping[str, Any], known: Known) -> Call:
    """The call that is asked for, with the request's earlier calls. `known` changes as at the other end."""
    conversation = data["conversation"]
    for each, encoded in data["sent"]:
        known[each] = decode_call(encoded, conversation, _parent(encoded, known))
    asked = decode_call(data["call"], conversation, _parent(data["call"], known))
    earlier = tuple(known[each] for each in data["earlier"])
    return replace(asked, request=replace(asked.request, earlier=earlier))


def encode_answer(call: Call, known: Known, earlier: list[int]) -> Any:
    """JSON of the completion of a call that was asked for."""
    return encode_call(call, _last(earlier, known))["completion"]


def decode_answer(asked: Mapping[str, Any], completion: Any, known: Known) -> Completion:
    """The completion of the request that `encode_request` made `asked` of."""
    data = {**asked["call"], "completion": completion}
    call = decode_call(data, asked["conversation"], _parent(data, known))
    assert call.completion is not None
    known[asked["number"]] = call
    return call.completion


def encode_delta(delta: Delta) -> Any:
    """JSON of a piece of an answer."""
    return asdict(delta)


def decode_delta(data: Mapping[str, Any]) -> Delta:
    """The piece that `encode_delta` made `data` of."""
    prompt = data["prompt_ids"]
    return Delta(
        content=data["content"],
        reasoning=data["reasoning"],
        ids=tuple(data["ids"]),
        logprobs=tuple(data["logprobs"]),
        top=tuple(tuple((token, logprob) for token, logprob in each) for each in data["top"]),
        prompt_ids=None if prompt is None else tuple(prompt),
    )


def _last(earlier: list[int], known: Known) -> tuple[str, Call] | None:
    return (str(earlier[-1]), known[earlier[-1]]) if earlier else None


def _parent(encoded: Any, known: Known) -> Call | None:
    name = parent_name(encoded)
    return None if name is None else known[int(name)]
