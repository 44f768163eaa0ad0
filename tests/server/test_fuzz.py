"""Whatever is asked (by a corpus, or schemathesis), the answer is an answer or an error object."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.corpus import find_problem, gateway_cases, server_cases, some
from tests.server.process import ServerProcess
from tests.support import one_quick


@pytest.mark.parametrize(
    "cases",
    one_quick(
        lambda: some(gateway_cases("tiny"), 24) + some(server_cases("tiny"), 6),
        lambda: gateway_cases("tiny") + server_cases("tiny"),
    ),
    ids=["some", "all"],
)
def test_no_request_makes_a_server_fail(model: Path, tmp_path: Path, cases) -> None:
    """A server of its own: a job that a request makes may train on for a while after it."""
    with ServerProcess(model, tmp_path) as server, server.http(timeout=60) as http:
        problems, lines = [], 0
        for case in cases():
            problem = find_problem(http, case)
            problems += [problem] if problem else []
            logged = server.log.read_text().count("\n")
            if logged > lines + 1:
                problems.append(f"{case.name} at {case.path}: {logged - lines} lines logged")
            lines = logged
        assert not problems, "\n".join(problems)
        assert http.get("/health").status_code == 200
        answer = server.client().completions.create(model="tiny", prompt="yes", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens


@pytest.mark.slow
@pytest.mark.parametrize("phases", ["examples,fuzzing", "coverage"])
def test_no_request_of_the_document_makes_the_server_fail(model: Path, tmp_path: Path, phases: str) -> None:
    checks = ["--checks", "not_a_server_error", "--phases", phases]
    # While somebody has stopped the engine, 503 is the right answer.
    checks += ["--exclude-path-regex", "^/engine/", "--max-examples", "15", "--seed", "1"]
    with ServerProcess(model, tmp_path, key="a-key") as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")),
            "run",
            f"{server.address}/openapi.json",
        ]
        command += ["--header", "authorization: Bearer a-key", "--request-timeout", "60", *checks]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Tested: [2-9]\d\b", done.stdout), done.stdout
