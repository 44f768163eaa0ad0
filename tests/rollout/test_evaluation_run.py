"""Evaluation runs: real collector, real journal, agents and evaluators that fail."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.core.errors import EngineError, ErrorBudgetExceeded
from etude.core.evaluation import EvalInputItem, EvalOutputItem, EvaluationRunOutput
from etude.core.interfaces import Evaluator
from etude.rollout.collector import Collector, Limits
from etude.rollout.evaluation import JournalledEvaluation
from etude.rollout.evaluator import FunctionEvaluator, WeightedEvaluator, make_score
from etude.rollout.workflow import Workflow
from etude.store.journal import Journal
from etude.wire.retries import note_retries
from tests.support import ScriptedEngine, pass_time, until

EXAMPLES = [Example(f"q{n}", {"n": n}, n % 2) for n in range(4)]


async def agent(example: Example, episode: Any) -> str:
    """Says what the model says; one call."""
    return (await episode.chat([{"role": "user", "content": f"{example.id} {episode.generation}"}])).text


def echo() -> ScriptedEngine:
    return ScriptedEngine(lambda request: request.messages[-1]["content"])


def evaluation(
    journal: Journal,
    evaluators: Mapping[str, Evaluator | Callable[..., Any]],
    *,
    workflow: Callable[..., Any] = agent,
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> JournalledEvaluation:
    limits = Limits(max_concurrency=4, timeout=options.pop("episode_timeout", 600.0))
    collector = Collector(Workflow("agent", workflow), {"m": engine or echo()}, journal, limits=limits)
    return JournalledEvaluation(collector, evaluators, journal, **options)  # type: ignore[arg-type]  # plain functions too


def even(example: Example, output: str) -> float:
    return 1.0 - example.expected


def scores(output: EvaluationRunOutput, name: str) -> list[float | None]:
    return [item.score for item in output.evaluator_items(name)]


class Rank(Evaluator):
    """Scores episodes by their place among all outputs of the example."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return (await self.evaluate_group([item]))[0]

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        self.groups.append([item.generation for item in items])
        ordered = sorted(item.output_obj for item in items)
        return [make_score(item, ordered.index(item.output_obj)) for item in items]


async def test_every_episode_is_scored_by_every_evaluator_in_the_order_of_the_dataset(
    journal: Journal,
) -> None:
    late_first = {"q0 0": 0.03, "q0 1": 0.0, "q1 0": 0.02}

    async def uneven(example: Example, episode: Any) -> str:
        await asyncio.sleep(late_first.get(f"{example.id} {episode.generation}", 0.01))
        return await agent(example, episode)

    run = evaluation(journal, {"even": even, "length": lambda example, output: len(output)}, workflow=uneven)
    output = await run.run(EXAMPLES, phase="eval", generations=2)
    items = output.eval_input.eval_input_items
    assert [(item.id, item.generation) for item in items] == [
        (f"q{n}", g) for n in range(4) for g in range(2)
    ]
    assert [item.output_obj for item in items] == [f"q{n} {g}" for n in range(4) for g in range(2)]
    assert [name for name, _ in output.evaluation_results] == ["even", "length"]
    assert scores(output, "even") == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert output.evaluation_results[0][1].average_score == 0.5
    assert [(o.id, o.generation) for o in output.evaluator_items("length")] == [
        (i.id, i.generation) for i in items
    ]
    assert not output.workflow_interrupted
    assert output.failures == {}


async def failing(example: Example, episode: Any) -> Any:
    match example.id:
        case "q0":
            raise ValueError("no idea")
        case "q1":
            return None
        case "q2":
            await asyncio.Event().wait()
    return await agent(example, episode)


async def test_failed_episodes_have_no_score_but_a_reason_and_are_counted(journal: Journal) -> None:
    async def late_last(example: Example, episode: Any) -> Any:
        if example.id == "q2":
            await until(lambda: all(journal.get(f"eval/{other}/0") for other in ("q0", "q1", "q3")))
            pass_time(600.0)
        return await failing(example, episode)

    evaluators = {"even": even, "rank": Rank()}
    run = evaluation(journal, evaluators, workflow=late_last, error_budget=1.0, timeout=3600.0)
    output = await run.run(EXAMPLES, phase="eval")
    assert output.workflow_interrupted
    assert output.failures == {"raised": 1, "no_output": 1, "timeout": 1}
    for name in ("even", "rank"):
        assert scores(output, name) == [None, None, None, 0.0]
        raised, nothing, late, _ = output.evaluator_items(name)
        assert "ValueError: no idea" in (raised.error or "")
        assert (nothing.error or "").startswith("no_output: ")
        assert (late.error or "").startswith("timeout: ")
    assert output.evaluation_results[0][1].average_score == 0.0


async def test_at_most_so_many_evaluations_run_at_once(journal: Journal) -> None:
    running, most = 0, 0

    async def counts(example: Example, output: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return 1.0

    run = evaluation(journal, {"a": counts, "b": counts}, max_concurrency=2)
    await run.run(EXAMPLES, phase="eval", generations=3)
    assert most == 2


async def test_groups_are_all_episodes_of_an_example_that_have_an_output(journal: Journal) -> None:
    async def one_fails(example: Example, episode: Any) -> str:
        if example.id == "q1" and episode.generation == 1:
            raise ValueError("no idea")
        return await agent(example, episode)

    run = evaluation(journal, {"rank": (rank := Rank())}, workflow=one_fails)
    output = await run.run(EXAMPLES, phase="train/1", generations=3)
    assert sorted(rank.groups) == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 2]]
    assert scores(output, "rank") == [0, 1, 2, 0, None, 1, 0, 1, 2, 0, 1, 2]


async def test_what_a_weighted_evaluator_combines_is_scored_once(journal: Journal) -> None:
    calls: list[str] = []

    def right(example: Example, output: str) -> float:
        calls.append(example.id)
        return 1.0

    shared, rank = FunctionEvaluator(right), Rank()
    inner = WeightedEvaluator({"right": shared, "rank": rank}, {"right": 2.0, "rank": 1.0})
    evaluators = {
        "total": WeightedEvaluator({"inner": inner, "right": shared}, {"inner": 1.0, "right": 10.0}),
        "right": shared,
    }
    output = await evaluation(journal, evaluators).run(EXAMPLES, phase="eval", generations=2)
    assert scores(output, "total") == [12.0, 13.0] * 4
    assert scores(output, "right") == [1.0] * 8
    assert len(calls) == 8
    assert len(rank.groups) == 4
    assert [name for name, _ in output.evaluation_results] == ["total", "right"]


async def test_calls_under_way_when_a_run_stops_by_itself_are_answered_and_not_paid_again(
    journal: Journal,
) -> None:
    engine, failed = echo(), asyncio.Event()
    complete, paid, left = engine.complete, list[str](), list[int]()

    async def answer(request: ChatRequest) -> Any:
        if request.messages[-1]["content"] == "q0 0" and not failed.is_set():
            await until(lambda: len(collector._models.under_way) == 4)
            failed.set()
            raise EngineError("gone")
        await failed.wait()
        paid.append(request.messages[-1]["content"])
        await until(lambda: journal.get("resumed", False) or bool(collector._models.settling))
        return await complete(request)

    async def asks_twice(example: Example, episode: Any) -> str:
        first = await agent(example, episode)
        return first + (await episode.chat([{"role": "user", "content": "more"}])).text

    @asynccontextmanager
    async def wait_for_calls() -> AsyncIterator[None]:
        async with Collector.wait_for_calls(collector):
            await asyncio.sleep(0.2)  # A busy event loop stops episodes that much later.
            try:
                yield
            finally:
                left.append(len(collector.playing))

    engine.complete = answer  # type: ignore[method-assign]
    run = evaluation(journal, {"even": even}, workflow=asks_twice, engine=engine, error_budget=0.0)
    collector = run.collector
    collector.wait_for_calls = wait_for_calls  # type: ignore[method-assign]
    with pytest.raises(ErrorBudgetExceeded):
        await run.run(EXAMPLES, phase="eval")
    assert sorted(paid) == ["q1 0", "q2 0", "q3 0"], "and no call was begun meanwhile"
    assert left and not any(left), "nor before all episodes were cancelled"
    await journal.put("resumed", True)
    assert scores(await run.run(EXAMPLES, phase="eval"), "even") == [1.0, 0.0, 1.0, 0.0]
    assert sorted(paid) == ["more"] * 4 + ["q0 0", "q1 0", "q2 0", "q3 0"]


async def test_over_the_budget_failures_are_tried_again_and_the_rest_is_kept(journal: Journal) -> None:
    broken = {"q1", "q2"}
    ran: list[str] = []
    judged: list[str] = []

    async def flaky(example: Example, episode: Any) -> str:
        ran.append(f"{example.id} {episode.generation}")
        text = await agent(example, episode)
        if example.id in broken:
            raise ValueError("no idea")
        return text

    def judge(example: Example, output: str) -> float:
        judged.append(output)
        return 1.0

    engine, rank = echo(), Rank()
    generations = 11  # So that the id of one episode is the beginning of another's.

    async def once() -> EvaluationRunOutput:
        run = evaluation(journal, {"judge": judge, "rank": rank}, workflow=flaky, engine=engine)
        return await run.run(EXAMPLES, phase="eval", generations=generations)

    with pytest.raises(ErrorBudgetExceeded, match=r"raised: [\s\S]*eval/q\d/\d+: .*ValueError: no idea"):
        await once()
    good = len(judged)
    broken.clear()
    output = await once()
    assert scores(output, "judge") == [1.0] * 44
    assert output.failures == {}
    # No call was made twice, and no good episode was run or scored twice.
    assert len(engine.requests) == 44
    assert len(judged) == 44 > good
    assert all(ran.count(name) == 1 for name in ran if name[:2] in ("q0", "q3"))


async def test_a_hopeless_run_is_stopped_early(journal: Journal) -> None:
    ran: list[str] = []

    async def fail(example: Example, episode: Any) -> str:
        ran.append(episode.id)
        raise ValueError("no idea")

    run = evaluation(journal, {"even": even}, workflow=fail, error_budget=0.1)
    with pytest.raises(ErrorBudgetExceeded):
        await run.run([Example(f"q{n}") for n in range(1000)], phase="eval")
    assert len(ran) < 300


async def test_the_causes_of_failures_are_counted_with_an_episode_of_each(journal: Journal) -> None:
    """Messages that differ in numbers alone have one cause."""

    async def fails(example: Example, episode: Any) -> str:
        if example.id == "q3":
            return "fine"
        raise ValueError(f"no answer after {episode.generation + 30} s\nand more about it")

    def picky(example: Example, output: str) -> float:
        raise KeyError("verdict")

    run = evaluation(journal, {"even": even, "picky": picky}, workflow=fails, error_budget=1.0)
    output = await run.run(EXAMPLES, phase="eval", generations=2)
    first, second = output.causes
    assert (first.kind, first.count, first.episode) == ("raised", 6, "eval/q0/0")
    assert first.reason.endswith("ValueError: no answer after 30 s")
    assert (second.kind, second.count, second.episode) == ("score:picky", 2, "eval/q3/0")
    assert "KeyError: 'verdict'" in second.reason
    assert output.scores() == {"even": [0.0, 0.0], "picky": []}


async def test_model_calls_are_counted_with_those_cut_off_and_those_tried_again(journal: Journal) -> None:
    class Tired(ScriptedEngine):
        async def complete(self, request: Any) -> Any:
            note_retries({"other": 1})
            if "q0" in str(request.messages):
                raise EngineError("no answer")
            completion = await super().complete(request)
            return replace(completion, finish_reason="length" if "q1" in str(request.messages) else "stop")

    run = evaluation(journal, {"even": even}, engine=Tired(lambda request: "x"), error_budget=1.0)
    output = await run.run(EXAMPLES, phase="eval")
    assert output.calls == {"answers": 3, "cut_off": 1, "failed": 1, "retries": 4}
    assert (output.retried, output.remote()["attempts"]) == ({"other": 4}, 8)
    again = evaluation(journal, {"even": even}, engine=Tired(lambda request: "x"), error_budget=1.0)
    assert (await again.run(EXAMPLES, phase="eval")).calls == output.calls, "as it is in the journal"
