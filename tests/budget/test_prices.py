"""The prices of tokens, as the config has them."""

from __future__ import annotations

from typing import Any

import pytest

from etude.budget.ledger import prices_of, require_bounded, unpriced
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
    assert price.of_call(usage, version) == pytest.approx(usd, rel=1e-12)


def test_a_limit_in_usd_needs_the_price_of_every_remote_model():
    stranger = {"model_name": "stranger", "base_url": "https://models.example/v1"}
    assert unpriced(config(stranger)) == ["policy"]
    require_bounded(config(stranger, budget={"tokens": 1000}))
    with pytest.raises(RequestError, match=r"budget\.usd is set.*llms\.policy\.prices: \{prompt"):
        require_bounded(config(stranger, budget={"usd": 1}))
    with pytest.raises(RequestError, match=r"llms\.policy\.budget\.usd is set"):
        require_bounded(config({**stranger, "budget": {"usd": 1}}))
    assert unpriced(config({})) == ["policy"]
    require_bounded(config({**stranger, "prices": {"prompt": 0, "completion": 0}}, budget={"usd": 1}))


def test_a_limit_needs_to_know_how_long_an_answer_can_get():
    with pytest.raises(RequestError, match=r"budget\.tokens is set.*set llms\.policy\.max_tokens"):
        require_bounded(config({"max_tokens": None}, budget={"tokens": 1000}))
