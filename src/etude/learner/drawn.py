"""How the tokens of samples were drawn, so that the learner can form the distributions that they are from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.core.call import Sampling
from etude.core.errors import EngineError, TrainingError
from etude.core.sample import Sample, Turn
from etude.models.distribution import Shape, Shaper
from etude.models.grammar import Grammars

_LOG = logging.getLogger("etude.learner")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of a sample's T tokens."""

    kinds: list[int]
    """Tokens that follow the same tokens have the same shape where these numbers are the same."""
    shapes: list[Shape | None]
    """Of the distributions that they were drawn from; None where those are the model's own."""


def drawn(samples: Sequence[Sample], grammars: Grammars) -> list[Drawn]:
    """How the tokens of samples were drawn. Raises TrainingError for a constraint that cannot be kept."""
    numbers: dict[tuple[Sampling, int], int] = {}
    shapes = []
    for sample in samples:
        length = len(sample.ids)
        own = Drawn([0] * length, [None] * length)
        for turn in sample.turns:
            if turn.start == turn.stop or not Shaper.is_needed(turn.sampling):
                continue
            span, kind = slice(turn.start, turn.stop), (turn.sampling, turn.start)
            own.kinds[span] = [numbers.setdefault(kind, len(numbers) + 1)] * (turn.stop - turn.start)
            own.shapes[span] = _shapes(sample, turn, grammars)
        shapes.append(own)
    return shapes


def _shapes(sample: Sample, turn: Turn, grammars: Grammars) -> list[Shape]:
    prompt, answer = sample.ids[: turn.start], sample.ids[turn.start : turn.stop]
    sampling = turn.sampling
    try:
        shapes = grammars.replayed(sampling, prompt, answer)
        if shapes is None:
            _LOG.warning(
                "an answer of episode %s is not of the form that it was sampled in (%s), as the learner "
                "reads that: it is trained on without",
                sample.episode or "?",
                sampling.constraint and sampling.constraint.kind,
            )
            shapes = grammars.replayed(replace(sampling, constraint=None), prompt, answer)
    except EngineError as error:
        raise TrainingError(f"episode {sample.episode or '?'}: {error}") from error
    return shapes or []
