"""Answers that the limit of tokens cut off, and leaving them out of what is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from etude.core.call import Call
from etude.core.sample import PER_TOKEN, Kind, Pair, Sample, SampleOrPair, Turn

CutOff: TypeAlias = Literal["train", "mask", "drop"]
"""Their treatment: trained on like others, left out of the loss, or dropped with their episodes."""

CUT_OFF_EPISODE = "episode with an answer that was cut off"
CUT_OFF_PAIR = "pair in which a whole side was cut off"
CUT_OFF_SAMPLE = "sample in which every answer was cut off"


def count_cut_off(calls: Iterable[Call]) -> int:
    """How many of the calls have an answer that was cut off."""
    completions = (call.completion for call in calls)
    return sum(made is not None and made.finish_reason == "length" for made in completions)


def masked(unit: SampleOrPair, kind: Kind) -> SampleOrPair | str:
    """The unit without what was cut off in its loss; where nothing to learn from is left, the reason.

    A sample that is compared keeps its place in the group, and so counts in the mean. Of what is imitated,
    or has no token ids, such an answer becomes context. In a pair its tokens are masked.
    """
    if isinstance(unit, Pair):
        return _masked_pair(unit)
    if not any(map(_is_cut, unit.turns)):
        return unit
    if kind == "samples" and unit.ids:
        return unit.weighted(not _is_cut(turn) for turn in unit.turns)
    kept = [turn for turn in unit.turns if not _is_cut(turn)]
    return _with_turns(unit, kept) if kept else CUT_OFF_SAMPLE


def _is_cut(turn: Turn) -> bool:
    return turn.finish_reason == "length"


def _masked_pair(pair: Pair) -> Pair | str:
    chosen, rejected = (replace(side, mask=_complete(side)) for side in pair.samples)
    if chosen.ids and rejected.ids:
        is_empty = not (any(chosen.mask[pair.shared :]) and any(rejected.mask[pair.shared :]))
    else:  # Texts are compared as wholes.
        is_empty = any(map(_is_cut, (*chosen.turns, *rejected.turns)))
    return CUT_OFF_PAIR if is_empty else replace(pair, chosen=chosen, rejected=rejected)


def _complete(sample: Sample) -> tuple[bool, ...]:
    """The mask [T] without what was cut off."""
    complete = sample.by_token(not _is_cut(turn) for turn in sample.turns)
    return tuple(own and bool(kept) for own, kept in zip(sample.mask, complete, strict=True))


def _with_turns(sample: Sample, kept: Sequence[Turn]) -> Sample:
    """The sample of these of its turns; the others are context, and what follows the last is cut away."""
    end, last = kept[-1].stop, kept[-1].message
    fields: dict[str, Any] = {"ids": sample.ids[:end], "mask": _complete(sample)[:end]}
    for name in PER_TOKEN:
        values = getattr(sample, name)
        fields[name] = None if values is None else values[:end]
    messages = sample.messages[: last + 1] if last >= 0 else sample.messages
    return replace(sample, turns=tuple(kept), messages=messages, **fields)
