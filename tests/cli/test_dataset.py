"""`etude dataset buggify`, against an endpoint on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.projects import etude

RIGHT = "n = int(input())\nprint(n * 2)"
WRONG = "n = int(input())\nprint(n * 2 if n < 4 else n ** 2)"


class Endpoint(ThreadingHTTPServer):
    """Answers every request with a program in a code block."""

    requests = 0
    status = 200


class Answering(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests += 1
        message = {"role": "assistant", "content": f"```python\n{WRONG}\n```"}
        body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not in the output of the tests."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def apps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tests = json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]})
    row = {"question": "Double.", "solutions": json.dumps([RIGHT]), "input_output": tests}
    rows = [{"problem_id": 1, **row}, {"problem_id": 2, **row}, {"problem_id": 3, **row, "input_output": ""}]
    Path("apps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return tmp_path


def buggify(endpoint: Endpoint, *options: str):
    url = f"http://127.0.0.1:{endpoint.server_address[1]}/v1"
    return etude(
        "dataset",
        "buggify",
        "apps.jsonl",
        "--out",
        "made/buggy.jsonl",
        "--model",
        "m",
        "--base-url",
        url,
        *options,
    )


def test_wrong_programs_are_written_and_nothing_is_paid_for_twice(apps: Path, endpoint: Endpoint):
    result = buggify(endpoint)
    assert result.exit_code == 0, result.output
    assert "wrote           2 problems to made/buggy.jsonl" in result.stdout
    assert "it has no tests" in result.stdout
    assert 'dataset: {_type: buggy_apps, file_path: "made/buggy.jsonl"}' in result.stdout.splitlines()[-1]
    rows = [json.loads(line) for line in Path("made/buggy.jsonl").read_text().splitlines()]
    assert [row["buggy_solutions"][0]["solution"] for row in rows] == [WRONG + "\n"] * 2
    assert endpoint.requests == 2
    again = buggify(endpoint, "--json")
    assert json.loads(again.stdout.splitlines()[-1])["left_out"] == {"it has no tests": 1}
    assert endpoint.requests == 2


def test_an_endpoint_that_refuses_is_told_with_what_to_do_next(apps: Path, endpoint: Endpoint):
    endpoint.status = 401
    result = buggify(endpoint)
    assert result.exit_code == 1
    assert (
        "the model's calls failed for all of 3 problems" in result.stderr or "failed for all" in result.stderr
    )
    assert "made/buggy.jsonl.work" in result.stderr
    assert not Path("made/buggy.jsonl").exists()


def test_a_file_that_is_not_there_is_a_wrong_request(apps: Path):
    result = etude(
        "dataset",
        "buggify",
        "aps.jsonl",
        "--out",
        "x.jsonl",
        "--model",
        "m",
        "--base-url",
        "http://localhost:1",
    )
    assert result.exit_code == 2
    assert "dataset file aps.jsonl does not exist; did you mean 'apps.jsonl'?" in result.stderr
