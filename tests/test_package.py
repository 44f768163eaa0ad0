"""The wheel, the sdist and the images, as users get them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from etude.cli.app import app

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_and_sdist_are_whole_and_run_in_a_fresh_environment(tmp_path: Path):
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "tests" / "package.sh", tmp_path], env=environment, check=True)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_an_image_runs_a_command_that_there_is_and_asks_for_a_key(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [re.findall(rf"^{word} (.*)$", text, re.MULTILINE) for word in ("ENTRYPOINT", "CMD", "VOLUME")]
    entry, model, volumes = (json.loads(found) for (found,) in lines)
    program, command, *words = entry + model
    parsed = typer.main.get_command(app).commands[command].make_context(command, words).params  # type: ignore[attr-defined]
    assert (program, parsed["host"], parsed["api_key_env"]) == ("etude", "0.0.0.0", "SERVER_KEY")
    assert str(parsed["data_dir"]) in volumes
    for service in yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"].values():
        assert len(service["command"]) == 1 and parsed["api_key_env"] in service["environment"]
        assert [volume.partition(":")[2] for volume in service["volumes"]] == volumes
