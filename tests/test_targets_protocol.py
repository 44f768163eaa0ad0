"""A prover and a verifier that play a protocol and are both trained, by each of the algorithms."""

import pytest
import yaml

from etude.config.load import parse_config, resolved_yaml
from etude.core.keys import generator
from etude.protocols import EpisodeTree
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder
from tests.protocols.games import agent_of
from tests.several import Several, config
from tests.support import ScriptedEngine
from tests.test_targets import history_of


def labelled():
    """Claims, half of which are true."""
    return [{"id": f"e{number}", "label": number % 2} for number in range(4)]


def answer(request):
    random = generator(request.key, "answer")
    if agent_of(request) == "prover":
        return random.choice(["a proof", "trust me"])
    return f"Decision: {random.choice(['accept', 'reject'])}"


@pytest.fixture
def run(tmp_path):
    run = Several(tmp_path / "run")
    run.engines = {name: ScriptedEngine(answer) for name in ("prover", "verifier")}
    return run


ADP = {
    "_type": "protocol",
    "protocol": "adp",
    "scenario": "tests.protocols.games:Labelled",
    "policies": {"prover": "prover", "verifier": "verifier"},
}


def play(builder, num_epochs=1, workflow=ADP, agents=("prover", "verifier"), **changes):
    builders = {"mine": builder}
    reward = {"_type": "protocol_reward"}
    proved, verified = agents
    return config(
        num_epochs,
        workflow=workflow,
        eval={
            "general": {"dataset": "tests.test_targets_protocol:labelled"},
            "evaluators": {
                "proved": reward | {"agent": proved},
                "verified": reward | {"agent": verified},
            },
        },
        trajectory_builders=builders,
        **changes,
    )


def test_the_config_that_a_run_keeps_is_read_again():
    kept = resolved_yaml(play({"_type": "grpo", "num_generations": 4}))
    again = parse_config(yaml.safe_load(kept))
    again.check_training()
    assert resolved_yaml(again) == kept


@pytest.mark.parametrize(
    ("builder", "method"),
    [
        ({"_type": "malt", "num_generations": 2}, "dpo"),
        ({"_type": "malt", "num_generations": 3, "pairs": "interval", "interval": 0.2}, "dpo"),
        (
            {"_type": "expert_iteration", "num_generations": 4, "credit": "agent", "min_reward": 0.9},
            "supervised",
        ),
        ({"_type": "grpo", "num_generations": 4, "credit": "agent"}, "grpo"),
        ({"_type": "grpo", "num_generations": 4, "credit": "turn"}, "grpo"),
    ],
    ids=["malt", "malt by interval", "expert iteration", "grpo by agent", "grpo by turn"],
)
async def test_both_models_are_trained_by(run, builder, method):
    await run.start(play(builder))
    for name in ("prover", "verifier"):
        (entry,) = history_of(run, name).epochs
        assert entry.skipped is None
        assert entry.metrics["num_trajectories"] > 0
        assert run.engines[name].version == 1
        with RunFolder.read(run.path) as folder:
            job = folder.journal.get(f"groups/{name}/jobs/run-epoch-1.{name}")
        assert (job["method"], job["parent"]) == (method, 0)


async def test_malt_answers_every_turn_twice_and_validates_with_plays_that_do_not_branch(run):
    validation = {"run_configuration": {"validation_dataset": "tests.test_targets_protocol:labelled"}}
    await run.start(play({"_type": "malt", "initial_expert_iterations": 1}, 2, finetuning=validation))
    with RunFolder.read(run.path) as folder:
        phases = {}
        for record in iter_episodes(folder.journal):
            tree = EpisodeTree.from_json(record.output)
            phases.setdefault(record.id.rpartition("/e")[0], set()).add(len(list(tree.leaves())))
    assert phases == {"validation/0": {1}, "train/1-k1": {1}, "train/2-k2": {4}, "validation/2": {1}}
    # One set of trees serves both: two answers of the prover, two of the verifier to each.
    trees = [one for one in run.engines["verifier"].requests if one.conversation.startswith("train/2")]
    assert len(trees) == 4 * 4


async def test_guesses_are_put_right(run):
    builder = {
        "_type": "expert_iteration",
        "num_generations": 4,
        "credit": "agent",
        "min_reward": 0.9,
        "guess_replacement": {"proportion": 1.0, "annealing": "linear", "annealing_rate": 1.0},
    }
    await run.start(play(builder, 2))
    first, second = history_of(run, "verifier").epochs
    assert first.metrics["num_trajectories"] == 16
    assert second.metrics["num_trajectories"] < 16
