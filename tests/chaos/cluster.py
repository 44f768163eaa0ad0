"""Training runs on a cluster whose parts are killed at random, to their ends: the part `cluster`.

Each run is compared with one that nobody disturbed: the same steps in its journal, and so the same calls,
episodes, scores and weights, bit for bit.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.chaos.cluster_kills import NODE_CPUS, Operator, Series, Tally, kill_at_random
from tests.chaos.nodes import cluster_of
from tests.chaos.project import contents, differences

Note = Callable[[str], None]

KILLS, QUICK_KILLS = 100, 6
_RUN_KILLS = 12
"""At most in one run."""


@dataclass(frozen=True)
class Scene:
    """A kind of run, and what is killed of it."""

    name: str
    epochs: int
    learners: int | None
    """On the cluster; None: the head trains."""
    kinds: tuple[str, ...]
    """Drawn from a bag; one that is there twice comes twice as often."""
    share: float
    """Of all kills."""


SCENES = (
    Scene("trained by the head", 10, None, ("raylet", "runner", "actor", "sampler", "head"), 0.7),
    Scene("trained by two learners", 2, 2, ("learner", "learner", "launcher", "raylet", "head"), 0.3),
)


@dataclass
class Outcome:
    """All runs of a scene."""

    scene: Scene
    steps: int
    """In the journal of the run that nobody disturbed."""
    tallies: list[Tally] = field(default_factory=list)
    unequal: list[list[str]] = field(default_factory=list)
    """For each run that ended otherwise, the steps that differ."""
    paid_twice: int = 0
    requests: int = 0

    @property
    def kills(self) -> int:
        return sum(len(tally.kills) for tally in self.tallies)


def paid_twice(log: Path) -> tuple[int, int]:
    """Requests that an endpoint got whose answer was committed already, and all that it got."""
    requests = [json.loads(line) for line in log.read_text().splitlines()]
    return sum(request["again"] for request in requests), len(requests)


def measure_chaos(kills: int, seed: int, note: Note) -> dict[str, Any]:
    """So many kills over several runs, each of which ends before the next begins."""
    note(f"kills at random, --seed {seed}")
    begun = time.monotonic()
    outcomes = []
    with TemporaryDirectory() as name, cluster_of(NODE_CPUS, NODE_CPUS) as cluster:
        for number, scene in enumerate(SCENES):
            choice = random.Random(f"{seed} {scene.name}")
            folder = Path(name) / str(number)
            outcomes.append(_play(scene, folder, cluster, max(1, round(scene.share * kills)), choice, note))
    return as_json(outcomes, seed, time.monotonic() - begun)


def _play(scene: Scene, folder: Path, cluster: Any, kills: int, choice: random.Random, note: Note) -> Outcome:
    """A run that nobody disturbs, and as many that are killed as it takes."""
    series, begun = Series(choice, list(scene.kinds)), time.monotonic()

    def operator_of(name: str) -> Operator:
        return Operator(folder / name, cluster, choice, scene.epochs, scene.learners)

    whole = operator_of("whole")
    undisturbed = kill_at_random(whole, series, choice, 0, note)
    if undisturbed.failures or undisturbed.hung:
        raise SystemExit(f"the run that nobody disturbs fails: {undisturbed}")
    expected = contents(whole.folder)
    outcome = Outcome(scene, len(expected))
    note(f"{scene.name}: {len(expected)} steps in {time.monotonic() - begun:.0f} s undisturbed")
    while outcome.kills < kills and len(outcome.tallies) < kills:
        operator = operator_of(f"run-{len(outcome.tallies)}")
        most = min(kills - outcome.kills, _RUN_KILLS)
        tally = kill_at_random(operator, series, choice, most, note)
        outcome.tallies.append(tally)
        different = differences(expected, contents(operator.folder))
        again, requests = paid_twice(operator.paid_log)
        outcome.paid_twice += again
        outcome.requests += requests
        note(f"the run has ended: {len(different)} steps differ, {again} of {requests} paid twice")
        if different:
            outcome.unequal.append(different)
        for problem in (*different[:8], *tally.hung, *tally.failures):
            print(problem, file=sys.stderr, flush=True)
    return outcome


def as_json(outcomes: Sequence[Outcome], seed: int, seconds: float) -> dict[str, Any]:
    """The figures of all runs together."""
    tallies = [tally for outcome in outcomes for tally in outcome.tallies]
    kills = [kill for tally in tallies for kill in tally.kills]
    unequal = [lines for outcome in outcomes for lines in outcome.unequal]
    recoveries = {
        kind: sorted(kill.recovery for kill in kills if kill.kind == kind and kill.recovery is not None)
        for kind in sorted({kill.kind for kill in kills})
    }
    every = [recovery for tally in tallies for recovery in tally.recoveries]
    return {
        "kills": len(kills),
        "kills_by_kind": dict(Counter(kill.kind for kill in kills)),
        "runs": len(tallies),
        "unequal_ends": len(unequal),
        "unequal_steps": [line for lines in unequal for line in lines[:8]],
        "paid_twice": sum(outcome.paid_twice for outcome in outcomes),
        "paid_requests": sum(outcome.requests for outcome in outcomes),
        "recovery_s_p50": round(statistics.median(every), 2) if every else None,
        "recovery_s": {
            kind: {"p50": round(statistics.median(of), 2), "max": round(of[-1], 2), "n": len(of)}
            for kind, of in recoveries.items()
            if of
        },
        "hung": [text for tally in tallies for text in tally.hung],
        "head_failures": [text for tally in tallies for text in tally.failures],
        "scenes": {
            outcome.scene.name: {
                "kills": outcome.kills,
                "runs": len(outcome.tallies),
                "steps_each": outcome.steps,
                "unequal_ends": len(outcome.unequal),
            }
            for outcome in outcomes
        },
        "settings": {"seed": seed, "seconds": round(seconds)},
    }
