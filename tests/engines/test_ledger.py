"""The ledger: prices, the meter of every call, sums by hand, room held for jobs, and the end of it."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from etude.backends.openai_jobs import OpenAiAdapter, OpenAiAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion, Sampling, Usage
from etude.core.errors import EngineError, RequestError
from etude.core.job import TrainingJobRef
from etude.engines.ledger import Ledger, find_prices, load_bill, require_bounded, unpriced_models
from etude.engines.meter import MeteredEngine, Purpose, asking_for, most_tokens
from etude.groups.model_jobs import ModelJobs
from etude.rollout.phases import collecting_for, current_number
from etude.store.journal import Journal, ModelLog
from etude.wire.retries import note_charged
from tests.backends.openai_stand_in import BASE, StandIn
from tests.backends.test_openai_jobs import imitations
from tests.support import EchoEngine

TRAIN, JUDGE = Purpose("agent", "train/1"), Purpose("judge", "train/1")
PRICES = {"prompt": 2.0, "cached": 0.5, "completion": 8.0, "training": 25.0}


def limits(data: dict[str, Any]) -> dict[str, Any]:
    config = parse_config(data)
    return {"llms": config.llms, "budget": config.budget}


def config(**changes: Any) -> dict[str, Any]:
    model = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1/v1", "max_tokens": 10}
    llms = {"policy": {**model, "prices": PRICES}, "free": model}
    for name, more in changes.pop("llms", {}).items():
        llms[name] = {**llms[name], **more}
    return limits({"llms": llms, **changes})


async def is_stuck(task: asyncio.Future[Any]) -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_the_bill_is_that_of_a_table_by_hand(journal: Journal):
    ledger = Ledger(journal, **config())
    await ledger.settle(None, "policy", TRAIN, Usage(1000, 100, 400))
    await ledger.settle(None, "policy", TRAIN, Usage(2000, 200))
    await ledger.settle(None, "policy", JUDGE, Usage(500, 50))
    await ledger.settle(None, "free", Purpose("agent", "train/2"), Usage(300, 30))
    await ledger.begin_job("policy", "run-epoch-1", 40_000)
    ledger.end_job("policy", "run-epoch-1", 30_000)
    lines = {(line.model, line.role, line.phase): line for line in ledger.bill.lines}
    agent = lines["policy", "agent", "train/1"]
    assert (agent.calls, agent.prompt_tokens, agent.cached_tokens, agent.completion_tokens) == (
        2,
        3000,
        400,
        300,
    )
    # (600·2 + 400·0.5 + 100·8) + (2000·2 + 200·8), in millionths
    assert agent.usd == pytest.approx((1200 + 200 + 800 + 4000 + 1600) / 1e6)
    assert lines["policy", "judge", "train/1"].usd == pytest.approx((1000 + 400) / 1e6)
    assert lines["free", "agent", "train/2"].unpriced_tokens == 330
    assert lines["policy", "training", "run-epoch-1"].usd == pytest.approx(0.75)
    assert ledger.bill.total.usd == pytest.approx(0.75 + 0.0078 + 0.0014)
    assert ledger.bill.total.tokens == 3300 + 550 + 330 + 30_000
    assert [line.usd for line in ledger.bill.by("role")] == [agent.usd, 0.0014, 0.75]
    await journal.flush()
    assert load_bill(journal).total == ledger.bill.total


async def test_a_ledger_that_is_opened_again_goes_on_where_it_was(journal: Journal):
    await Ledger(journal, **config()).settle(None, "policy", TRAIN, Usage(1000, 100))
    await journal.flush()
    again = Ledger(journal, **config(budget={"tokens": 10_000}))
    assert again.limits[0].used == 1100
    await again.settle(None, "policy", TRAIN, Usage(1000, 100))
    assert again.bill.total.tokens == 2200


async def test_calls_wait_for_room_and_the_run_stops_when_none_can_come(journal: Journal):
    ledger = Ledger(journal, **config(budget={"tokens": 1000}))
    stops: list[str] = []
    ledger.on_reached = lambda: stops.append(str(ledger.reached))
    first = await ledger.hold("policy", Usage(500, 100))
    second = asyncio.ensure_future(ledger.hold("policy", Usage(400, 100)))
    assert await is_stuck(second) and not stops
    await ledger.settle(first, "policy", TRAIN, Usage(100, 50))
    number = await second
    third = asyncio.ensure_future(ledger.hold("free", Usage(400, 100)))
    assert await is_stuck(third) and not stops
    await ledger.settle(number, "policy", TRAIN, Usage(400, 100))
    assert await is_stuck(third)
    assert re.fullmatch(r"budget\.tokens is 1,000 tokens: 650 tokens .* 500 tokens", "\n".join(stops))
    assert ledger.reached is not None and ledger.reached.override == "budget.tokens=2000"
    assert await is_stuck(asyncio.ensure_future(ledger.hold("free", Usage(1, 1)))), "nothing begins after it"
    third.cancel()


async def test_a_job_for_which_there_is_no_room_is_not_begun(journal: Journal):
    ledger = Ledger(journal, **config(budget={"usd": 1.0}))
    await ledger.begin_job("policy", "one", 30_000)
    await ledger.begin_job("policy", "one", 30_000)
    assert ledger.bill.total.usd == pytest.approx(0.75), "once for each name"
    second = asyncio.ensure_future(ledger.begin_job("policy", "two", 20_000))
    assert await is_stuck(second)
    assert re.search(r"job two .* \$0\.50", str(ledger.reached))
    second.cancel()


async def test_hours_are_those_of_all_processes_of_the_run(journal: Journal):
    clock = [0.0]
    changes = {"budget": {"hours": 1.0}}
    ledger = Ledger(journal, **config(**changes), clock=lambda: clock[0])
    clock[0] = 1800.0
    ledger.tick()
    assert ledger.reached is None
    await journal.flush()
    again = Ledger(journal, **config(**changes), clock=lambda: clock[0])
    clock[0] += 1799.0
    again.tick()
    assert again.reached is None
    clock[0] += 1.0
    again.tick()
    assert str(again.reached) == "budget.hours is 1 hours: 1 hours are used"
    assert again.bill.seconds == 3600


def with_price(policy: dict[str, Any], **changes: Any) -> dict[str, Any]:
    llms = {"policy": {"_type": "openai", "model_name": "gpt-4o-mini", "max_tokens": 10, **policy}}
    return limits({"llms": llms, **changes})


@pytest.mark.parametrize(
    ("prices", "usage", "usd"),
    [
        ({"prompt": 2.0, "completion": 8.0}, Usage(1_000_000, 1_000_000, 400_000), 10.0),
        ({"prompt": 2.0, "completion": 8.0, "cached": 0.5}, Usage(1_000_000, 0, 400_000), 1.4),
    ],
)
def test_a_call_costs_what_a_table_by_hand_says(prices, usage, usd):
    price = find_prices(with_price({"prices": prices})["llms"])["policy"]
    assert price.call_price(usage) == pytest.approx(usd, rel=1e-12)


def test_a_limit_in_usd_needs_the_price_of_every_remote_model():
    stranger = {"model_name": "stranger", "base_url": "https://models.example/v1"}
    assert unpriced_models(with_price(stranger)["llms"]) == ["policy"]
    require_bounded(**with_price(stranger, budget={"tokens": 1000}))
    with pytest.raises(RequestError, match=r"budget\.usd is set.*llms\.policy\.prices: \{prompt"):
        require_bounded(**with_price(stranger, budget={"usd": 1}))
    assert unpriced_models(with_price({})["llms"]) == ["policy"]
    require_bounded(**with_price({**stranger, "prices": {"prompt": 0, "completion": 0}}, budget={"usd": 1}))


def test_a_limit_needs_to_know_how_long_an_answer_can_get():
    with pytest.raises(RequestError, match=r"budget\.tokens is set.*set llms\.policy\.max_tokens"):
        require_bounded(**with_price({"max_tokens": None}, budget={"tokens": 1000}))


REQUEST = ChatRequest(({"role": "user", "content": "What is 2 + 2?"},))
LLMS = parse_config(
    {
        "llms": {
            "policy": {"_type": "openai", "model_name": "m", "max_tokens": 30},
            "older": {"_type": "opponents", "of": "policy"},
        },
        "finetuning": {"target_model": "policy"},
    }
).llms


class Engine:
    """Takes 10 tokens to read and 5 to answer, and 7 before that for nothing."""

    version = 2

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.fails = False

    async def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        note_charged(Usage(6, 1))
        if self.fails:
            raise EngineError("no answer")
        return Completion({"role": "assistant", "content": "4"}, usage=Usage(10, 5, 4), model_version=2)

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        return (0.0,) * len(ids)


class Account:
    """Writes down what it is told."""

    def __init__(self, *, reserves_calls: bool = False) -> None:
        self.reserves_calls = reserves_calls
        self.held: list[Usage] = []
        self.settled: list[Any] = []

    async def hold(self, model: str, most: Usage) -> int:
        self.held.append(most)
        return len(self.held)

    async def settle(self, number: Any, model: str, purpose: Purpose, usage: Usage) -> None:
        self.settled.append((number, model, purpose, usage))


async def test_a_call_is_counted_for_whom_it_was_made_with_what_it_cost_before_it_was_answered():
    account = Account()
    engine = MeteredEngine("policy", Engine(), account, LLMS)
    with asking_for("judge", "validation/5/t1/0"):
        await engine.complete(REQUEST)
    with asking_for("teacher", "train/3.2/t1/0"):
        assert await engine.score([1, 2, 3]) == (0.0, 0.0, 0.0)
    with collecting_for("train", 2):  # From 0, and outside of episodes.
        await engine.complete(REQUEST)
        assert (current_number("train"), current_number("validation")) == (2, None)
    await engine.complete(REQUEST)
    usage = Usage(16, 6, 4)
    assert account.settled == [
        (None, "policy", Purpose("judge", "validation/5"), usage),
        (None, "policy", Purpose("teacher", "train/3"), Usage(3, 1)),
        (None, "policy", Purpose("other", "train/3"), usage),
        (None, "policy", Purpose("other", ""), usage),
    ]


async def test_opponents_are_opponents_for_every_caller():
    account = Account()
    with asking_for("agent", "train/1/t1/0"):
        await MeteredEngine("older", Engine(), account, LLMS).complete(REQUEST)
    assert account.settled[0][2] == Purpose("opponent", "train/1")


async def test_where_calls_are_bounded_an_answer_has_the_configs_longest():
    engine, account = Engine(), Account(reserves_calls=True)
    await MeteredEngine("policy", engine, account, LLMS).complete(REQUEST)
    assert engine.requests[0].sampling.max_tokens == 30
    assert account.held[0].completion_tokens == 30
    assert account.settled[0][0] == 1


@pytest.mark.parametrize("text", ["What is 2 + 2?", "日本語のテキスト", "\x00\x01\x02", "a" * 5000])
def test_a_prompt_has_no_more_tokens_than_bytes(text: str):
    tokenizer = pytest.importorskip("etude.models.tiny").build_tokenizer(["t0?"], splits=[])
    most = most_tokens(ChatRequest(({"role": "user", "content": text},), sampling=Sampling(max_tokens=7)))
    assert most.prompt_tokens >= len(tokenizer(text)["input_ids"])
    assert most.completion_tokens == 7
    assert most_tokens(ChatRequest((), prompt=(1, 2, 3))).prompt_tokens == 3


async def open_jobs(server: StandIn, journal: Journal, ledger: Ledger) -> ModelJobs:
    adapter = OpenAiAdapter(OpenAiAdapterConfig(hyperparameters={"n_epochs": 2}), server.client(), BASE)
    await adapter.initialize(FinetuneConfig())
    line = ModelJobs("policy", adapter, EchoEngine(), ModelLog(journal), ledger=ledger)
    await line.take_up(None)
    return line


async def test_a_job_counts_as_the_most_it_may_train_on_and_then_as_the_api_says(journal: Journal):
    priced = {"model_name": BASE, "prices": {"prompt": 1, "completion": 1, "training": 25.0}}
    server, ledger = StandIn(), Ledger(journal, **with_price(priced, budget={"usd": 1.0}))
    line = await open_jobs(server, journal, ledger)
    data = imitations()
    tokens = line.adapter.charged_tokens(data)
    ref = await line.submit(data)
    assert isinstance(ref, TrainingJobRef)
    assert ledger.bill.total.usd == pytest.approx(tokens * 25 / 1e6)
    await line.wait(ref, 30.0, 0.01)
    [job] = ledger.bill.lines
    assert (job.role, job.phase) == ("training", data.run_id)
    trained = server.jobs["ftjob-0"]["trained_tokens"]
    assert 0 < trained == job.trained_tokens
    assert job.usd == pytest.approx(trained * 25 / 1e6)
