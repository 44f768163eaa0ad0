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
        ({"temperature": -0.1}, "temperature: Input should be greater than or equal to 0, found -0.1"),
        ({"temperature": True}, "temperature: Input should be a valid number, found True"),
        ({"temperature": float("nan")}, "temperature: Input should be a finite number"),
        ({"stop": [""]}, r"stop: .*, found \[''\]"),
        ({"stop": 3}, "stop: Input should be a valid string, found 3"),
        ({"top_z": 3}, "'top_z' is not a sampling parameter; allowed: temperature, top_p"),
    ],
)
def test_impossible_values_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change_sampling(Sampling(), changes)
