"""The base class of algorithms: which samples a group of episodes gives, with which advantages and loss.

An algorithm is a class of pure functions whose fields are its options. Each option is declared once. The
config's schema, the reference page, the hyperparameters of server jobs and the checks are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from etude.algorithms.collecting import Collecting, CollectingBuilder
from etude.algorithms.samples import UnitGroup
from etude.config import registry
from etude.config.import_path import class_path, import_object, is_import_path, make_importable
from etude.config.key_types import field_names
from etude.config.registry import register_trajectory_builder
from etude.core.conversion import Encoder, convert_unit
from etude.core.data_model import list_faults, number
from etude.core.errors import EtudeError, RequestError, TrainingError, alternatives
from etude.core.interfaces import wrap_implementations
from etude.core.job import Skipped
from etude.core.sample import Kind, Sample, SampleOrPair, TrainingUnit, is_complete
from etude.core.trajectory import Method

if TYPE_CHECKING:
    import torch

    from etude.config.builder import Builder
    from etude.learner.objective import MicroBatch

_ROUNDING = 1e-9
"""Advantages below this are rounding noise between equal rewards."""
_COLLECTION = "collection"

T = TypeVar("T")
A = TypeVar("A", bound="Algorithm")

OfCollection: TypeAlias = Annotated[T, _COLLECTION]
"""Marks an option of a shipped algorithm that does not concern the gradient, so that no job has it."""


class Algorithm(Collecting):
    """Base class of all algorithms. Its fields are the options. Defining a subclass registers it.

    `class MaxRL(Algorithm, name="maxrl")` is `_type: maxrl`; without a name it is `_type: my_module:MaxRL`. A
    subclass overrides what differs: `samples` or `groups` (the samples of a group of scored episodes),
    `advantages`, `loss`. The learner uses it as an `etude.learner.objective.Objective`.
    """

    loss_parts: ClassVar[tuple[str, ...]] = ("loss", "weight_factors")
    """The methods that make the loss. A subclass that overrides none of them has its parent's loss."""

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Create the algorithm. Raises RequestError for an unknown option or a wrong value.

        Options from a config are checked elsewhere, with their line. Pydantic passes none of them here.
        """
        unknown = next((name for name in options if name not in field_names(cls)), None)
        if unknown is None:
            if options and cls.__init__ is Algorithm.__init__:  # Pydantic calls a class's own.
                _validate(cls, cls.__name__, options)
            return super().__new__(cls)
        instead = alternatives(unknown, cls.model_fields)
        if unknown in registry.lookup("trainer_adapters", "local").config_type.model_fields:
            instead = f'; it is one of backend=: backend={{"_type": "local", "{unknown}": …}}'
        raise RequestError(f"{cls.__name__} has no option '{unknown}'{instead}")

    @classmethod
    def __pydantic_init_subclass__(cls, *, name: str | None = None, **kwargs: Any) -> None:
        """Register the class under its name or its import path. The name "" registers nothing."""
        super().__pydantic_init_subclass__(name=class_path(cls) if name is None else name, **kwargs)
        parents = (each for each in reversed(cls.__mro__[1:]) if issubclass(each, Collecting))
        wrap_implementations(cls, *parents)
        if cls.type_name:
            register_trajectory_builder(config_type=cls)(_build)

    def objective(self) -> Algorithm:
        """Return the algorithm whose loss learns from the data: itself, or another one with its options."""
        return self

    @property
    def skips_idle(self) -> bool:
        """Whether units without an advantage have no gradient, so that the learner can skip them. False for
        an algorithm whose loss has another term that reaches such units."""
        return self.kind == "samples" and "reference" not in self.needs()

    def advantages(self, group: Sequence[Sample]) -> Sequence[Sequence[float]] | None:
        """Return one number per turn for each sample of a group, or None if the loss needs no advantages."""
        return None

    def has_advantage(self, group: Sequence[Sample]) -> bool:
        """Return whether any of the compared samples has an advantage. For a loss without advantages, return
        whether the samples earned different rewards."""
        values = self.advantages(group)
        if values is None:
            return len({(sample.reward, *(sample.returns or ())) for sample in group}) > 1
        return any(abs(value) > _ROUNDING for turns in self._rows(group, values) for value in turns)

    def find_comparable(self, groups: Sequence[UnitGroup]) -> list[bool]:
        """Return for each group of a collection whether it has something to compare. For samples, that means
        advantages. For pairs and imitation, it means rewards that are not all equal."""
        if self.kind != "samples":
            return [len({*(group.rewards or ())}) > 1 for group in groups]
        samples = [group.samples for group in groups]
        if type(self).assign_advantages is Algorithm.assign_advantages or not all(map(_has_tokens, samples)):
            return [bool(group) and self.has_advantage(group) for group in samples]
        assigned = iter(self.assign_advantages([*filter(None, samples)]))
        own = (next(assigned) if group else () for group in samples)
        return [any(abs(gain) > _ROUNDING for sample in each for gain in sample.gains) for each in own]

    def is_idle(self, groups: Sequence[UnitGroup], *, at_base: bool) -> bool:
        """Return whether a job on the groups would change nothing: no advantages and no other loss term.
        `at_base` means that the policy is still the model that training began with, so its KL is zero."""
        samples = [sample for group in groups for sample in group.samples]
        if samples and _has_tokens(samples) and not any(any(sample.loss_weights) for sample in samples):
            return True
        if self.kind != "samples":
            return False
        has_other_term = not self.skips_idle and not ("reference" in self.needs() and at_base)
        return not has_other_term and not self.teaches([group.samples for group in groups if group.units])

    def teaches(self, groups: Sequence[Sequence[Sample]]) -> bool:
        """Return whether any sample of a job has an advantage. Samples without token ids count as such."""
        if not all(map(_has_tokens, groups)):
            return True
        return any(sample.has_gradient for group in self.assign_advantages(groups) for sample in group)

    def assign_advantages(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Return all samples of a job with advantages. Groups that already have them keep them."""
        assigned: list[list[Sample]] = []
        for group in groups:
            known = all(sample.advantages is not None for sample in group)
            values = None if known else self.advantages(group)
            if values is not None:
                rows = zip(group, self._rows(group, values), strict=True)
                group = [replace(each, advantages=each.by_token(turns)) for each, turns in rows]
            assigned.append([*group])
        return assigned

    def _rows(self, group: Sequence[Sample], values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return a group's advantages as floats. Raises TrainingError for missing or invalid values."""
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
        return rows

    def units(self, groups: Sequence[Sequence[SampleOrPair]]) -> list[tuple[Sample, ...]]:
        """Return all units of a job in the learner's form."""
        if self.kind == "pairs":
            return [unit.samples for group in groups for unit in group]
        samples = [[unit for unit in group if isinstance(unit, Sample)] for group in groups]
        return [sample.samples for group in self.assign_advantages(samples) for sample in group]

    def reason_to_skip(
        self, groups: Sequence[Sequence[SampleOrPair]], *, at_base: bool = False
    ) -> Skipped | None:
        """Return why a job on these groups could change nothing, or None if it may change something."""
        if not self.is_idle([*map(UnitGroup, groups)], at_base=at_base):
            return None
        reason = (
            "there is nothing to learn from: no token has both a weight and an advantage. This happens when "
            "all rewards within a group are equal, or when all answers are cut off and `cut_off` masks them"
        )
        if "reference" in self.needs():
            reason += ". `beta` pulls to the model that the job starts from, so it changes nothing either"
        return Skipped(reason=reason)

    def weight_factors(self, units: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """Return factors on the samples' weights that turn a step's sums into a mean over all tokens."""
        total = sum(sum(sample.loss_weights) for unit in units for sample in unit)
        return [[1.0 / max(total, 1e-9)] * len(unit) for unit in units]

    def loss(self, logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the micro-batch's share of the step's loss and metrics. Shares are summed.

        `logprobs_BT` belong to the policy in training, with gradient. `batch.weights_BT` are normalised.
        """
        raise _no_loss(self)


async def _build(config: Algorithm, builder: Builder) -> AsyncIterator[CollectingBuilder]:
    """Build the trajectory builder of any algorithm. Raises RequestError if it could never learn anything."""
    if type(config).loss is Algorithm.loss:
        raise _no_loss(config)
    await config.check_protocol(builder)
    yield CollectingBuilder(config)


def _no_loss(algorithm: Algorithm) -> RequestError:
    return RequestError(
        f"{algorithm.type_name} has no loss: override `loss`, or inherit from an algorithm that has one, "
        "such as etude.Grpo"
    )


def gradient_fields(algorithm: type[Algorithm]) -> list[str]:
    """Return the names of the options that a job has. A user's own code may read any option."""
    fields = algorithm.model_fields
    if not algorithm.__module__.startswith("etude."):
        return [*fields]
    return [
        name
        for name, field in fields.items()
        if name not in Collecting.model_fields and _COLLECTION not in field.metadata
    ]


def changed_options(algorithm: Algorithm, of: type[Algorithm] | None = None) -> dict[str, Any]:
    """Return the gradient options (of the class `of`) that differ from their defaults, as JSON."""
    kind = of or type(algorithm)
    values = algorithm.model_dump(include={*gradient_fields(kind)})
    try:
        data = from_json(to_json(values, inf_nan_mode="strings"))
    except ValueError as error:
        raise RequestError(f"{algorithm.type_name}: jobs get the options as JSON: {error}") from error
    return {name: value for name, value in data.items() if value != kind.model_fields[name].get_default()}


def algorithm_type(name: Method) -> type[Algorithm]:
    """Return the algorithm class with this name, or import it from `module:Name`. Raises RequestError."""
    if is_import_path(name) and name not in registry.names("trajectory_builders"):
        import_object(name)
    algorithm = registry.lookup("trajectory_builders", name).config_type
    if not issubclass(algorithm, Algorithm):
        raise RequestError(
            f"'{name}' is not an algorithm: {algorithm.__qualname__} does not inherit from etude.Algorithm"
        )
    return algorithm


def load_algorithms(paths: Sequence[str]) -> None:
    """Import the shipped algorithms and those at trusted `paths`, also from the current folder.

    Raises RequestError for a path that is not an algorithm.
    """
    registry.load_entry_points()
    if paths:
        make_importable(Path.cwd())
    for path in paths:
        algorithm = import_object(path)
        if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
            raise RequestError(f"'{path}' is not a class that inherits from etude.Algorithm")


def make_algorithm(name: Method, options: Mapping[str, Any] | None = None) -> Algorithm:
    """Create an algorithm by name. Raises RequestError for an unknown name or invalid options."""
    return _validate(algorithm_type(name), name, options or {})


def find_algorithm(method: Method, own: Algorithm | None) -> Algorithm:
    """Return a run's own algorithm if `method` names it, else the named one with its defaults. Raises
    RequestError for an unknown name."""
    return own if own is not None and own.type_name == method else make_algorithm(method)


def _validate(algorithm: type[A], name: str, options: Mapping[str, Any]) -> A:
    try:
        return algorithm.model_validate(dict(options))
    except ValidationError as error:
        raise RequestError(f"{name}: {list_faults(error)}") from error


def find_same_loss(algorithm: Algorithm, known: Collection[Method]) -> type[Algorithm] | None:
    """Return the algorithm among `known` that has the same loss, or None."""
    own = type(algorithm)
    bases = (base for base in own.__mro__ if issubclass(base, Algorithm) and base.type_name in known)
    for base in bases:
        if all(getattr(own, part) is getattr(base, part) for part in base.loss_parts):
            return base
    return None


def read_groups(
    groups: Iterable[Sequence[TrainingUnit]], algorithm: Algorithm, encoder: Encoder | None = None
) -> list[list[SampleOrPair]]:
    """Return the samples or pairs of a collection's groups. Raises TrainingError for unusable data."""
    needs_logprobs = "logprobs" in algorithm.needs()
    return [read_group(group, algorithm.kind, encoder, needs_logprobs=needs_logprobs) for group in groups]


def read_group(
    group: Sequence[TrainingUnit], kind: Kind, encoder: Encoder | None = None, *, needs_logprobs: bool = True
) -> list[SampleOrPair]:
    """Return a group's units with tokens, those that have all of them unchanged. Raises TrainingError."""
    units: list[SampleOrPair] = []
    for unit in group:
        if is_complete(unit, kind, needs_logprobs=needs_logprobs):
            units.append(unit)
        else:
            units += convert_unit(unit, kind, encoder, needs_logprobs=needs_logprobs)
    return units


def data_kind(name: Method) -> Kind:
    """Return the kind of data that the named algorithm learns from, or "samples" for an unknown name."""
    try:
        return algorithm_type(name).kind
    except EtudeError:
        return "samples"


def _has_tokens(group: Sequence[Sample]) -> bool:
    return all(sample.ids for sample in group)
