"""Algorithm: which samples come from the episodes of a group, with which advantages, under which loss.

An algorithm is a class of pure functions whose fields are its options, each declared once: the config's
schema, the reference page, the hyperparameters of the server's jobs and the checks are derived from them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

from pydantic import ValidationError

from etude.algorithms.collecting import Collecting, CollectingBuilder
from etude.algorithms.episodes import Collected, Group, UnitGroup
from etude.algorithms.samples import with_turns
from etude.config import registry
from etude.config.import_path import import_object, is_import_path, make_importable
from etude.config.registry import register_trajectory_builder
from etude.config.slots import names_of
from etude.core.data_model import number
from etude.core.edge import Encoder, TrajectoryCollection, units_of
from etude.core.errors import EtudeError, RequestError, TrainingError, alternatives
from etude.core.implementations import wrap_implementations
from etude.core.job import Skipped
from etude.core.sample import Kind, Sample, SampleOrPair
from etude.core.trajectory import Method

if TYPE_CHECKING:
    import torch

    from etude.config.builder import Builder
    from etude.learner.objective import MicroBatch

Divergences = Callable[[Sequence[Sample]], list[list[float]]]
"""For each turn of each sample Σ log π_sampled - log π_reference over its tokens: `Learner.divergences`."""


_ROUNDING = 1e-9
"""Advantages that are smaller are what rounding leaves of equal rewards."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Marks an option of an algorithm that is about the gradient: it travels with a job's data."""

    everywhere: bool = True
    """Whether a server has it too, and not only a learner in this process."""


T = TypeVar("T")

OfGradient: TypeAlias = Annotated[T, Gradient()]
"""`clip_low: OfGradient[float] = Field(0.2, …)`; options without the mark are about collecting."""


class Algorithm(Collecting):
    """Base of all algorithms. Its fields are the options; a subclass is registered when it is defined.

    `class MaxRL(Algorithm, name="maxrl")` is `_type: maxrl`, and without a name `_type: my_module:MaxRL`.
    A subclass overrides what it does otherwise: `samples` or `groups` (which samples come from a group of
    scored episodes), `advantages`, `loss`. For the learner it is an `etude.learner.objective.Objective`.
    """

    loss_parts: ClassVar[tuple[str, ...]] = ("loss", "normalised")
    """The methods that make its loss: a subclass that overrides none of them has the loss of its parent."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Raises RequestError for an option that it does not have.

        What a config has is checked elsewhere, with its line: pydantic makes that without these arguments.
        """
        unknown = next((name for name in options if name not in names_of(cls)), None)
        if unknown is None:
            return super().__new__(cls)
        instead = alternatives(unknown, cls.model_fields)
        if unknown in registry.lookup("trainer_adapters", "local").config_type.model_fields:
            instead = f'; it is one of backend=: backend={{"_type": "local", "{unknown}": …}}'
        raise RequestError(f"{cls.__name__} has no option '{unknown}'{instead}")

    @classmethod
    def __pydantic_init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Register the class under its name, or under its import path; with the name "" not at all."""
        path = f"{cls.__module__}:{cls.__qualname__}"
        super().__pydantic_init_subclass__(name=path if name is None else name, **kwargs)
        for interface in (Collecting, Algorithm):
            wrap_implementations(cls, interface)
        if cls.type_name:
            register_trajectory_builder(config_type=cls)(_build)

    def method_at(self, epoch: int) -> tuple[Method, dict[str, Any]]:
        """Its own name, and the options of its gradient."""
        return self.type_name, self.gradient()

    def gradient(self) -> dict[str, Any]:
        """The options of the gradient, as JSON."""
        return self.model_dump(mode="json", include={*gradient_fields(type(self))})

    @property
    def skips_idle(self) -> bool:
        """Whether units without advantage have no gradient and need not be computed. An algorithm whose loss
        has another term, which reaches them, says no."""
        return self.kind == "samples" and not self.needs() & {"reference", "entropy"}

    def advantages(self, group: Sequence[Sample]) -> Sequence[Sequence[float]] | None:
        """For each sample of a group a number for each of its turns; None where the loss wants none."""
        return None

    def differ(self, group: Sequence[Sample]) -> bool:
        """Whether any of the samples that are compared with each other has an advantage; where the loss wants
        none, whether they have earned different rewards."""
        values = self.advantages(group)
        if values is None:
            return len({(sample.reward, *(sample.returns or ())) for sample in group}) > 1
        # What is no number counts: it is refused by name where it is assigned.
        return any(not abs(value) <= _ROUNDING for turns in values for value in turns)

    def compared(self, groups: Sequence[UnitGroup]) -> list[bool]:
        """For each group of a collection whether it has something to compare: advantages as this algorithm
        gives them, or, of pairs and of what is imitated, rewards that are not all equal."""
        if self.kind != "samples":
            return super().compared(groups)
        samples = [group.samples for group in groups]
        if type(self).assigned is Algorithm.assigned or not all(map(_has_tokens, samples)):
            return [bool(group) and self.differ(group) for group in samples]
        assigned = iter(self.assigned([*filter(None, samples)]))
        own = (next(assigned) if group else () for group in samples)
        return [any(abs(gain) > _ROUNDING for sample in each for gain in sample.gains) for each in own]

    def to_compare(self, episodes: Sequence[Group], collected: Collected) -> Sequence[UnitGroup]:
        """The groups within which it compares: of samples, those that it makes."""
        make = self.groups if self.kind == "samples" else super().to_compare
        return make(episodes, collected)

    def is_idle(self, groups: Sequence[UnitGroup], *, at_base: bool) -> bool:
        """Whether a job on the groups would change nothing: there is no advantage, and no other term of the
        loss. The KL is none while the policy is the model that training began with (`at_base`)."""
        if self.kind != "samples" or self.needs() & {"entropy", "divergence"}:
            return False
        has_other_term = not self.skips_idle and not ("reference" in self.needs() and at_base)
        return not has_other_term and not self.teaches([group.samples for group in groups if group.units])

    def teaches(self, groups: Sequence[Sequence[Sample]]) -> bool:
        """Whether any sample of a job has an advantage, as far as samples without token ids tell."""
        if not all(map(_has_tokens, groups)):
            return True
        return any(sample.has_gradient for group in self.assigned(groups) for sample in group)

    def assigned(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """All samples of a job with their advantages; a group that has them already keeps them."""
        assigned: list[list[Sample]] = []
        for group in groups:
            known = all(sample.advantages is not None for sample in group)
            values = None if known else self.advantages(group)
            assigned.append([*group] if values is None else self._with_advantages(group, values))
        return assigned

    def _with_advantages(self, group: Sequence[Sample], values: Sequence[Sequence[float]]) -> list[Sample]:
        """The samples of a group with their advantages. Raises TrainingError for what are none."""
        who = f"{self.type_name}: `advantages` gives each sample a list with a finite number for each turn"
        try:
            rows = [[number(value) for value in turns] for turns in values]
        except (TypeError, ValueError) as error:
            raise TrainingError(f"{who}: {error}") from error
        if len(rows) != len(group):
            raise TrainingError(f"{who}, and it gave {len(rows)} lists for {len(group)} samples")
        for sample, turns in zip(group, rows, strict=True):
            if len(turns) != len(sample.turns) or not all(map(math.isfinite, turns)):
                gave = f"episode {sample.episode or '?'} with {len(sample.turns)} turns got {turns}"
                raise TrainingError(f"{who}, and {gave}")
        return [
            replace(each, advantages=each.by_token(turns)) for each, turns in zip(group, rows, strict=True)
        ]

    def units(
        self, groups: Sequence[Sequence[SampleOrPair]], divergences: Divergences | None = None
    ) -> tuple[list[tuple[Sample, ...]], dict[str, float]]:
        """All units of a job as the learner takes them, and metrics of what was measured on the way.

        Raises TrainingError when it needs divergences and nobody can measure them.
        """
        if self.kind == "pairs":
            return [unit.samples for group in groups for unit in group], {}
        samples = [[unit for unit in group if isinstance(unit, Sample)] for group in groups]
        metrics: dict[str, float] = {}
        if "divergence" in self.needs():
            if divergences is None:
                raise TrainingError(f"{self.type_name}: an option needs a learner in this process: 'local'")
            by_sample = divergences([sample for group in samples for sample in group])
            values = iter(by_sample)
            samples = [
                [with_turns(sample, "divergence", next(values)) for sample in group] for group in samples
            ]
            metrics["kl_in_reward"] = sum(map(sum, by_sample)) / max(len(by_sample), 1)
        return [sample.samples for group in self.assigned(samples) for sample in group], metrics

    def reason_to_skip(
        self, groups: Sequence[Sequence[SampleOrPair]], *, at_base: bool = False
    ) -> Skipped | None:
        """Why a job on these groups could change nothing; None where it may, as far as is known before it."""
        if not self.is_idle([*map(UnitGroup, groups)], at_base=at_base):
            return None
        reason = (
            "nothing to learn from: no token has both a weight and an advantage, as where all rewards "
            "within a group are the same"
        )
        if "reference" in self.needs():
            reason += "; and beta pulls to the model that the job starts from"
        return Skipped(reason=reason)

    def normalised(self, units: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """For every sample of an optimiser step the factor of its weights: here the mean over all tokens."""
        total = sum(sum(sample.loss_weights) for unit in units for sample in unit)
        return [[1.0 / max(total, 1e-9)] * len(unit) for unit in units]

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's share of the step's loss and of its metrics.

        `logprobs_BT` are those of the policy in training, with gradient; `batch.weights_BT` are normalised.
        """
        raise _no_loss(self)


async def _build(config: Algorithm, builder: Builder) -> AsyncIterator[CollectingBuilder]:
    """The trajectory builder of any algorithm. Raises RequestError for what could never teach anything."""
    if type(config).loss is Algorithm.loss:
        raise _no_loss(config)
    await config.check_protocol(builder)
    yield CollectingBuilder(config)


def _no_loss(algorithm: Algorithm) -> RequestError:
    return RequestError(
        f"{algorithm.type_name} has no loss: override `loss`, or inherit from an algorithm that has one, "
        "such as etude.Grpo"
    )


def gradient_fields(algorithm: type[Algorithm], *, at_server: bool = False) -> Iterator[str]:
    """The names of the options that are about the gradient; of those, the ones that a server has too."""
    for name, field in algorithm.model_fields.items():
        marks = [mark for mark in field.metadata if isinstance(mark, Gradient)]
        if any(mark.everywhere or not at_server for mark in marks):
            yield name


def changed_options(algorithm: Algorithm, of: type[Algorithm] | None = None) -> dict[str, Any]:
    """The options of the gradient (those that the class `of` has) that are not its defaults, as JSON."""
    kind = of or type(algorithm)
    values = algorithm.model_dump(mode="json", include={*gradient_fields(kind)})
    return {name: value for name, value in values.items() if value != kind.model_fields[name].get_default()}


def algorithm_type(name: Method) -> type[Algorithm]:
    """The class of that name, imported where it is `module:Name`. Raises RequestError."""
    if is_import_path(name) and name not in registry.names("trajectory_builders"):
        import_object(name)
    algorithm = registry.lookup("trajectory_builders", name).config_type
    if not issubclass(algorithm, Algorithm):
        raise RequestError(
            f"'{name}' is no algorithm: {algorithm.__qualname__} does not inherit from etude.Algorithm"
        )
    return algorithm


def load_algorithms(paths: Sequence[str]) -> None:
    """Import what ships, and algorithms that somebody vouches for, also from the current folder.

    Raises RequestError.
    """
    registry.load_entry_points()
    if paths:
        make_importable(Path.cwd())
    for path in paths:
        algorithm = import_object(path)
        if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
            raise RequestError(f"'{path}' is no algorithm: a class that inherits from etude.Algorithm")


def algorithm_of(name: Method, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of a collection or a job. Raises RequestError for an unknown one, and for its options."""
    try:
        return algorithm_type(name).model_validate(dict(options or {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise RequestError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def loss_of(algorithm: Algorithm, known: Collection[Method]) -> type[Algorithm] | None:
    """The one of the `known` algorithms that has the same loss; None where none has."""
    own = type(algorithm)
    bases = (base for base in own.__mro__ if issubclass(base, Algorithm) and base.type_name in known)
    for base in bases:
        if all(getattr(own, part) is getattr(base, part) for part in base.loss_parts):
            return base
    return None


def groups_of(
    collection: TrajectoryCollection, algorithm: Algorithm, encoder: Encoder | None = None
) -> list[list[SampleOrPair]]:
    """The samples or pairs of a collection. Raises TrainingError for what the algorithm cannot learn from."""
    needs_logprobs = "logprobs" in algorithm.needs()
    units = partial(units_of, kind=algorithm.kind, encoder=encoder, needs_logprobs=needs_logprobs)
    return [[*chain.from_iterable(map(units, group))] for group in collection.groups]


def kind_of(name: Method) -> Kind:
    """The kind of data that the named algorithm learns from: samples, where there is no such algorithm."""
    try:
        return algorithm_type(name).kind
    except EtudeError:
        return "samples"


def by_turn(
    returns: Sequence[Sequence[float]], compare: Callable[[Sequence[float]], Sequence[float]]
) -> list[list[float]]:
    """The advantages of every turn against the same turn of its siblings; shapes as `returns`.

    `returns[i][t]` is the return of sample i from turn t on. Samples may differ in their number of turns.
    """
    advantages: list[list[float]] = [[] for _ in returns]
    for turn in range(max(map(len, returns), default=0)):
        rows = [row for row, values in enumerate(returns) if len(values) > turn]
        for row, value in zip(rows, compare([returns[row][turn] for row in rows]), strict=True):
            advantages[row].append(value)
    return advantages


def _has_tokens(group: Sequence[Sample]) -> bool:
    return all(sample.ids for sample in group)
