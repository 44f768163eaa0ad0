"""The job engine: its steps, what an interruption, a kill and a cancel leave, and what is resumed."""

import functools
import os
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.backends import job_training
from etude.backends.job_training import Interrupted, JobData, JobTraining, TooLittleMemory
from etude.backends.state_folders import StateFolders
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Schedule, plan_steps
from etude.learner.team import Team
from etude.models.weights import digest
from tests.learner.gradients import sequences, to_batch
from tests.models.tiny_models import fresh_policy, policy
from tests.support import one_quick

OPTIONS = LearnerOptions(learning_rate=1e-2, schedule=Schedule("cosine"))


class Listener:
    """Notes what it is told, and has `on_step` called after each step."""

    def __init__(self, on_step=lambda step: None):
        self.starts, self.steps, self.went_backs = [], [], []
        self._on_step = on_step

    def tell(self, news):
        told = {"went_back": self.went_backs, "started": self.starts, "stepped": self.steps}
        told[news.kind].append(news)
        if news.kind == "stepped":
            self._on_step(news.step)


def data(**options):
    units = to_batch(sequences(policy(), 6))
    plain = {"objective": Grpo(), "passes": 2, "batch_size": 2, "seed": 3}
    return JobData(rows=[(unit,) for unit in units], **plain | options)


def training(folder, listener, team=None, every=1, **options):
    learner = Learner(fresh_policy(), OPTIONS, team=team)
    checkpoints = None if folder is None else StateFolders(folder, "step-", "checkpoint")
    return learner, JobTraining(learner, data(**options), listener.tell, checkpoints, every)


def weights(learner):
    return {name: value.tolist() for name, value in learner.policy.trainable().items()}


def test_a_job_that_was_interrupted_ends_as_if_it_had_not_been(tmp_path):
    whole, uninterrupted = training(None, listener := Listener())
    metrics = uninterrupted.run(threading.Event())
    assert [news.step for news in listener.steps] == [1, 2, 3, 4, 5, 6]
    assert whole.trained == 1

    stopping = threading.Event()
    first = Listener(lambda step: stopping.set() if step == 2 else None)
    with pytest.raises(Interrupted):
        training(tmp_path, first, every=100)[1].run(threading.Event(), stopping)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]  # As it was asked to make way.
    second = Listener()
    resumed, rest = training(tmp_path, second, every=100)
    assert {**rest.run(threading.Event()), "tokens_per_s": 0.0} == {**metrics, "tokens_per_s": 0.0}
    assert [news.step for news in second.starts] == [2]
    assert [news.step for news in second.steps] == [3, 4, 5, 6]
    assert weights(resumed) == weights(whole)
    assert [step["loss"] for step in rest.history] == [step["loss"] for step in uninterrupted.history]


@pytest.mark.parametrize(
    ("harmed", "goes_on"),
    [((), 4), ((4,), 2), ((2, 4), 0)],
    ids=["no checkpoint is damaged", "the last one is", "both are"],
)
def test_a_kill_costs_the_steps_since_the_last_whole_checkpoint_alone(tmp_path, harmed, goes_on):
    def kill(step):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training(tmp_path, Listener(kill), every=2)[1].run(threading.Event())
    shutil.copytree(tmp_path / "step-4", tmp_path / f".step-5.{os.getpid()}.part")  # It was being written.
    for step in harmed:
        os.truncate(tmp_path / f"step-{step}" / "optimiser.safetensors", 100)
    resumed, rest = training(tmp_path, listener := Listener(), every=2)
    for news in listener.went_backs:
        assert news.step == goes_on
        names = [f"step-{step}/optimiser.safetensors" for step in reversed(harmed)]
        assert [clause.split()[0] for clause in news.message.split("; ")] == names
    assert bool(listener.went_backs) == bool(harmed)
    rest.run(threading.Event())
    assert [news.step for news in listener.starts] == [goes_on]
    assert weights(resumed) == weights(_train_whole())
    assert sorted(path.name for path in tmp_path.iterdir() if "set-aside" not in path.name) == [
        "step-2",
        "step-4",
    ]


@functools.cache
def _train_whole():
    learner, job = training(None, Listener())
    job.run(threading.Event())
    return learner


def test_the_end_of_an_epoch_is_validated():
    held_out = [(unit,) for unit in to_batch(sequences(policy(), 2, seed=9))]
    _, job = training(None, listener := Listener(), validation=held_out)
    job.run(threading.Event())
    assert [news.step for news in listener.steps if "valid_loss" in news.metrics] == [3, 6]


def test_held_out_rows_without_a_trained_token_have_no_loss():
    held_out = [(replace(one, weights=(0.0,) * len(one.ids)),) for one in sequences(policy(), 2)]
    _, job = training(None, listener := Listener(), validation=[(unit,) for unit in held_out])
    job.run(threading.Event())
    assert len(listener.steps) == 6 and not any("valid_loss" in news.metrics for news in listener.steps)


def test_a_step_without_an_advantage_is_taken_for_another_term_of_the_loss():
    idle = [replace(one, advantages=(0.0,) * len(one.ids)) for one in sequences(policy(), 2)]
    learner = Learner(moved := fresh_policy(), OPTIONS)
    moved.keep_base()
    with torch.no_grad():
        next(iter(moved.trainable().values())).mul_(1.5)
    before = digest(moved.trainable())
    data = JobData(Grpo(beta=0.1), [(unit,) for unit in to_batch(idle)])
    assert JobTraining(learner, data, Listener().tell).run(threading.Event())["grad_norm"] > 0
    assert digest(moved.trainable()) != before


class PretendedTeam(Team):
    """Two processes of one machine, which need the same."""

    def sum(self, values):
        return {name: 2 * value for name, value in values.items()}


@pytest.mark.parametrize("team", one_quick(PretendedTeam(), Team()))
def test_a_job_whose_optimiser_does_not_fit_into_memory_is_refused_before_its_first_step(
    tmp_path, team, monkeypatch
):
    free = [0]
    monkeypatch.setattr(job_training, "available_memory", lambda device: free[-1])
    listener = Listener()
    learner, job = training(tmp_path, listener, team)
    numbers = sum(value.numel() for value in learner.policy.trainable().values())
    needed = 12 * numbers * int(team.sum({"": 1})[""])
    free.append(needed - 1)
    with pytest.raises(TooLittleMemory, match=r"of memory .* free on cpu"):
        job.run(threading.Event())
    assert not listener.starts and not learner.step
    free.append(needed)
    job.run(threading.Event())
    assert len(listener.steps) == 6
    free.append(needed // 3)  # The moments are in memory now.
    JobTraining(learner, data(), listener.tell).run(threading.Event())


def list_rows(steps):
    return [step.rows for step in steps]


def test_every_pass_goes_over_all_rows_in_an_order_of_its_own():
    steps = plan_steps([True] * 7, 2, 3, 5, "epoch")
    assert [len(step.rows) for step in steps] == [3, 3, 1] * 2
    passes = [[row for step in steps if step.epoch == epoch for row in step.rows] for epoch in (1, 2)]
    assert [sorted(rows) for rows in passes] == [list(range(7))] * 2
    assert passes[0] != passes[1]
    assert list_rows(steps) == list_rows(plan_steps([True] * 7, 2, 3, 5, "epoch"))
    assert list_rows(steps) != list_rows(plan_steps([True] * 7, 2, 3, 6, "epoch"))
    assert list_rows(steps) != list_rows(plan_steps([True] * 7, 2, 3, 5, "another job"))


def test_steps_know_where_they_are():
    steps = plan_steps([True] * 4, 2, 2, 0)
    assert [(step.number, step.of, step.epoch, step.ends_epoch, step.part) for step in steps] == [
        (1, 4, 1, False, 0.0),
        (2, 4, 1, True, 0.25),
        (3, 4, 2, False, 0.5),
        (4, 4, 2, True, 0.75),
    ]


def test_without_a_batch_size_all_rows_are_one_step_in_their_order():
    assert list_rows(plan_steps([True] * 3, 2, None, 0)) == [(0, 1, 2)] * 2


def test_steps_without_anything_to_learn_are_left_out():
    steps = plan_steps([True, False, False, False], 3, 1, 0)
    assert list_rows(steps) == [(0,)] * 3
    assert [(step.epoch, step.ends_epoch, step.of) for step in steps] == [(n, True, 3) for n in (1, 2, 3)]
    assert plan_steps([False], 1, None, 0) == []
