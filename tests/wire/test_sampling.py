from __future__ import annotations

import pytest

from etude.core.call import Sampling
from etude.core.errors import RequestError
from etude.wire.sampling import change_sampling


def test_what_is_given_changes_and_the_rest_stays() -> None:
    base = Sampling(temperature=0.7, max_tokens=10, seed=3)
    assert change_sampling(base, {}) is base
    assert change_sampling(base, {"temperature": None}) is base
    changed = change_sampling(base, {"temperature": 0, "stop": "x", "top_p": 0.5, "max_tokens": 5, "seed": 0})
    assert changed == Sampling(0.0, 0.5, 5, ("x",), 0)
    assert change_sampling(base, {"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number of at least 0, found -0.1"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be a number of more than 0 and at most 1, found 0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer"),
        ({"seed": "1"}, "seed must be an integer"),
        ({"stop": [""]}, "stop must be a text or a list of texts"),
        ({"stop": 3}, "stop must be a text or a list of texts"),
        ({"top_k": 3}, "'top_k' is not a sampling parameter; allowed: temperature, top_p"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change_sampling(Sampling(), changes)
