"""A run with a warm-up: it imitates first, is measured after that, and survives kill -9 anywhere."""

import asyncio
import json

import pytest

from etude.core.errors import TrainingError
from etude.loop.lifecycle import new_run
from etude.loop.model import load_version
from etude.run import Run as StoredRun
from etude.store.versions import choose_version
from etude.verbs import train_in
from tests import guide_parts as guide
from tests.crashing import killed_and_whole
from tests.crashing import warm_up_config as config
from tests.support import without_times
from tests.training import FakeAdapter, Run, examples, learning_engine

KILLS = [
    ("submit", 1),
    ("adopt", 1),
    ("job", 1),
    ("prune", 1),
    ("request", 3),
    ("adopt", 2),
    ("over", 1),
    ("request", 5),
    ("adopt", 1),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that was killed again and again, and one that was not."""
    folders = killed_and_whole("warm-up", tmp_path_factory.mktemp("warm-up"), KILLS)
    return [folder / "run" for folder in folders]


@pytest.fixture
def whole(runs):
    return runs[1]


def outcome(run):
    summary = json.loads((run / "summary.json").read_text())
    summary["warm_up"].pop("seconds")
    versions = {key: summary.pop(key) for key in ("best_version", "last_version")}
    metrics = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    for each in metrics:
        (each.get("training") or {}).pop("tokens_per_s", None)
    return summary, [each["digest"] for each in versions.values()], without_times(metrics)


def test_killed_anywhere_it_ends_with_the_same_weights_and_figures(runs):
    killed, whole = map(outcome, runs)
    assert killed == whole


def test_the_base_is_untouched_and_what_imitated_is_a_version(whole):
    run = StoredRun(whole)
    warm_up, before, warm = (run.summary[key] for key in ("warm_up", "before", "warm"))
    assert warm_up["version"] == warm["version"] == choose_version(whole, "warm-up").number >= 2
    assert (before["version"], before["measured"]) == (0, "validation examples, before training (v0)")
    assert (
        warm["measured"] == f"validation examples, after the warm-up, before training (v{warm_up['version']})"
    )
    assert warm_up["avg_reward"] >= 0.1
    base, warm = (load_version(choose_version(whole, wish)) for wish in ("base", "warm-up"))
    assert base.digest() != warm.digest()
    jobs = [job for job in run.jobs if job.epoch == 0]
    assert [job.version for job in jobs] == [*range(1, warm_up["version"] + 1)]
    assert {job.status for job in jobs} == {"completed"}


def test_its_optimiser_and_schedule_begin_anew_with_training(whole):
    summary = StoredRun(whole).summary
    last, trained = summary["last_version"]["number"], summary["epochs_trained"]
    state = json.loads((whole / "checkpoints" / f"v{last}" / "learner.json").read_text())
    assert state == {"step": trained, "trained": trained}


class Taking(FakeAdapter):
    """Takes the hyperparameters of a warm-up."""

    def use_hyperparameters(self, hyperparameters):
        """Nothing depends on them."""


def yes(examples):
    """A transcript for each example."""
    question = {"role": "user", "content": "yes?"}
    return [[question, {"role": "assistant", "content": "yes"}] for _ in examples]


@pytest.mark.parametrize("is_own", [False, True])
async def test_any_trainer_has_it_and_it_ends_when_the_reward_is_there(tmp_path, is_own):
    run = Run(tmp_path / "run")
    run.adapter = Taking(tmp_path / "backend")
    run.engine = learning_engine(base=0, step=34)
    run.examples, run.validation = examples(40), examples(40, "v")
    run.finetuning.warm_up = {"transcripts": f"{__name__}:yes", "until": {"reward": 0.5}}
    if is_own:
        run.make_trainer = lambda: guide.GuideTrainer(guide.GuideTrainerConfig())
    await run.start(num_epochs=1)
    assert run.adapter.submitted == ["run-warm-up-1", "run-warm-up-2", "run-epoch-1"]
    assert StoredRun(run.path).summary["warm_up"]["version"] == 2


def test_what_is_out_of_reach_ends_the_run_with_what_was_reached(tmp_path):
    settings = config(tmp_path)
    stages = settings.finetuning.warm_up
    settings.finetuning.warm_up = stages[0].model_copy(
        update={"max_steps": 8, "until": stages[0].until.model_copy(update={"loss": 0.01})}
    )
    with (
        new_run(settings, "run") as run,
        pytest.raises(TrainingError, match=r"after 8 steps the loss is \d.*loss 0.01"),
    ):
        asyncio.run(train_in(settings, run))
