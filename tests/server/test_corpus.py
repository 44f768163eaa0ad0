"""Whatever is sent to a server, it is neither a failure of the server's nor its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.corpus import gateway_cases, play, server_cases, some
from tests.server.process import ServerProcess


@pytest.mark.parametrize(
    "cases",
    [
        lambda: some(gateway_cases("tiny"), 24),
        lambda: some(server_cases("tiny"), 6),
        pytest.param(lambda: gateway_cases("tiny") + server_cases("tiny"), marks=pytest.mark.slow),
    ],
    ids=["gateway", "server", "all"],
)
def test_no_request_makes_a_server_fail(model: Path, tmp_path: Path, cases) -> None:
    with ServerProcess(model, tmp_path) as server, server.http(timeout=60) as http:
        problems, lines = [], 0
        for outcome in play(http, cases()):
            logged = server.log.read_text().count("\n")
            problems += [outcome.problem] if outcome.problem else []
            if logged > lines + 1:
                problems.append(f"{outcome.case.name} at {outcome.case.path}: {logged - lines} lines logged")
            lines = logged
        assert not problems, "\n".join(problems)
        assert http.get("/health").status_code == 200
        answer = server.client().completions.create(model="tiny", prompt="yes", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens
