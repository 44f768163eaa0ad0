"""The circuit breaker: a model that gives no answers stops the run with the cause, and few calls are made."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.config.component import EvaluatorConfig
from etude.config.load import parse_config
from etude.config.references import LlmRef
from etude.config.registry import register_evaluator
from etude.core.call import ChatRequest, Completion
from etude.core.episode import Example
from etude.core.errors import ImpossibleCall, ModelOut
from etude.core.evaluation import EvaluationRunOutput
from etude.core.interfaces import Engine
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.inference.routes import Breaker
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder
from tests.faults.remote_faults import FaultyEndpoint
from tests.support import ScriptedEngine

ROWS = {"_type": "python", "function": "tests.inference.test_breaker:rows"}
WORK = [Example(f"e{number}", {"question": str(number)}) for number in range(60)]


def rows() -> list[dict[str, Any]]:
    """A config has to have some."""
    return [{"id": "e", "question": "none"}]


@etude.workflow
async def ask(example: etude.Example, episode: etude.Episode) -> str:
    return (await episode.chat([{"role": "user", "content": "hello"}], model="policy")).text


@etude.workflow
async def swallow(example: etude.Example, episode: etude.Episode) -> str:
    """An agent that makes an answer of whatever happens."""
    with contextlib.suppress(Exception):
        return (await episode.chat([{"role": "user", "content": "hello"}], model="policy")).text
    return "I do not know"


@etude.workflow
async def idle(example: etude.Example, episode: etude.Episode) -> str:
    return "nothing was asked"


@etude.evaluator
def length(example: etude.Example, output: str) -> float:
    return float(len(output))


class SwallowingConfig(EvaluatorConfig, name="swallowing_judge"):
    model: LlmRef


@register_evaluator(config_type=SwallowingConfig)
async def swallowing_judge(config: SwallowingConfig, builder: Any) -> AsyncIterator[Any]:
    """A judge that makes a score of whatever happens."""
    engine = await builder.get_llm(config.model)

    @etude.evaluator
    async def judge(example: etude.Example, output: str) -> float:
        with contextlib.suppress(Exception):
            await engine.complete(ChatRequest(({"role": "user", "content": output},)))
        return 0.5

    yield judge


@pytest.fixture
async def endpoint() -> AsyncIterator[FaultyEndpoint]:
    async with FaultyEndpoint().serving() as endpoint:
        yield endpoint


def model_at(url: Any, **fields: Any) -> dict[str, Any]:
    quick = {"retry_wait": 0.001, "max_retry_wait": 0.01, "request_timeout": 20}
    return {"_type": "openai", "model_name": "tiny", "base_url": url, "api_key": "sk-test", **quick, **fields}


async def play(
    folder: Path,
    llms: dict[str, Any],
    workflow: str = "ask",
    judge: Any = None,
    engine: Engine | None = None,
    **general: Any,
) -> EvaluationRunOutput:
    """An evaluation of all the work in a run folder, which may be there already."""
    evaluators: dict[str, Any] = {"length": "tests.inference.test_breaker:length"}
    evaluators |= {"judge": judge} if judge else {}
    config = parse_config(
        {
            "llms": llms,
            "workflow": f"tests.inference.test_breaker:{workflow}",
            "eval": {"general": {"dataset": ROWS, **general}, "evaluators": evaluators},
            "finetuning": {"error_budget": 1.0},
        }
    )
    there = (folder / "run.db").exists()
    with RunFolder.open(folder) if there else RunFolder.create(folder.parent, folder.name) as run:
        engines = None if engine is None else {"policy": engine}
        async with open_runtime(config, run, engines=engines) as runtime:
            return await runtime.evaluation.run(WORK, phase="eval")


CAUSES = {
    "401": "HTTP 401: Incorrect API key .* check its `api_key`, or OPENAI_API_KEY, then resume",
    "closed": "Error.* start the server, or check `base_url`",
}


@pytest.mark.parametrize("fault", CAUSES)
async def test_a_model_that_fails_all_calls_stops_the_run_and_is_gone_on_with_once_mended(
    tmp_path: Path, endpoint: FaultyEndpoint, fault: str
) -> None:
    llms = {"policy": model_at(endpoint.url(fault), max_retries=1)}
    with pytest.raises(ModelOut, match=CAUSES[fault]):
        await play(tmp_path / "run", llms)
    assert endpoint.asked[fault] <= 40
    endpoint.mended = True
    output = await play(tmp_path / "run", llms)
    assert (output.failures, len(output.scores()["length"])) == ({}, len(WORK))


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_an_agent_that_swallows_the_error_is_stopped_too(
    tmp_path: Path, endpoint: FaultyEndpoint, isolation: str
) -> None:
    general = {"runners": 2} if isolation == "process" else {}
    llms = {"policy": model_at(endpoint.url("401"))}
    with pytest.raises(ModelOut, match="Incorrect API key"):
        await play(tmp_path / "run", llms, "swallow", isolation=isolation, **general)
    assert endpoint.asked["401"] <= 40


class Gone(ScriptedEngine):
    """An engine of one's own, which knows by itself that it has no answers."""

    async def complete(self, request: ChatRequest) -> Completion:
        raise ModelOut("the robot's battery is empty")


@pytest.mark.parametrize("isolation", ["none", "process"])
async def test_an_engine_of_ones_own_ends_the_run_by_raising_it(tmp_path: Path, isolation: str) -> None:
    """Where runners play, the head samples from it."""
    general = {"runners": 1} if isolation == "process" else {}
    unused = {"policy": model_at("http://127.0.0.1:9/v1")}
    with pytest.raises(ModelOut, match="battery"):
        await play(tmp_path / "run", unused, "swallow", engine=Gone([]), isolation=isolation, **general)


async def test_a_judge_that_is_out_stops_the_run_also_where_its_errors_are_swallowed(
    tmp_path: Path, endpoint: FaultyEndpoint
) -> None:
    llms = {"policy": model_at(endpoint.url("well")), "judge": model_at(endpoint.url("403"))}
    with pytest.raises(ModelOut, match="HTTP 403: not for you"):
        judge = {"_type": "llm_judge", "model": "judge", "prompt": "Is it good?"}
        await play(tmp_path / "run", llms, judge=judge)
    with pytest.raises(ModelOut, match="HTTP 403: not for you"):
        judge = {"_type": "swallowing_judge", "model": "judge"}
        await play(tmp_path / "other", llms, "idle", judge=judge)
    assert endpoint.asked["403"] <= 80


async def test_a_model_that_hangs_is_found_when_episodes_run_out_of_time(
    tmp_path: Path, endpoint: FaultyEndpoint
) -> None:
    """As calls do that were given up after an attempt that had no answer in time."""
    llms = {"policy": model_at(endpoint.url("hang"), request_timeout=0.5)}
    with pytest.raises(ModelOut, match=r"no answer within 0\.5 s; .*raise `request_timeout`"):
        await play(tmp_path / "run", llms, timeout=1.0)
    assert endpoint.asked["hang"] <= 40


async def test_of_several_addresses_all_have_to_be_out(tmp_path: Path, endpoint: FaultyEndpoint) -> None:
    one_is_well = model_at([endpoint.url("401"), endpoint.url("well")])
    assert (await play(tmp_path / "one", {"policy": one_is_well})).failures == {}
    none_is_well = model_at([endpoint.url("401"), endpoint.url("404")])
    with pytest.raises(ModelOut, match=r"2 addresses: .*(401|404).*(401|404)"):
        await play(tmp_path / "two", {"policy": none_is_well})


async def test_calls_whose_requests_are_at_fault_say_nothing_of_the_model(endpoint: FaultyEndpoint) -> None:
    engine = OpenAiEngine(OpenAiLlmConfig(model_name="tiny", base_url=endpoint.url("400"), stop_after=1))
    for _ in range(3):
        with pytest.raises(ImpossibleCall):
            await engine.complete(ChatRequest(({"role": "user", "content": "x"},)))
    await engine.close()


def test_failures_are_counted_by_their_causes_until_a_call_is_answered() -> None:
    breaker = Breaker(3)
    for cause in ("http_500", "http_500", "timeout", "timeout"):
        assert breaker.failed(cause, "no") is None
    breaker.answered()
    assert breaker.failed("http_500", "no") is None
    breaker.require_closed()
    assert Breaker(None).failed("http_401", "no") is None
