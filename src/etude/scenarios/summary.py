"""A summary of many plays: how often the verdict was right, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.stats import Bounds, Estimate, estimate, estimate_ratio
from etude.protocols.decision import ACCEPT, NEITHER, REJECT, UNDECIDED, Verdict
from etude.protocols.protocol import within
from etude.protocols.tree import EpisodeTree
from etude.scenarios.measures import Conduct, conduct, endings
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal


@dataclass(frozen=True, slots=True)
class Summary:
    """Measures of many plays, with 95 % intervals. None where there is nothing to measure.

    Plays of the same example are not independent. The intervals are over examples.
    """

    episodes: int
    """Plays that came to an end."""
    failed: int
    """Plays that did not; they are in none of the measures."""
    examples: int
    accuracy: Estimate
    """Share of right verdicts. No decision is not right, and neither is not."""
    accuracy_right_programs: Estimate | None
    accuracy_wrong_programs: Estimate | None
    worst_example_accuracy: float
    """Of the example that fared worst."""
    always_wrong: Estimate
    """Share of examples without a single right verdict."""
    precision: Estimate | None
    """Of the programs that were accepted, how many are right."""
    recall: Estimate | None
    """Of the programs that are right, how many were accepted."""
    no_decision: Estimate
    neither: Estimate
    decision_entropy: float
    """Of the verdicts over all plays, no decision among them, in bits."""
    mean_verdict: Estimate | None
    """In [-1, 1], over the plays with a decision."""
    rounds: Estimate
    rewards: Mapping[str, Estimate]
    """By agent."""
    asked_again: Mapping[str, Estimate | None]
    """By agent: answers that took more than one attempt (retries)."""
    malformed: Mapping[str, Estimate | None]
    """By agent: answers that stayed unusable."""
    token_limit: Mapping[str, Estimate | None]
    """By agent: answers that were cut off at the limit of tokens."""

    def to_json(self) -> dict[str, Any]:
        """As JSON: an estimate is an object with `mean`, `low`, `high` and `n`."""
        return {each_field.name: _to_json(getattr(self, each_field.name)) for each_field in fields(self)}


def summarise(records: Iterable[EpisodeRecord]) -> Summary:
    """The summary of plays of one protocol. Raises RequestError when none came to an end, or none was one."""
    examples: dict[str, _OfExample] = {}
    failed = 0
    for record in records:
        if record.failure is not None:
            failed += 1
            continue
        examples.setdefault(record.example.id, _OfExample()).add(EpisodeTree.from_json(record.output))
    if not examples:
        raise RequestError(f"there is nothing to sum up: {failed} episodes, and all have failed")
    return _summary(list(examples.values()), failed)


def summarise_phase(journal: Journal, phase: str) -> Summary:
    """The summary of a phase of a run, such as `validation/2`. Raises RequestError as `summarise`."""
    return summarise(iter_episodes(journal, f"{phase}/"))


@dataclass(slots=True)
class _OfExample:
    """The sums over the plays of one example: all that is kept of them."""

    truth: Verdict = REJECT
    plays: int = 0
    verdicts: dict[float | None, float] = field(default_factory=dict)
    codes: dict[int, float] = field(default_factory=dict)
    rounds: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    conduct: dict[str, Conduct] = field(default_factory=dict)

    def add(self, tree: EpisodeTree) -> None:
        self.truth = tree.truth
        self.plays += 1
        self.bounds = tree.bounds
        for ending in endings(tree):
            self.verdicts[ending.verdict] = self.verdicts.get(ending.verdict, 0.0) + ending.weight
            self.codes[ending.code] = self.codes.get(ending.code, 0.0) + ending.weight
            self.rounds += ending.weight * ending.rounds
        for agent, added in conduct(tree).items():
            self.rewards[agent] = self.rewards.get(agent, 0.0) + tree.value(None, agent)
            before = self.conduct.get(agent, Conduct())
            self.conduct[agent] = Conduct(
                *(getattr(before, f.name) + getattr(added, f.name) for f in fields(added))
            )

    def share(self, code: int) -> float:
        """Of the plays, how many ended with a code."""
        return min(1.0, self.codes.get(code, 0.0) / self.plays)


def _summary(examples: Sequence[_OfExample], failed: int) -> Summary:
    right = [example.share(example.truth) for example in examples]
    of_truth = {
        truth: [share for example, share in zip(examples, right, strict=True) if example.truth == truth]
        for truth in (REJECT, ACCEPT)
    }
    accepted = [
        (float(e.truth == ACCEPT) * e.codes.get(ACCEPT, 0.0), e.codes.get(ACCEPT, 0.0)) for e in examples
    ]
    decided = [
        (math.fsum(verdict * weight for verdict, weight in e.verdicts.items() if verdict is not None),
         math.fsum(weight for verdict, weight in e.verdicts.items() if verdict is not None))
        for e in examples
    ]  # fmt: skip
    agents = list(examples[0].conduct)
    return Summary(
        episodes=sum(example.plays for example in examples),
        failed=failed,
        examples=len(examples),
        accuracy=estimate(right),
        accuracy_right_programs=_estimate(of_truth[ACCEPT]),
        accuracy_wrong_programs=_estimate(of_truth[REJECT]),
        worst_example_accuracy=min(right),
        always_wrong=estimate([float(share == 0) for share in right]),
        precision=_ratio(accepted, 0.0, 1.0),
        recall=_estimate(of_truth[ACCEPT]),
        no_decision=estimate([example.share(UNDECIDED) for example in examples]),
        neither=estimate([example.share(NEITHER) for example in examples]),
        decision_entropy=_entropy(examples),
        mean_verdict=_ratio(decided, -1.0, 1.0),
        rounds=estimate([example.rounds / example.plays for example in examples], (1.0, math.inf)),
        rewards={agent: _reward(examples, agent) for agent in agents},
        asked_again=_conduct(examples, agents, "asked_again"),
        malformed=_conduct(examples, agents, "malformed"),
        token_limit=_conduct(examples, agents, "cut_off"),
    )


def _conduct(
    examples: Sequence[_OfExample], agents: Sequence[str], field_name: str
) -> dict[str, Estimate | None]:
    return {
        agent: _ratio(
            [(getattr(e.conduct[agent], field_name), e.conduct[agent].answers) for e in examples], 0.0, 1.0
        )
        for agent in agents
    }


def _reward(examples: Sequence[_OfExample], agent: str) -> Estimate:
    """The mean of an agent's earnings, within the bounds of the protocol."""
    values = [example.rewards[agent] / example.plays for example in examples]
    low, high = examples[0].bounds[agent]
    # Bounds that were worked out are those of the outcomes that were tried.
    is_within = within(min(values), (low, high)) and within(max(values), (low, high))
    return estimate(values, (low, high) if is_within else None)


def _estimate(values: Sequence[float]) -> Estimate | None:
    return estimate(values) if values else None


def _ratio(parts: Sequence[tuple[float, float]], lowest: float, highest: float) -> Estimate | None:
    """The ratio of two sums over examples, in [lowest, highest]; None when the second is 0."""
    seen = [(part, total) for part, total in parts if total > 0]
    return estimate_ratio(seen, lowest, highest) if seen else None


def _entropy(examples: Sequence[_OfExample]) -> float:
    weights: dict[float | None, float] = {}
    for example in examples:
        for verdict, weight in example.verdicts.items():
            weights[verdict] = weights.get(verdict, 0.0) + weight
    total = math.fsum(weights.values())
    return abs(math.fsum(-w / total * math.log2(w / total) for w in weights.values() if w))


def _to_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each_field.name: getattr(value, each_field.name) for each_field in fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {key: _to_json(item) for key, item in value.items()} if isinstance(value, Mapping) else value
