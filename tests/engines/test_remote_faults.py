"""Every fault of a model's endpoint, over sockets, and the breaker that stops a run without a model."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etude
from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion
from etude.core.episode import Example
from etude.core.errors import EngineError, ErrorBudgetExceeded, ImpossibleCall
from etude.core.evaluation import EvaluationRunOutput
from etude.engines import openai_compatible
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder
from etude.wire.retries import USUAL, count_retries
from tests.remote_faults import FAULTS, LOGPROBS, Fault, FaultyEndpoint, completion, reply, sends
from tests.support import pass_time, until

PASSING = [name for name, fault in FAULTS.items() if fault.kind in ("temporary", "slow")]


@pytest.fixture
async def endpoint() -> AsyncIterator[FaultyEndpoint]:
    async with FaultyEndpoint().serving() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_compatible, "USUAL", replace(USUAL, first_wait=0.001, longest_wait=0.01))


async def complete(url: str, **fields: Any) -> Completion:
    """The answer to one call at an address."""
    settings: dict[str, Any] = {
        "model_name": "tiny",
        "base_url": url,
        "api_key": "sk-test",
        "return_token_ids": True,
        "request_timeout": 600,
    }
    engine = OpenAiEngine(OpenAiLlmConfig.model_validate(settings | fields))
    try:
        return await engine.complete(ChatRequest(({"role": "user", "content": "hello"},)))
    finally:
        await engine.close()


async def test_each_fault_that_passes_is_got_over_by_one_more_attempt(endpoint: FaultyEndpoint) -> None:
    async def got_over(fault: str) -> tuple[Completion, Counter[str]]:
        with count_retries() as count:
            answer = await complete(endpoint.url(fault, once="x"))
        return answer, count.causes

    faults = [name for name in PASSING if FAULTS[name].kind == "temporary"]
    async with asyncio.timeout(60):
        outcomes = await asyncio.gather(*map(got_over, faults))
    assert [causes.total() for _, causes in outcomes] == [1] * len(faults)
    causes = sum((causes for _, causes in outcomes), Counter[str]())
    assert causes["http_429"] == sum(name.startswith("429") for name in faults)
    assert {"connection", "malformed", "too_large"} <= causes.keys()
    assert {answer.logprobs for answer, _ in outcomes} == {LOGPROBS}
    assert {endpoint.asked[fault] for fault in faults} == {2}


async def test_each_fault_that_stays_is_a_failed_call_that_says_what_it_was(endpoint: FaultyEndpoint) -> None:
    async def find_error(fault: str) -> BaseException | None:
        try:
            await complete(endpoint.url(fault), max_retries=1)
        except EngineError as error:
            return error
        return None

    slow = [name for name, fault in FAULTS.items() if fault.kind == "slow"]
    async with asyncio.timeout(60):
        errors = {name: await find_error(name) for name in FAULTS.keys() - slow}
    failing = asyncio.gather(*map(find_error, slow))
    for attempt in (1, 2):
        await until(lambda count=attempt: {endpoint.asked[name] for name in slow} == {count})
        pass_time(600)
    errors |= dict(zip(slow, await failing, strict=True))
    assert {name: error for name, error in errors.items() if FAULTS[name].words not in str(error)} == {}
    impossible = {name for name, error in errors.items() if isinstance(error, ImpossibleCall)}
    assert impossible == {name for name, fault in FAULTS.items() if fault.kind == "impossible"}
    assert endpoint.asked == {name: 2 if name in PASSING else 1 for name in FAULTS}


@pytest.mark.parametrize("fault", ["gzip-bomb", "endless", "large"])
async def test_an_answer_without_end_takes_little_memory(endpoint: FaultyEndpoint, fault: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match="larger than 32 MB"):
            await complete(endpoint.url(fault), max_retries=0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 48 * 2**20


async def test_compressed_answers_are_read(endpoint: FaultyEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps(completion()).encode()
    halves = gzip.compress(good[:50]) + gzip.compress(good[50:])
    for encoding, data in {"gzip": halves, "deflate": zlib.compress(good)}.items():
        answer = Fault("temporary", sends(reply(200, data, {"content-encoding": encoding})), "")
        monkeypatch.setitem(FAULTS, "zipped", answer)
        assert (await complete(endpoint.url("zipped"))).logprobs == LOGPROBS


@etude.evaluator
def length(example: etude.Example, output: str) -> float:
    return float(len(output))


async def test_plain_http_behind_https() -> None:
    async with FaultyEndpoint().serving() as endpoint:
        with pytest.raises(EngineError, match=r"plain HTTP, .* http:// .* https:// .*SSL_CERT_FILE"):
            await complete(endpoint.url("well").replace("http://", "https://"), max_retries=0)


ROWS = {"_type": "python", "function": "tests.engines.test_remote_faults:rows"}
WORK = [Example(f"e{number}", {"question": str(number)}) for number in range(50)]


def rows() -> list[dict[str, Any]]:
    """A config has to have some."""
    return [{"id": "e", "question": "none"}]


@etude.workflow
async def ask(example: etude.Example, episode: etude.Episode) -> str:
    return (await episode.chat([{"role": "user", "content": "hello"}], model="policy")).text


async def play(folder: Path, llms: dict[str, Any], *, error_budget: float = 1.0) -> EvaluationRunOutput:
    """An evaluation of all the work in a run folder, which may be there already."""
    config = parse_config(
        {
            "llms": llms,
            "workflow": f"{__name__}:ask",
            "eval": {"general": {"dataset": ROWS}, "evaluators": {"length": f"{__name__}:length"}},
            "finetuning": {"error_budget": error_budget},
        }
    )
    there = (folder / "run.db").exists()
    with RunFolder.open(folder) if there else RunFolder.create(folder.parent, folder.name) as run:
        async with open_runtime(config, run) as runtime:
            return await runtime.evaluation.run(WORK, phase="eval")


CAUSES = {
    "401": "HTTP 401: Incorrect API key .* check its `api_key`, or OPENAI_API_KEY",
    "closed": "Error.* `base_url`",
}


@pytest.mark.parametrize("fault", CAUSES)
async def test_a_model_that_fails_all_calls_stops_the_run_and_is_gone_on_with_once_mended(
    tmp_path: Path, endpoint: FaultyEndpoint, fault: str
) -> None:
    settings = {"model_name": "tiny", "base_url": endpoint.url(fault), "api_key": "sk-test"}
    llms = {"policy": {"_type": "openai", "request_timeout": 20, "max_retries": 1} | settings}
    with pytest.raises(ErrorBudgetExceeded, match=CAUSES[fault]):
        await play(tmp_path / "run", llms, error_budget=0.2)
    assert endpoint.asked[fault] <= 80
    endpoint.mended = True
    output = await play(tmp_path / "run", llms)
    assert (output.failures, len(output.scores()["length"])) == ({}, len(WORK))
