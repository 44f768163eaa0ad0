"""A part that returns what its interface does not have is named, with what it returned and what to return."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

import etude
from etude.config import registry
from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.errors import ErrorBudgetExceeded, EtudeError, RequestError
from etude.core.interfaces import WrongReturnError
from etude.core.job import TrainingStatusEnum
from etude.loop.trainer import EpochTrainerConfig
from etude.store.facts import read_facts
from etude.store.histories import read_histories
from tests import guide_parts as guide
from tests.support import ScriptedEngine
from tests.training import FakeAdapter, correct, examples, play


def returning(base: type, name: str, value: Any) -> Any:
    """A subclass whose `async def` of that name returns `value`, or raises it."""

    async def method(self, *args, **kwargs):
        if isinstance(value, BaseException):
            raise value
        return value

    method.__name__, method.__qualname__ = name, f"Mine.{name}"
    return type("Mine", (base,), {name: method})


def plain(base: type, *names: str) -> Any:
    """A subclass whose methods of those names are `def`: for methods that wait for nothing."""

    def without_waiting(awaited: Any) -> Any:
        @functools.wraps(awaited)
        def method(self, *args, **kwargs):
            with pytest.raises(StopIteration) as returned:
                awaited(self, *args, **kwargs).send(None)
            return returned.value.value

        return method

    return type("Mine", (base,), {name: without_waiting(getattr(base, name)) for name in names})


def completed_job(name: str = "x") -> etude.TrainingJobStatus:
    return etude.TrainingJobStatus(run_id=name, backend="fake", status=TrainingStatusEnum.COMPLETED)


@pytest.mark.parametrize(
    ("base", "name", "value", "returned"),
    [
        (FakeAdapter, "submit", None, "None"),
        (FakeAdapter, "submit", {"id": 3}, "a dict ({'id': 3})"),
        (FakeAdapter, "wait_until_complete", "completed", "a str ('completed')"),
        (FakeAdapter, "is_healthy", None, "None"),
        (guide.GuideBuilder, "finalize", [], "a list ([])"),
        (guide.GuideBuilder, "run_eval", None, "None"),
        (guide.GuideBuilder, "compute_reward", "0.5", "a str ('0.5')"),
        (guide.GuideBuilder, "compute_reward", float("nan"), "a float (nan)"),
        (guide.GuideTrainer, "run", None, "None"),
        (guide.GuideTrainer, "run", [completed_job(), None], "a list (["),
        (guide.GuideTrainer, "run_epoch", "job-1", "a str ('job-1')"),
    ],
)
async def test_of_a_part(run, base, name, value, returned):
    part = returning(base, name, value)
    run.make_trainer = guide.TRAINERS["guide"]
    if base is guide.GuideTrainer:
        run.make_trainer = lambda: part(guide.GuideTrainerConfig())
    elif base is guide.GuideBuilder:
        run.builder = part(guide.GuideBuilderConfig())
    else:
        run.adapter = part(run.path.parent / "backend")
    with pytest.raises(WrongReturnError) as caught:
        await run.start(num_epochs=2)
    assert re.match(rf"test_wrong_returns\.py:\d+: Mine\.{name} returned ", str(caught.value))
    assert f"returned {returned}" in str(caught.value)
    # Nothing is said to have been trained on.
    assert not read_histories(run.path)[None].trained_epochs
    assert not any(event.startswith("trained") for event in run.watcher.events)


@pytest.mark.parametrize("name", ["initialize", "submit", "wait_until_complete"])
async def test_sys_exit_in_a_part_is_an_error_of_its_method(run, name):
    run.adapter = returning(FakeAdapter, name, SystemExit(3))(run.path.parent / "backend")
    with pytest.raises(RuntimeError, match=rf"test_wrong_returns\.py:\d+: Mine\.{name} raised SystemExit: 3"):
        await run.start(num_epochs=1)


async def test_a_part_that_cannot_be_freed_is_reported_and_the_run_is_finished(run):
    run.adapter = returning(FakeAdapter, "cleanup", SystemExit("busy"))(run.path.parent / "backend")
    await run.start(num_epochs=1)
    assert "Mine.cleanup failed: " in run.watcher.warnings[0] and "busy" in run.watcher.warnings[0]
    assert read_facts(run.path).state == "finished"


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ("epochs", r"Forgetful\.run_epoch returned None, .*`submit`"),
        ("guide", r"FakeAdapter .* job None, .*TrainingJobRef .*`run_epoch`"),
    ],
)
async def test_of_run_epoch_after_it_has_submitted_a_job(run, trainer, said):
    base = type(guide.TRAINERS[trainer]())

    class Forgetful(base):
        async def run_epoch(self, epoch, run_id):
            await super().run_epoch(epoch, run_id)

    config = EpochTrainerConfig() if trainer == "epochs" else guide.GuideTrainerConfig()
    run.make_trainer = lambda: Forgetful(config)
    with pytest.raises(WrongReturnError, match=said):
        await run.start(num_epochs=2)
    assert not any(event.startswith("skipped") for event in run.watcher.events)
    again = run.restart()
    again.make_trainer = guide.TRAINERS[trainer]
    await again.start(num_epochs=2)
    assert [status.status for status in again.statuses] == ["completed"] * 2


@pytest.mark.parametrize("value", [None, []])
async def test_of_a_run_whose_jobs_are_completed_and_that_goes_on_when_it_is_mended(run, value):
    class Forgetful(guide.GuideTrainer):
        async def run(self, num_epochs):
            await super().run(num_epochs)
            return value

    run.make_trainer = lambda: Forgetful(guide.GuideTrainerConfig())
    expected = r"returned None, and `list\[" if value is None else "returned no status, .* 2 jobs"
    with pytest.raises(WrongReturnError, match=rf"Forgetful\.run {expected}"):
        await run.start(num_epochs=2)
    again = run.restart()
    again.make_trainer = guide.TRAINERS["guide"]
    await again.start(num_epochs=2)
    assert [status.status for status in again.statuses] == ["completed"] * 2
    assert again.adapter.submitted == []


async def test_a_plain_def_is_as_good_as_an_async_one(run):
    builder = plain(guide.GuideBuilder, "start_run", "compute_reward")
    methods = ("initialize", "is_healthy", "submit", "wait_until_complete", "cleanup")
    adapter, trainer = (
        plain(guide.GuideAdapter, *methods),
        plain(guide.GuideTrainer, "get_metrics", "cleanup"),
    )
    run.builder, run.adapter = builder(guide.GuideBuilderConfig()), adapter(guide.GuideAdapterConfig())
    run.make_trainer = lambda: trainer(guide.GuideTrainerConfig())
    made = await run.start(num_epochs=2)
    assert [status.status for status in run.statuses] == ["completed"] * 2
    assert await made.get_metrics("x") == {"epochs": [{"my_figure": 0.5}, {"my_figure": 1.5}]}


@pytest.mark.parametrize(
    ("base", "name"), [(guide.GuideTrainer, "log_progress"), (guide.GuideAdapter, "capabilities")]
)
def test_an_async_def_of_what_nobody_waits_for_is_refused_where_it_stands(base, name):
    place = rf"test_wrong_returns\.py:\d+: Mine\.{name}"
    with pytest.raises(RequestError, match=rf"{place} .*`async def`.*\.{name} .*`def`"):
        returning(base, name, None)


class Unready(etude.EpochTrainer):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "yielded nothing"),
        ([None], "yielded nothing"),
        ([FakeAdapter], "yielded an ABCMeta"),
        ([Unready()], r"Unready\.__init__ needs super"),
    ],
)
async def test_what_a_factory_yields_is_a_part(monkeypatch, parts, said):
    ended = []

    async def factory(config, builder):
        try:
            for part in parts:
                yield part
        finally:
            ended.append(True)

    registration = replace(registry.lookup("trainers", "epochs"), factory=factory)
    monkeypatch.setitem(registry._registrations, ("trainers", "epochs"), registration)
    with pytest.raises(EtudeError, match=rf"test_wrong_returns.py:\d+: .*{said}"):
        async with Builder(parse_config({"workflow": "tests.training:play"})) as builder:
            await builder.get_trainer("epochs")
    assert ended == [True]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "None.* `Completion`"),
        ("yes", r"a str \('yes'\).* `Completion`"),
        ({"message": "yes"}, "a Completion with message: .*'yes'"),
        ({"logprobs": (0.5, -1.0)}, r"a Completion with logprobs.0: .* 0\.5"),
        ({"logprobs": (-1.0,)}, "a Completion with 1 logprobs for [0-9]+ completion_ids"),
        ({"completion_ids": (3.5,)}, r"a Completion with completion_ids.0: .* 3\.5"),
        ({"model_version": "1"}, "a Completion with model_version: .* '1'"),
    ],
)
@pytest.mark.parametrize("is_plain", [False, True])
def test_of_an_engine(tmp_path, monkeypatch, wrong, said, is_plain):
    class Mine(ScriptedEngine):
        async def complete(self, request):
            return replace(await super().complete(request), **wrong) if isinstance(wrong, dict) else wrong

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.cli.parts.ScriptedEngine", plain(Mine, "complete") if is_plain else Mine)
    place = r"test_wrong_returns.py:\d+: .*Mine.complete"
    with pytest.raises(ErrorBudgetExceeded, match=f"{place} returned {said}"):
        model = "tests.cli.parts:open_scripted"
        etude.evaluate(play, reward=correct, examples=examples(2), model={"_type": model}, progress=False)


async def test_an_engine_that_could_not_adopt_is_refused_before_it_samples(run):
    class NoAdopt:
        version = 0

        async def complete(self, request):
            raise AssertionError("sampled")

    run.engine = NoAdopt()
    with pytest.raises(RequestError, match=r"'policy', a .*NoAdopt, .* no `adopt`"):
        await run.start(num_epochs=1)


def test_a_value_in_place_of_a_method_is_refused_where_it_stands():
    with pytest.raises(RequestError, match=r"Mine\.capabilities .*method"):
        type("Mine", (FakeAdapter,), {"capabilities": etude.Capabilities()})


def test_metrics_of_a_job_have_names_that_are_text():
    status = completed_job().model_copy(update={"metadata": {"metrics": {1: 0.5}}})
    assert status.metrics == {"1": 0.5}
