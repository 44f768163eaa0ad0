from __future__ import annotations

from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.server.guard import RateLimit
from tests.server.process import ServerProcess


def test_a_bucket_holds_a_minutes_requests_and_fills_evenly() -> None:
    limit = RateLimit(6)
    assert [limit.wait("a", 0.0) for _ in range(7)] == [0, 0, 0, 0, 0, 0, 10]
    assert limit.wait("a", 9.0) == pytest.approx(1)
    assert limit.wait("a", 10.0) == 0
    assert limit.wait("b", 10.0) == 0, "another client has a bucket of its own"


@given(st.integers(1, 100), st.lists(st.floats(0, 5), max_size=200))
def test_no_minute_has_more_than_a_full_bucket_and_a_minutes_worth(rate: int, gaps: list[float]) -> None:
    limit, now, let_in = RateLimit(rate), 0.0, []
    for gap in gaps:
        now += gap
        if limit.wait("a", now) == 0:
            let_in.append(now)
    for start in let_in:
        assert sum(start <= time < start + 60 for time in let_in) <= 2 * rate + 1


def test_memory_has_a_bound() -> None:
    limit = RateLimit(1)
    for number in range(25_000):
        assert limit.wait(str(number), number / 1e6) == 0
    assert len(limit._buckets) <= 10_000


def test_too_many_requests_are_told_when_to_come_back(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "--requests-per-minute", "1") as server:
        server.client().models.list()
        with pytest.raises(openai.RateLimitError) as refused:
            server.client().models.list()
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        assert refused.value.code == "rate_limit_exceeded"
        with server.http() as http:
            assert http.get("/health").status_code == 200, "who looks after the server is not counted"
