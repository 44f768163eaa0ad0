"""schemathesis sends what the OpenAPI document allows, and what it forbids: nothing makes the server fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import ServerProcess


def test_the_document_has_the_hyperparameters_that_each_algorithm_declares(server: ServerProcess) -> None:
    with server.http() as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    method = schemas["MethodBody"]["properties"]
    assert {"dpo", "grpo", "rloo", "supervised"} <= {*method["type"]["enum"]} < {*method}
    assert {"n_epochs", "clip_low", "reference"} <= {*schemas["GrpoHyperparameters"]["properties"]}
    assert "clip_low" not in schemas["DpoHyperparameters"]["properties"]


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
    assert re.search(r"Tested: [3-9]\d\b", done.stdout), done.stdout
