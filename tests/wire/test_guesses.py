from __future__ import annotations

import pytest

from etude.wire.api_error import ApiError
from etude.wire.guesses import Guesses, shown_key

KEY = "sk-right"


def status(guesses: Guesses, key: str, now: float, client: str = "10.0.0.1") -> int:
    try:
        guesses.check(client, key, KEY, now=now)
    except ApiError as error:
        return error.status_code
    return 200


def test_a_key_can_be_guessed_a_few_times_a_minute() -> None:
    guesses = Guesses()
    assert [status(guesses, f"wrong-{number}", number) for number in range(10)] == [401] * 8 + [429] * 2
    # Not even that it is right: otherwise a guess would tell.
    assert status(guesses, KEY, 10) == 429
    assert status(guesses, KEY, 10, client="10.0.0.2") == 200
    with pytest.raises(ApiError) as caught:
        guesses.check("10.0.0.1", KEY, KEY, now=10)
    assert caught.value.headers == {"retry-after": "50"}
    assert status(guesses, KEY, 61) == 200


def test_a_client_that_is_only_mistaken_locks_nobody_out() -> None:
    guesses = Guesses()
    assert {status(guesses, "old", second) for second in range(50)} == {401}
    assert {status(guesses, "", second) for second in range(50)} == {401}
    assert status(guesses, KEY, 50) == 200


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer  a b "}, "a b"),
        ({"authorization": "Basic YW55OmtleQ=="}, "key"),
        ({"authorization": "Basic ?"}, ""),
        ({"x-api-key": "key"}, "key"),
        ({}, ""),
    ],
)
def test_where_a_key_is_shown(headers: dict[str, str], key: str) -> None:
    assert shown_key(headers) == key
