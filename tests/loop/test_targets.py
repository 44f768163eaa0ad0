"""Two models trained in one run, to trained weights; by each algorithm, and against earlier versions."""

import importlib
from pathlib import Path

import pytest
import yaml

from etude.config.load import load_config, parse_config, resolved_yaml
from etude.core.episode import Example
from etude.core.errors import ErrorBudgetExceeded, RequestError
from etude.core.keys import generator
from etude.core.records import RunEnded
from etude.engines.local import OpponentsConfig
from etude.loop.recording_wrappers import assemble_trainer
from etude.protocols import EpisodeTree
from etude.rollout.collector import EpisodeJob
from etude.run import Run as StoredRun
from etude.runtime import open_runtime
from etude.store.episodes import iter_episodes
from etude.store.histories import read_histories
from etude.store.journal import Journal, ModelLog
from etude.store.run_folder import RunFolder
from tests.cli import parts
from tests.crashing import AgainstPool, run_to_end
from tests.protocols.games import find_agent
from tests.rollout.running import collect
from tests.several import Several, config
from tests.support import ScriptedEngine, one_quick
from tests.training import FakeAdapter, Interrupted, examples

VALIDATED = {"run_configuration": {"validation_dataset": "tests.several:held_out"}}


@pytest.fixture
def run(tmp_path):
    return Several(tmp_path / "run")


def read_history(run, target):
    return read_histories(run.path)[target]


async def test_both_models_are_trained_on_one_set_of_episodes_and_validated_by_one(run):
    outcome = await run.start(config(num_epochs=2, finetuning=VALIDATED))
    assert run.requests() == dict.fromkeys(("prover", "verifier"), 3 * 4 * 2 + 3 * 2)
    assert [engine.version for engine in run.engines.values()] == [2, 2]
    names = [f"run-epoch-{epoch}.{model}" for epoch in (1, 2) for model in ("prover", "verifier")]
    assert [job.name for job in outcome.jobs] == names
    conversations = [request.conversation for request in run.engines["prover"].requests]
    assert sorted(name for name in conversations if name.startswith("validation")) == [
        f"validation/{epoch}/v{number}/0" for epoch in (0, 2) for number in range(3)
    ]
    for name in ("prover", "verifier"):
        assert [entry.version.number for entry in read_history(run, name).validations] == [0, 2]
        assert read_history(run, name).validations[0].metrics["target"] == name


async def test_a_run_that_is_killed_before_all_its_models_are_over_is_ended_when_it_is_resumed(
    run, monkeypatch
):
    add = ModelLog.add

    async def add_one_end(log, record):
        if isinstance(record, RunEnded) and log.target == "verifier":
            raise Interrupted
        await add(log, record)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(ModelLog, "add", add_one_end)
        await run.start(config(num_epochs=1))
    assert StoredRun(run.path).facts.state == "unfinished"
    again = run.restart()
    assert (await again.start(config(num_epochs=1))).facts.state == "finished"
    assert again.requests() == {"prover": 0, "verifier": 0}


async def test_everybody_collects_before_anybody_is_trained_and_is_trained_before_anybody_adopts(
    run, monkeypatch
):
    events = []

    def noting(kind, name, method):
        async def call(*args, **kwargs):
            events.append(f"{kind} {name}")
            return await method(*args, **kwargs)

        return call

    settings = config(num_epochs=1)
    with RunFolder.create(run.path.parent, "run") as folder:
        async with open_runtime(settings, folder, engines=run.engines) as runtime:
            trainer = await assemble_trainer(runtime)
            for name, member in trainer.members.items():
                builder, adapter, engine = member.builder, member.adapter, run.engines[name]
                monkeypatch.setattr(builder, "finalize", noting("collect", name, builder.finalize))
                monkeypatch.setattr(adapter, "submit", noting("submit", name, adapter.submit))
                monkeypatch.setattr(engine, "adopt", noting("adopt", name, engine.adopt))
            await trainer.initialize(settings.finetuning)
            await trainer.run(1)
    steps = ("collect", "submit", "adopt")
    assert events == [f"{step} {name}" for step in steps for name in ("prover", "verifier")]


async def test_models_take_turns_by_their_schedules(run):
    await run.start(config(num_epochs=4, prover={"every": 2}, verifier={"every": 2, "offset": 1}))
    prover, verifier = read_history(run, "prover"), read_history(run, "verifier")
    assert [entry.is_trained for entry in prover.epochs] == [True, False, True, False]
    assert [entry.is_trained for entry in verifier.epochs] == [False, True, False, True]
    assert prover.epochs[1].resting == "not its turn (every: 2, offset: 0)"
    assert [entry.version.number for entry in verifier.epochs] == [0, 1, 1, 2]
    # A model that rests is sampled all the same.
    assert run.requests() == {"prover": 3 * 4 * 4, "verifier": 3 * 4 * 4}


async def test_a_frozen_model_is_never_trained_and_its_reward_is_reported_all_the_same(run):
    outcome = await run.start(config(num_epochs=1, verifier={"frozen": True}, finetuning=VALIDATED))
    assert parts.adapters["verifier"].submitted == []
    assert run.engines["verifier"].version == 0
    assert outcome.summary["targets"]["verifier"]["epochs_trained"] == 0
    assert outcome.summary["targets"]["verifier"]["after"]["n"] == 3
    assert run.watcher.warnings == []


async def test_targets_may_ask_for_more_of_the_same_episodes(run):
    builders = {
        "few": {"_type": "grpo", "num_generations": 2},
        "many": {"_type": "grpo", "num_generations": 6},
    }
    targets = {"prover": {"trajectory_builder": "few"}, "verifier": {"trajectory_builder": "many"}}
    await run.start(config(num_epochs=1, trajectory_builders=builders, **targets))
    assert run.requests() == {"prover": 3 * 6, "verifier": 3 * 6}
    assert read_history(run, "prover").epochs[0].metrics["episodes"] == 6
    assert read_history(run, "verifier").epochs[0].metrics["episodes"] == 18


async def test_a_trainer_that_trains_one_model_is_refused(run):
    with pytest.raises(RequestError, match=r"CarelessTrainer.*'finetuning\.targets'.*`_type: epochs`"):
        await run.start(config(trainers={"mine": "tests.guide_parts:careless"}))


async def test_an_agent_must_say_which_of_several_models_it_means(run):
    with pytest.raises(ErrorBudgetExceeded, match=r"several models.* prover, verifier"):
        await run.start(config(workflow="tests.training:play"))


# They play a protocol


def claims():
    """Claims, half of which are true."""
    return [{"id": f"e{number}", "label": number % 2} for number in range(4)]


def answer(request):
    random = generator(request.key, "answer")
    if find_agent(request) == "prover":
        return random.choice(["a proof", "trust me"])
    return f"Decision: {random.choice(['accept', 'reject'])}"


@pytest.fixture
def played_run(run):
    run.engines = {name: ScriptedEngine(answer) for name in ("prover", "verifier")}
    return run


ADP = {
    "_type": "protocol",
    "protocol": "adp",
    "scenario": "tests.protocols.games:Labelled",
    "policies": {"prover": "prover", "verifier": "verifier"},
}


def play(builder, num_epochs=1, **changes):
    reward = {"_type": "protocol_reward"}
    evaluators = {"proved": reward | {"agent": "prover"}, "verified": reward | {"agent": "verifier"}}
    return config(
        num_epochs,
        workflow=ADP,
        eval={"general": {"dataset": "tests.loop.test_targets:claims"}, "evaluators": evaluators},
        trajectory_builders={"mine": builder},
        **changes,
    )


def test_the_config_that_a_run_keeps_is_read_again():
    kept = resolved_yaml(play({"_type": "grpo", "num_generations": 4}))
    again = parse_config(yaml.safe_load(kept))
    again.check_training()
    assert resolved_yaml(again) == kept


@pytest.mark.parametrize(
    ("builder", "method"),
    one_quick(
        ({"_type": "malt", "num_generations": 3, "interval": 0.2}, "dpo"),
        ({"_type": "malt", "num_generations": 2}, "dpo"),
        (
            {"_type": "expert_iteration", "num_generations": 4, "credit": "agent", "min_reward": 0.9},
            "supervised",
        ),
        ({"_type": "grpo", "num_generations": 4, "credit": "agent"}, "grpo"),
        ({"_type": "grpo", "num_generations": 4, "credit": "turn"}, "grpo"),
    ),
    ids=["malt by interval", "malt", "expert iteration", "grpo by agent", "grpo by turn"],
)
async def test_both_models_are_trained_by(played_run, builder, method):
    await played_run.start(play(builder))
    for name in ("prover", "verifier"):
        (entry,) = read_history(played_run, name).epochs
        assert entry.skipped is None
        assert entry.metrics["num_trajectories"] > 0
        assert played_run.engines[name].version == 1
        with RunFolder.read(played_run.path) as folder:
            plan = ModelLog(folder.journal, name).state.plans[f"run-epoch-1.{name}"]
        assert (plan.method, plan.parent) == (method, 0)


async def test_malt_answers_every_turn_twice_and_validates_with_plays_that_do_not_branch(played_run):
    validation = {"run_configuration": {"validation_dataset": "tests.loop.test_targets:claims"}}
    await played_run.start(play({"_type": "malt"}, finetuning=validation))
    with RunFolder.read(played_run.path) as folder:
        phases = {}
        for record in iter_episodes(folder.journal):
            tree = EpisodeTree.from_json(record.output)
            phases.setdefault(record.id.rpartition("/e")[0], set()).add(len(list(tree.leaves())))
    assert phases == {"validation/0": {1}, "train/1-k2": {4}, "validation/1": {1}}
    # One set of trees serves both: two answers of the prover, two of the verifier to each.
    trees = [one for one in played_run.engines["verifier"].requests if one.conversation.startswith("train/1")]
    assert len(trees) == 4 * 4


EXAMPLE = Path(__file__).parents[2] / "examples" / "nim"


def test_a_pool_has_the_base_and_the_newest_versions_and_validations_the_base(tmp_path):
    run_to_end("pool", tmp_path)
    drawn = {}
    for episode in StoredRun(tmp_path / "run").episodes:
        _, opponent = [call.completion.model_version for call in episode.calls]
        drawn.setdefault("/".join(episode.id.split("/")[:2]), set()).add(opponent)
    assert drawn["train/1"] == {0}
    assert drawn["train/2"] == {0, 1}
    assert drawn["train/4"] == {0, 2, 3}
    assert drawn["validation/4"] == {0}


async def test_what_an_opponent_said_is_never_trained_on(tmp_path, monkeypatch):
    run = AgainstPool(tmp_path / "run", OpponentsConfig(of="policy", draw="latest"))
    run.examples = examples(4)
    submitted, submit = [], FakeAdapter.submit

    async def keeping(self, trajectories):
        submitted.append(trajectories)
        return await submit(self, trajectories)

    monkeypatch.setattr(FakeAdapter, "submit", keeping)
    await run.start(num_epochs=2)
    for version, collection in enumerate(submitted):
        for group in collection.trajectories:
            for trajectory in group:
                assert [item.model_version for item in trajectory.episode if item.is_sampled] == [version]
    assert run.made == [0, 1]


@pytest.mark.parametrize(
    ("answers", "scores"), [(("2", "1"), {0.0, 1.0}), (("9", "1"), {0.0}), (("1", "none"), {1.0})]
)
async def test_who_takes_the_last_stone_wins_and_an_illegal_move_loses(tmp_path, answers, scores):
    load_config(EXAMPLE / "config.yml")  # Makes the game importable.
    game = importlib.import_module("nim")
    seats = {name: ScriptedEngine([text]) for name, text in zip(("policy", "opponent"), answers, strict=True)}
    work = [EpisodeJob(f"train/1/{seed}/0", Example(str(seed), {"seed": seed})) for seed in range(12)]
    with Journal(tmp_path / "games.db") as journal:
        games = await collect(game.play, journal, models=seats, work=work)
    assert {game.output for game in games} == scores
