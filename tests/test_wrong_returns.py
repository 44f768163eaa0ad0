"""A part that returns what its interface does not have is named, with what it returned and what to return."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy
import pytest

import etude
from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.grpo import Grpo
from etude.config import registry
from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.load import parse_config
from etude.config.registry import register_llm
from etude.core.errors import EtudeError, RequestError
from etude.core.implementations import WrongReturnError
from etude.core.job import Skipped, TrainingStatusEnum
from etude.core.sample import Sample
from etude.loop.trainer import EpochTrainer, EpochTrainerConfig
from etude.store.facts import histories_of
from tests import guide_parts as guide
from tests.training import FakeAdapter, Run, correct, examples, play

TRAINERS = {
    "epochs": lambda: EpochTrainer(EpochTrainerConfig()),
    "guide": lambda: guide.GuideTrainer(guide.GuideTrainerConfig()),
}
JOB = "`TrainingJobRef | Skipped`"
STATUS = "`TrainingJobStatus`"


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    made.examples = examples(3)
    return made


def returning(base: type, name: str, value: Any) -> Any:
    """A subclass whose `async def` of that name returns `value`."""

    async def method(self, *args, **kwargs):
        return value

    method.__name__, method.__qualname__ = name, f"Mine.{name}"
    return type("Mine", (base,), {name: method})


def completed(name: str = "x") -> etude.TrainingJobStatus:
    return etude.TrainingJobStatus(run_id=name, backend="fake", status=TrainingStatusEnum.COMPLETED)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("name", "value", "returned", "expected"),
    [
        ("submit", None, "None", f"{JOB} is expected (is a `return` missing?)"),
        ("submit", {"id": 3}, "a dict ({'id': 3})", f"{JOB} is expected"),
        ("submit", "job-3", "a str ('job-3')", f"{JOB} is expected"),
        ("wait_until_complete", "completed", "a str ('completed')", f"{STATUS} is expected"),
        ("wait_until_complete", None, "None", f"{STATUS} is expected (is"),
        (
            "wait_until_complete",
            TrainingStatusEnum.FAILED,
            "a TrainingStatusEnum",
            f"{STATUS} is expected",
        ),
        ("is_healthy", None, "None", "`bool` is expected (is a `return` missing?)"),
        ("is_healthy", {"status": "ok"}, "a dict ({'status': 'ok'})", "`bool` is expected"),
        ("current_version", "v1", "a str ('v1')", "`ModelVersion | None` is expected"),
    ],
)
async def test_of_an_adapter(run, trainer, name, value, returned, expected):
    run.adapter = returning(FakeAdapter, name, value)(run.path.parent / "backend")
    run.make_trainer = TRAINERS[trainer]
    if name == "current_version" and trainer == "guide":
        run.make_trainer = TRAINERS["epochs"]
    with pytest.raises(WrongReturnError) as caught:
        await run.start(num_epochs=2)
    assert re.match(rf"test_wrong_returns\.py:\d+: Mine\.{name} returned ", str(caught.value))
    assert f"returned {returned}" in str(caught.value) and expected in str(caught.value)
    # Nothing is said to have been trained on.
    history = histories_of(run.path)[None]
    assert not history.trained and not history.epochs
    assert not any(event.startswith("trained") for event in run.watcher.events)


async def test_of_a_method_that_does_not_take_what_it_is_given(run):
    class Adapter(guide.GuideAdapter):
        async def wait_until_complete(self, ref):
            return await self.status(ref)

    run.adapter = Adapter(guide.GuideAdapterConfig())
    said = (
        r"test_wrong_returns\.py:\d+: .*Adapter\.wait_until_complete is to take what its interface says, "
        r"\(self, ref, poll_interval=10\.0\): .* unexpected keyword argument 'poll_interval'"
    )
    with pytest.raises(WrongReturnError, match=said):
        await run.start()


async def test_a_type_error_within_a_method_is_its_own(run):
    class Adapter(guide.GuideAdapter):
        async def submit(self, trajectories):
            return len(None)

    run.adapter = Adapter(guide.GuideAdapterConfig())
    with pytest.raises(TypeError, match="has no len"):
        await run.start()


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("epochs", r"Forgetful\.run_epoch returned None, and it submitted a job; return what `sub"),
        ("guide", r"FakeAdapter was asked after job None, and a TrainingJobRef is expected"),
    ],
)
async def test_of_run_epoch_after_it_has_submitted_a_job(run, trainer, said):
    base = type(TRAINERS[trainer]())

    class Forgetful(base):
        async def run_epoch(self, epoch, run_id):
            await super().run_epoch(epoch, run_id)

    config = EpochTrainerConfig() if trainer == "epochs" else guide.GuideTrainerConfig()
    run.make_trainer = lambda: Forgetful(config)
    with pytest.raises(WrongReturnError, match=said):
        await run.start(num_epochs=2)
    assert not any(event.startswith("skipped") for event in run.watcher.events)
    again = run.restarted()
    again.make_trainer = TRAINERS[trainer]
    await again.start(num_epochs=2)
    assert [status.status for status in again.statuses] == ["completed"] * 2


@pytest.mark.parametrize("trainer", TRAINERS)
async def test_of_an_initialize_that_leaves_out_the_base_class(run, trainer):
    made = TRAINERS[trainer]()

    class Bare(type(made)):
        async def initialize(self, run_config):
            """Forgets its base class."""

    run.make_trainer = lambda: Bare(made.trainer_config)
    with pytest.raises(
        EtudeError, match=r"Bare is not ready for this: call super\(\)\.initialize\(run_config\)"
    ):
        await run.start()


async def test_of_a_status_that_a_trainer_asks_for(run):
    run.adapter = returning(guide.GuideAdapter, "status", {"status": "completed"})(guide.GuideAdapterConfig())
    run.make_trainer = lambda: guide.OneLoopTrainer(guide.GuideTrainerConfig())
    with pytest.raises(WrongReturnError, match=r"Mine\.status returned a dict .*`TrainingJobStatus` is exp"):
        await run.start()


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("name", "value", "returned", "expected"),
    [
        ("finalize", None, "None", "`TrajectoryCollection` is expected"),
        ("finalize", [], "a list ([])", "`TrajectoryCollection` is expected"),
        ("run_eval", None, "None", "`EvaluationRunOutput` is expected"),
        ("compute_reward", "0.5", "a str ('0.5')", "`float` is expected"),
        ("compute_reward", None, "None", "`float` is expected"),
    ],
)
async def test_of_a_builder(run, trainer, name, value, returned, expected):
    run.builder = returning(guide.GuideBuilder, name, value)(guide.GuideBuilderConfig())
    run.make_trainer = TRAINERS[trainer]
    with pytest.raises(WrongReturnError) as caught:
        await run.start(num_epochs=1)
    assert f"Mine.{name} returned {returned}, and {expected}" in str(caught.value)
    assert run.adapter.submitted == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (
            "run",
            None,
            r"returned None, and `list\[TrainingJobStatus\]` is expected \(is a `return`",
        ),
        ("run", completed(), r"returned a TrainingJobStatus .*, and `list\[TrainingJobStatus\]` is expected"),
        ("run", [completed(), None], r"returned a list \(\[.*, and `list\[TrainingJobStatus\]`"),
        ("run_epoch", "job-1", r"returned a str \('job-1'\), and `TrainingJobRef \| Skipped \| None` is"),
        ("run_validation_evaluation", 0.5, r"returned a float \(0.5\), and `dict\[str, Any\]` is expected"),
    ],
)
async def test_of_a_trainer(run, name, value, expected):
    run.validation = examples(2, "v")
    base = EpochTrainer if name == "run_validation_evaluation" else guide.GuideTrainer
    config = EpochTrainerConfig() if base is EpochTrainer else guide.GuideTrainerConfig()
    run.make_trainer = lambda: returning(base, name, value)(config)
    with pytest.raises(WrongReturnError, match=rf"Mine\.{name} {expected}"):
        await run.start()


@pytest.mark.parametrize("value", [None, []])
async def test_of_a_run_whose_jobs_are_completed_and_that_goes_on_when_it_is_mended(run, value):
    class Forgetful(guide.GuideTrainer):
        async def run(self, num_epochs):
            await super().run(num_epochs)
            return value

    run.make_trainer = lambda: Forgetful(guide.GuideTrainerConfig())
    expected = r"returned None, and `list\[" if value is None else "returned no status, and 2 jobs were"
    with pytest.raises(WrongReturnError, match=rf"Forgetful\.run {expected}"):
        await run.start(num_epochs=2)
    again = run.restarted()
    again.make_trainer = TRAINERS["guide"]
    await again.start(num_epochs=2)
    assert [status.status for status in again.statuses] == ["completed"] * 2
    assert again.adapter.submitted == []


async def test_of_what_is_no_async_def(run):
    class Curriculum(EpochTrainer):
        def apply_curriculum_learning(self, trajectory_collection, epoch):
            trajectory_collection.trajectories[:1]

    run.make_trainer = lambda: Curriculum(EpochTrainerConfig())
    with pytest.raises(WrongReturnError, match=r"apply_curriculum_learning returned None, and `Trajectory"):
        await run.start()


async def test_a_plain_def_is_as_good_as_an_async_one(run):
    """Of every method that returns without waiting for anything."""

    class Builder(guide.GuideBuilder):
        def start_run(self, run_id, meta=None):
            runs = [self.run_eval() for _ in range(self.generations)]
            self.evaluation_runs[run_id] = [asyncio.ensure_future(each) for each in runs]

        def compute_reward(self, output_item, meta=None):
            return output_item.score

    class Adapter(guide.GuideAdapter):
        def is_healthy(self):
            return True

        def submit(self, trajectories):
            self.jobs[trajectories.run_id] = trajectories
            return etude.TrainingJobRef(run_id=trajectories.run_id, backend="guide")

        def wait_until_complete(self, ref, poll_interval=10.0):
            return self.status(ref)

        def initialize(self, run_config):
            self.run_config = run_config

        def cleanup(self):
            self.jobs.clear()

    class Trainer(guide.GuideTrainer):
        def get_metrics(self, run_id):
            return {}

        def cleanup(self):
            """Nothing to free."""

    run.builder, run.adapter = Builder(guide.GuideBuilderConfig()), Adapter(guide.GuideAdapterConfig())
    run.make_trainer = lambda: Trainer(guide.GuideTrainerConfig())
    trainer = await run.start(num_epochs=2)
    assert [status.status for status in run.statuses] == ["completed"] * 2
    assert await trainer.get_metrics("x") == {}


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (guide.GuideTrainer, "log_progress"),
        (guide.GuideTrainer, "apply_curriculum_learning"),
        (guide.GuideAdapter, "log_progress"),
        (guide.GuideAdapter, "capabilities"),
        (guide.GuideBuilder, "facts"),
    ],
)
def test_an_async_def_of_what_nobody_waits_for_is_refused_where_it_stands(base, name):
    place = rf"test_wrong_returns\.py:\d+: Mine\.{name}"
    with pytest.raises(
        RequestError, match=rf"{place} is `async def`, and .*\.{name} is called without being w"
    ):
        returning(base, name, None)


async def test_a_coroutine_that_is_handed_on_by_a_plain_def_is_named(run):
    async def later(*args):
        """Nothing."""

    class Logging(guide.GuideTrainer):
        def log_progress(self, epoch, metrics, output_dir=None):
            return later(epoch)

    run.make_trainer = lambda: Logging(guide.GuideTrainerConfig())
    with pytest.raises(WrongReturnError, match=r"returned a coroutine .*, and `None` is expected"):
        await run.start()


async def test_what_a_base_class_of_ones_own_returns_to_a_subclass_is_theirs(run):
    class Base(guide.GuideAdapter):
        async def submit(self, trajectories):
            self.jobs[trajectories.run_id] = trajectories
            return trajectories.run_id

    class Adapter(Base):
        async def submit(self, trajectories):
            return etude.TrainingJobRef(run_id=await super().submit(trajectories), backend="guide")

    run.adapter = Adapter(guide.GuideAdapterConfig())
    run.make_trainer = TRAINERS["guide"]
    await run.start(num_epochs=1)
    assert len(run.statuses) == 1


async def test_numbers_of_other_libraries_are_numbers(run):
    class Builder(guide.GuideBuilder):
        async def compute_reward(self, output_item, meta=None):
            return numpy.float32(output_item.score)

    class Adapter(FakeAdapter):
        async def is_healthy(self):
            return numpy.bool_(True)

    run.builder, run.adapter = Builder(guide.GuideBuilderConfig()), Adapter(run.path.parent / "backend")
    await run.start(num_epochs=1)
    assert len(run.statuses) == 1


async def test_what_was_not_submitted_is_not_counted_as_trained_on(run):
    class Picky(FakeAdapter):
        async def submit(self, trajectories):
            return (
                Skipped(reason="too little data")
                if len(self.submitted)
                else await super().submit(trajectories)
            )

    run.adapter = Picky(run.path.parent / "backend")
    run.builder = CollectingBuilder(Grpo(num_generations=4))
    await run.start(num_epochs=2)
    lines = [json.loads(line) for line in (run.path / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["episodes"] for line in lines] == [12, 12]
    assert [bool(line["filtered_trajectories"]) for line in lines] == [True, False]


@pytest.mark.parametrize("kind", ["trainer_adapters", "trajectory_builders", "trainers"])
@pytest.mark.parametrize(("part", "shown"), [(None, "None"), ("local", "a str"), (FakeAdapter, "an ABCMeta")])
async def test_what_a_factory_yields_is_a_part(monkeypatch, kind, part, shown):
    async def factory(config, builder):
        yield part

    config = parse_config({"workflow": "tests.training:play"})
    names = {"trainer_adapters": "local", "trajectory_builders": "grpo", "trainers": "epochs"}
    registration = registry.lookup(kind, names[kind])
    monkeypatch.setitem(registry._registrations, (kind, names[kind]), replace(registration, factory=factory))
    async with Builder(config) as builder:
        getter = getattr(builder, f"get_{kind[:-1]}")
        with pytest.raises(EtudeError, match=rf"test_wrong_returns.py:\d+: what builds .* yielded {shown}"):
            await getter(names[kind])


@pytest.mark.parametrize(
    ("kind", "base", "config"),
    [
        ("trainer_adapters", guide.GuideAdapter, "adapter_config"),
        ("trajectory_builders", guide.GuideBuilder, "trajectory_builder_config"),
        ("trainers", guide.GuideTrainer, "trainer_config"),
    ],
)
async def test_a_constructor_that_leaves_out_the_base_class_is_named(monkeypatch, kind, base, config):
    def init(self, given):
        """Forgets its base class."""

    async def factory(config, builder):
        yield type("Mine", (base,), {"__init__": init})(config)

    names = {"trainer_adapters": "local", "trajectory_builders": "grpo", "trainers": "epochs"}
    registration = registry.lookup(kind, names[kind])
    monkeypatch.setitem(registry._registrations, (kind, names[kind]), replace(registration, factory=factory))
    async with Builder(parse_config({"workflow": "tests.training:play"})) as builder:
        said = rf"test_wrong_returns.py:\d+: `Mine.__init__` does not call `super\(\).__init__\({config}\)`"
        with pytest.raises(EtudeError, match=said):
            await getattr(builder, f"get_{kind[:-1]}")(names[kind])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [1.0],
            r"Wrong.advantages returned a list \(\[1.0\]\), and `Sequence",
        ),
        (["high"], r"Wrong.advantages returned a list \(\['high'\]\)"),
        ([[1.0]] * 3, r"`advantages` gives each sample a list .*, and it gave 3 lists for 2 samples"),
    ],
)
def test_of_an_algorithm(rows, said):
    class Wrong(Grpo, name=""):
        def advantages(self, group):
            return rows

    group = [Sample(ids=(1, 2), mask=(0.0, 1.0), logprobs=(0.0, -1.0)) for _ in range(2)]
    with pytest.raises(EtudeError, match=said):
        Wrong().assigned([group])


def test_of_a_loss():
    class Wrong(Grpo, name=""):
        def loss(self, logprobs_BT, batch):
            """Forgets its return."""

    torch = pytest.importorskip("torch")
    with pytest.raises(WrongReturnError, match=r"Wrong\.loss returned None, and `tuple\[Tensor, "):
        Wrong().loss(torch.zeros(1), None)


def test_of_an_alarm(monkeypatch):
    monkeypatch.setattr(registry, "_registrations", dict(registry._registrations))

    class Wrong(etude.Alarm, name="wrong_returns"):
        def look(self, entry, earlier):
            return True

    with pytest.raises(WrongReturnError, match=r"Wrong\.look returned a bool \(True\), and `Mapping"):
        Wrong().look(None, [])


class OwnEngineConfig(LlmConfig, name="test_wrong_engine"):
    """A model of one's own."""

    says: Any = None
    plain: bool = False


class OwnEngine:
    version = 0

    def __init__(self, config):
        self.says, self.plain = config.says, config.plain

    def complete(self, request):
        return self.says if self.plain else self._later()

    async def _later(self):
        return self.says

    async def close(self):
        """Nothing to close."""


@register_llm(config_type=OwnEngineConfig)
async def own_engine(config: OwnEngineConfig, builder: Builder) -> AsyncIterator[Any]:
    yield None if config.says == "none" else OwnEngine(config)


@pytest.mark.parametrize(
    ("says", "returned"), [(None, "None"), ("yes", r"a str \('yes'\)"), ({"content": "yes"}, "a dict")]
)
@pytest.mark.parametrize("plain", [False, True])
def test_of_an_engine(tmp_path, monkeypatch, says, returned, plain):
    monkeypatch.chdir(tmp_path)
    model = {"_type": "test_wrong_engine", "says": says, "plain": plain}
    said = rf"test_wrong_returns.py:\d+: OwnEngine.complete returned {returned}.* `Completion` is expected"
    with pytest.raises(EtudeError, match=said):
        etude.evaluate(play, reward=correct, examples=examples(2), model=model, progress=False)


def test_of_what_builds_an_engine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"_type": "test_wrong_engine", "says": "none"}
    with pytest.raises(EtudeError, match=r"test_wrong_returns.py:\d+: what builds llms.policy yielded None"):
        etude.evaluate(play, reward=correct, examples=examples(2), model=model, progress=False)


def test_any_sequence_or_set_will_do():
    """Where an interface declares one: a range, a tuple, a frozenset."""

    class Own(Grpo, name=""):
        def earlier_epochs(self, epoch):
            return range(epoch)

        def needs(self):
            return frozenset({"logprobs"})

    assert [*Own().earlier_epochs(2)] == [0, 1]
    assert Own().needs() == {"logprobs"}
