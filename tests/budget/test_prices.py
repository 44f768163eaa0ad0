"""The prices of tokens: by the config, and by the list in the package."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from etude.budget.prices import prices_of, read_prices, require_bounded, unpriced
from etude.config.load import parse_config
from etude.core.call import Usage
from etude.core.errors import RequestError


def config(policy: dict[str, Any], **changes: Any) -> Any:
    llms = {"policy": {"_type": "openai", "model_name": "gpt-4o-mini", "max_tokens": 10, **policy}}
    return parse_config({"llms": llms, **changes})


@pytest.mark.parametrize(
    ("prices", "usage", "version", "usd"),
    [
        ({"prompt": 2.0, "completion": 8.0}, Usage(1_000_000, 1_000_000), 0, 10.0),
        ({"prompt": 2.0, "completion": 8.0}, Usage(1_000_000, 0, 400_000), 0, 2.0),
        ({"prompt": 2.0, "completion": 8.0, "cached": 0.5}, Usage(1_000_000, 0, 400_000), 0, 1.4),
        ({"prompt": 2.0, "completion": 8.0, "cached": 0.0}, Usage(300, 20, 100), 0, 0.00056),
        ({"prompt": 2.0, "completion": 8.0}, Usage(300, 20), 3, 0.00076),
        (
            {"prompt": 2.0, "completion": 8.0, "fine_tuned": {"prompt": 4.0, "completion": 16.0}},
            Usage(300, 20),
            3,
            0.00152,
        ),
    ],
)
def test_a_call_costs_what_a_table_by_hand_says(prices, usage, version, usd):
    price = prices_of(config({"prices": prices}))["policy"]
    assert price.usd(usage, version) == pytest.approx(usd, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "prompt"),
    [
        ("gpt-4o-mini", 0.15),
        ("gpt-4o-mini-2024-07-18", 0.15),
        ("gpt-4o", 2.5),
        ("gpt-4o-2024-05-13", 5.0),
        ("ft:gpt-4o-mini-2024-07-18:org::abc", 0.3),
        ("ft:gpt-4.1-2025-04-14:org::abc", None),
        ("gpt-5-pro", None),
        ("gpt-3.5-turbo-16k", None),
    ],
)
def test_a_model_has_the_entry_of_its_name_with_or_without_a_date(model, prompt):
    price = prices_of(config({"model_name": model})).get("policy")
    assert (None if price is None else price.base.prompt) == prompt


def test_every_price_of_the_list_has_its_date_and_its_source():
    for provider in read_prices().values():
        assert provider.page.startswith("https://")
        for name, entry in provider.models.items():
            year, month, *day = map(int, entry.date.split("-"))
            assert datetime.date(year, month, *(day or [1])).year >= 2024, name
            assert entry.source.startswith("https://"), name


def test_a_limit_in_usd_needs_the_price_of_every_remote_model():
    stranger = {"model_name": "stranger", "base_url": "https://models.example/v1"}
    assert unpriced(config(stranger)) == ["policy"]
    require_bounded(config(stranger, budget={"tokens": 1000}))
    with pytest.raises(RequestError, match=r"budget\.usd is set.*llms\.policy\.prices: \{prompt"):
        require_bounded(config(stranger, budget={"usd": 1}))
    with pytest.raises(RequestError, match=r"llms\.policy\.budget\.usd is set"):
        require_bounded(config({**stranger, "budget": {"usd": 1}}))
    require_bounded(config({**stranger, "prices": {"prompt": 0, "completion": 0}}, budget={"usd": 1}))


def test_a_limit_needs_to_know_how_long_an_answer_can_get():
    with pytest.raises(RequestError, match=r"budget\.tokens is set.*set llms\.policy\.max_tokens"):
        require_bounded(config({"max_tokens": None}, budget={"tokens": 1000}))
