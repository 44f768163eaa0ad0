"""The trial of a user's own algorithm before a run, so that its errors and wrong return values show."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeGuard

from etude.algorithms.algorithm import Algorithm
from etude.algorithms.episodes import ScoredEpisode, Tally
from etude.config.import_path import where_raised
from etude.core.call import Call, ChatRequest, Completion
from etude.core.data_model import number
from etude.core.episode import WORKFLOW, EpisodeRecord, Example
from etude.core.errors import EtudeError, RequestError
from etude.core.message import Message
from etude.core.sample import Sample

if TYPE_CHECKING:
    import torch

    from etude.learner.objective import MicroBatch


def is_custom(algorithm: object) -> TypeGuard[Algorithm]:
    """Return whether an algorithm is a user's own."""
    return isinstance(algorithm, Algorithm) and not type(algorithm).__module__.startswith("etude.")


def try_algorithm(algorithm: Algorithm, examples: Sequence[Example]) -> None:
    """Make samples from made-up episodes on these examples, and a step's loss on them.

    Raises RequestError that names the line of an error, or the methods one of which returned a wrong value.
    """
    episodes = [_group(example) for example in examples[:2] or (Example("made-up-1"), Example("made-up-2"))]
    name = type(algorithm).__qualname__
    try:
        _try_step(algorithm, episodes)
    except EtudeError as error:
        raise RequestError(f"{name}: {error}") from error
    except Exception as error:
        raise RequestError(f"{name}{_explained(algorithm, error)}") from error


def _try_step(algorithm: Algorithm, episodes: Sequence[list[ScoredEpisode]]) -> None:
    try:
        made = algorithm.groups(episodes, Tally())
    except RequestError:
        return  # It needs episodes of a protocol, or scores of agents.

    units = algorithm.units([group.units for group in made if group.units])
    if not units or find_spec("torch") is None:
        return
    logprobs_BT, batch = _micro_batch(algorithm, units, algorithm.normalised(units))
    loss, metrics = algorithm.loss(logprobs_BT, batch)
    if not loss.requires_grad:
        raise RequestError("its loss does not depend on `logprobs_BT`: it has no gradient")
    loss.backward()  # type: ignore[no-untyped-call]
    if not (loss.isfinite().all() and logprobs_BT.grad is not None and logprobs_BT.grad.isfinite().all()):
        raise RequestError(f"its loss, or the gradient, is not finite: it is {loss.item()}")
    for value in metrics.values():
        number(value)


def _explained(algorithm: Algorithm, error: Exception) -> str:
    file, told = inspect.getsourcefile(type(algorithm)), where_raised(error)
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not own:
        methods = ", ".join(
            name for name, value in vars(type(algorithm)).items() if inspect.isfunction(value)
        )
        return f": what it returned cannot be used (it has {methods}): {told}"
    place = f"{own[-1].filename}:{own[-1].lineno}: "
    return f".{own[-1].name} raised {place}{told.removeprefix(place)}"


def _group(example: Example) -> list[ScoredEpisode]:
    """Make episodes of one answer each, with different rewards."""
    question: Message = {"role": "user", "content": "What is 1 + 1?"}
    group = []
    for generation, reward in enumerate((0.0, 1.0, 0.5, 0.25)):
        ids = tuple(range(10 + generation, 13 + 2 * generation))
        reply: Message = {"role": "assistant", "content": f"It is {generation}."}
        logprobs = tuple(-0.1 * (place + 1) for place in range(len(ids)))
        answer = Completion(reply, prompt_ids=(1, 2, 3), completion_ids=ids, logprobs=logprobs)
        call = Call(0, WORKFLOW, "policy", ChatRequest((question,)), answer)
        name = f"train/1/{example.id}/{generation}"
        record = EpisodeRecord(name, example, generation, (call,), (), reply["content"])
        group.append(ScoredEpisode(record, reward, [call]))
    return group


def _micro_batch(
    algorithm: Algorithm, units: Sequence[Sequence[Sample]], factors: Sequence[Sequence[float]]
) -> tuple[torch.Tensor, MicroBatch]:
    """Make a batch with logprobs that have a gradient, from a policy slightly trained since it sampled."""
    import torch

    from etude.learner.objective import MicroBatch

    samples = [sample for unit in units for sample in unit]
    scale_B1 = torch.tensor([[float(factor)] for unit in factors for factor in unit])

    def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        width = max(map(len, rows))
        return torch.tensor([[*map(float, row), *[0.0] * (width - len(row))] for row in rows])

    sampled_BT = padded([sample.logprobs or [0.0] * len(sample.ids) for sample in samples])
    weights_BT = padded([sample.loss_weights for sample in samples]) * scale_B1
    logprobs_BT = (sampled_BT - 0.01 * (weights_BT != 0)).requires_grad_()
    batch = MicroBatch(
        weights_BT=weights_BT,
        advantages_BT=padded([sample.gains for sample in samples]),
        sampled_BT=sampled_BT,
        unit_share=1 / len(units),
        token_share=1 / max(1, int((weights_BT != 0).sum())),
        reference_BT=sampled_BT.clone() if "reference" in algorithm.needs() else None,
    )
    return logprobs_BT, batch
