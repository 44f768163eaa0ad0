"""The one policy of retries: full jitter, deadlines, and a server's word within reason."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.errors import ModelOut
from etude.wire.retries import (
    Again,
    RetryPolicy,
    counting_retries,
    ending_where_a_model_is_out,
    is_worth_retrying,
    note_model_out,
    note_retry,
    retried,
    retry_after,
)


@given(st.integers(1, 10**6), st.integers())
def test_a_wait_is_any_time_up_to_a_bound_that_doubles(number: int, seed: int) -> None:
    policy = RetryPolicy(first_wait=0.5, longest_wait=30.0)
    most = min(30.0, 0.5 * 2.0 ** min(number - 1, 60))
    assert 0 <= policy.wait(number, None, random.Random(seed)) <= most


@given(st.floats(0, 1e9))
def test_a_servers_word_goes_first_up_to_the_longest_wait(asked: float) -> None:
    wait = RetryPolicy(first_wait=0.5, longest_wait=30.0).wait(1, asked, random.Random(1))
    assert min(asked, 30.0) <= wait <= min(asked + 0.5, 30.0)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0.5", 0.5),
        ("-3", 0.0),
        ("1e300", 3600.0),
        ("inf", 3600.0),
        ("soon", None),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Fri, 31 Dec 99999999999 23:59:59 GMT", 3600.0),
        ("Fri, 31 Dec 10000 23:59:59 GMT", None),
    ],
)
def test_retry_after_is_taken_as_far_as_it_can_be_meant(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}) == seconds


def test_dates_and_milliseconds_are_understood() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=2000), usegmt=True)
    assert retry_after({"retry-after": soon}) == pytest.approx(2000, abs=60)
    assert retry_after({"retry-after-ms": "250", "retry-after": "1"}) == 0.25
    assert retry_after({}) is None


def test_what_may_do_better_later() -> None:
    tried = {status for status in range(200, 600) if is_worth_retrying(status)}
    assert tried == {408, 409, 425, 429} | (set(range(500, 600)) - {501, 505})


class Flaky:
    """Fails so often, and then answers."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts = 0

    async def __call__(self) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise ConnectionError(f"attempt {self.attempts}")
        return "well"


def lost(error: Exception) -> Again | None:
    return Again("connection") if isinstance(error, ConnectionError) else None


async def test_each_retry_is_counted_by_its_cause_with_the_time_waited() -> None:
    flaky = Flaky(2)
    with counting_retries() as count:
        assert await retried(flaky, lost, RetryPolicy(first_wait=0.01)) == "well"
    assert (flaky.attempts, count.causes, count.retries) == (3, {"connection": 2}, 2)
    assert 0 < count.waited <= 0.03


@pytest.mark.parametrize("policy", [RetryPolicy(retries=1), RetryPolicy(retries=9, deadline=0.0)])
async def test_attempts_and_time_are_limited(policy: RetryPolicy) -> None:
    flaky = Flaky(100)
    with pytest.raises(ConnectionError, match=r"attempt (1|2)$"):
        await retried(flaky, lost, RetryPolicy(policy.retries, 0.01, 0.01, policy.deadline))
    assert flaky.attempts == min(policy.retries + 1, 2) - (policy.deadline == 0.0)


async def test_what_no_attempt_mends_is_raised_at_once() -> None:
    async def wrong() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"), counting_retries() as count:
        await retried(wrong, lost)
    assert count.retries == 0


@pytest.mark.parametrize("swallows", [True, False])
def test_a_model_that_is_out_ends_the_block_whatever_is_made_of_the_error(swallows: bool) -> None:
    raised = pytest.raises(ModelOut, match="wrong key")
    with counting_retries() as outside, raised, ending_where_a_model_is_out():
        note_retry("timeout", 1.5)
        note_model_out(ModelOut("wrong key"))
        if not swallows:
            raise ValueError("made of it")
    assert (outside.causes, outside.waited) == ({"timeout": 1}, 1.5)
