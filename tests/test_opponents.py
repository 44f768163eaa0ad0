"""Runs in which a seat is played by earlier versions of the trained model."""

import importlib
import json
from pathlib import Path

import pytest

from etude.backends.capabilities import check_opponents
from etude.config.load import load_config
from etude.core.episode import Example
from etude.core.errors import CapabilityError
from etude.inference.local import OpponentsConfig
from etude.rollout.collector import EpisodeJob
from etude.run import Run as StoredRun
from etude.store.episodes import iter_episodes
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder
from tests.crashing import AgainstPool, killed_and_whole
from tests.rollout.running import collect
from tests.support import ScriptedEngine
from tests.times import without_times
from tests.training import Capabilities, FakeAdapter, examples

EXAMPLE = Path(__file__).parents[1] / "examples" / "nim"
KILLS = [
    ("request", 9),
    ("guess", 20),
    ("submit", 1),
    ("guess", 30),
    ("adopt", 2),
    ("prune", 1),
    ("guess", 3),
]


def outcome(folder):
    """The run's figures, but for times."""
    lines = (folder / "run" / "training_metrics.jsonl").read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines], StoredRun(folder / "run").summary


def seats(folder):
    """By episode: the versions of the trained model and of its opponent."""
    with RunFolder.read(folder / "run") as run:
        return {
            episode.id: [call.completion.model_version for call in episode.calls]
            for episode in iter_episodes(run.journal)
        }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a run that was killed again and again, and of one that was not."""
    return killed_and_whole("pool", tmp_path_factory.mktemp("pool"), KILLS)


@pytest.fixture
def whole(folders):
    return folders[1]


def test_killed_anywhere_it_draws_the_same_opponents(folders):
    killed, whole = folders
    assert seats(killed) == seats(whole)
    assert outcome(killed) == outcome(whole)


def test_a_pool_has_the_base_and_the_newest_versions_and_validations_the_base(whole):
    drawn = {}
    for episode, (_, opponent) in seats(whole).items():
        drawn.setdefault("/".join(episode.split("/")[:2]), set()).add(opponent)
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


def test_a_backend_without_old_versions_is_refused():
    able = Capabilities(versions=True, old_versions=False)
    with pytest.raises(CapabilityError, match=r"llms\.opponent plays earlier versions of 'policy'.*'art'"):
        check_opponents("'art'", able, {"opponent": OpponentsConfig(of="policy")}, "policy")


def test_the_example_is_a_config_of_25_lines_with_nothing_else_to_make():
    text = (EXAMPLE / "config.yml").read_text()
    config = load_config(EXAMPLE / "config.yml")
    assert len(text.splitlines()) <= 25
    assert config.finetuning.target_model == config.llms["opponent"].of == "policy"


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
