"""The jobs of teams that the tests start."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.config.finetuning import LoraOptions
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.team import PeerLost, ShardingTeam, Team, join_team
from etude.models.policy import WEIGHTS_FILE, Policy
from etude.models.weights import load_tensors, save_tensors
from tests.learner.gradients import forest, to_batch, train
from tests.models.tiny_models import fresh_policy

OBJECTIVES = {
    "sft": Supervised(),
    "grpo": Grpo(),
    "grpo by sequence": Grpo(aggregation="sequence", beta=0.1),
    "dpo": Dpo(beta=0.5, reference="base"),
}
CASES = [
    (objective, packing, weights)
    for objective in OBJECTIVES
    for packing in ("tree", "padded")
    for weights in ("lora", "full")
] + [("grpo", "tree", "half")]
SHARDED = [
    ("sft", "tree", "full"),
    ("grpo", "tree", "full"),
    ("grpo", "padded", "full"),
    ("dpo", "tree", "full"),
    ("dpo", "tree", "lora"),
    ("grpo by sequence", "padded", "lora"),
    ("grpo", "tree", "half"),
    ("grpo", "padded", "half lora"),
]
UNITS, STEP = 8, 5
"""Units of a job and of its steps, of which the last is shorter."""


def make_learner(packing: str, weights: str, team: Team | None = None, **options: object) -> Learner:
    policy = fresh_policy()
    if "half" in weights:
        policy.model.to(torch.bfloat16)
    if "lora" in weights:
        policy.use_lora(LoraOptions(r=4), seed=0)
    policy.keep_base()
    settings = {"learning_rate": 1e-3, "token_budget": 60, "weight_decay": 0.1} | options
    return Learner(policy, LearnerOptions(packing=packing, **settings), team=team)  # type: ignore[arg-type]


def batch(objective: str, seed: int, units: int = UNITS):
    """Pairs for preferences."""
    sequences = forest(seed, 2 * units if objective == "dpo" else units)
    return to_batch(
        list(zip(sequences[0::2], sequences[1::2], strict=True)) if objective == "dpo" else sequences
    )


def train_case(objective: str, packing: str, weights: str, team: Team | None = None) -> tuple[Policy, dict]:
    """Six steps over two jobs; and what validation says after them."""
    again = objective == "grpo by sequence"
    learner = make_learner(packing, weights, team, gradient_checkpointing=again)
    for seed in (1, 2):
        metrics = train(learner, batch(objective, seed), OBJECTIVES[objective], batch_size=STEP)
    found = learner.evaluate(batch(objective, 3), OBJECTIVES[objective])
    return learner.policy, metrics | {f"valid {name}": value for name, value in found.items()}


def equal(team: Team, folder: Path) -> None:
    """Every case; the weights and metrics of the leader, and whether the others have the same weights."""
    for case in CASES:
        policy, metrics = train_case(*case, team=team)
        digest = int(policy.digest()[:12], 16)
        same = team.sum({"digest": float(digest)})["digest"] == team.size * digest
        if team.leads:
            numbers = {f"metrics/{name}": torch.tensor(value) for name, value in metrics.items()}
            numbers["same"] = torch.tensor(float(same))
            save_tensors(policy.trainable() | numbers, folder / f"{'-'.join(case)}.safetensors")


def train_sharded(copies: Team, folder: Path) -> None:
    """Some cases, with a part of the weights in each process; then a checkpoint, taken up again."""
    team = ShardingTeam(copies.rank, copies.size, copies.device)
    for case in SHARDED:
        policy, metrics = train_case(*case, team=team)
        weights = team.whole(policy.trainable())
        if team.leads:
            numbers = {f"metrics/{name}": torch.tensor(value) for name, value in metrics.items()}
            save_tensors({**weights, **numbers}, folder / f"sharded-{'-'.join(case)}.safetensors")
    policy = trained_on_few(team)
    weights = team.whole(policy.trainable())
    if team.leads:
        save_tensors(weights, folder / "sharded-few.safetensors")
    resume(team, folder, "sharded")


def few(team: Team, folder: Path) -> None:
    """Fewer units than processes, so that some have nothing to compute."""
    policy = trained_on_few(team)
    if team.leads:
        save_tensors(policy.trainable(), folder / "few.safetensors")


def half(copies: Team, folder: Path) -> None:
    """A checkpoint in bfloat16, by copies and by shards."""
    for team, name in (
        (copies, "half"),
        (ShardingTeam(copies.rank, copies.size, copies.device), "half-sharded"),
    ):
        learner = make_learner("tree", "half", team)
        train(learner, batch("grpo", 1), Grpo(), batch_size=STEP)
        snapshot = learner.snapshot()
        if team.leads:
            (folder / name).mkdir()
            snapshot.save(folder / name)


def trained_on_few(team: Team | None = None) -> Policy:
    """Three steps of one unit each."""
    learner = make_learner("tree", "full", team)
    train(learner, batch("grpo", 1, units=3), Grpo(), batch_size=1)
    return learner.policy


def resume(team: Team, folder: Path, after: str = "after") -> None:
    """Go on from what one process left."""
    learner = make_learner("tree", "full", team)
    learner.policy.load_tensors(load_tensors(folder / "before" / WEIGHTS_FILE))
    learner.restore(folder / "before")
    train(learner, batch("grpo", 2), Grpo(), batch_size=STEP)
    snapshot = learner.snapshot()
    if team.leads:
        (folder / after).mkdir()
        snapshot.save(folder / after)


def dies(team: Team, folder: Path) -> None:
    """The last process is killed in the middle of a job."""
    _until(team, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs(team: Team, folder: Path) -> None:
    """The last process does not come back from somewhere."""
    _until(team, lambda: time.sleep(600))


def _until(team: Team, end) -> None:
    learner = make_learner("tree", "full", team)
    last = team.rank == team.size - 1
    if not last:
        # The launcher ends the others once one has failed; what they would say for themselves is the test.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    take_step = learner.take_step

    def take_or_end(*args):
        if last and learner.step == 4:
            end()
        return take_step(*args)

    learner.take_step = take_or_end
    train(learner, batch("grpo", 1), Grpo(), passes=200, batch_size=STEP)


def main(member: object, jobs: str, folder: str) -> int:
    """Do the jobs that are named, in a process of this machine or of a cluster."""
    try:
        with join_team("cpu", float(os.environ.get("TEAM_TIMEOUT", "400"))) as team:
            for job in jobs.split(","):
                globals()[job](team, Path(folder))
    except PeerLost as error:
        sys.stderr.write(f"lost: {error}\n")
        return 1
    return 0
