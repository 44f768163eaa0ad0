"""`etude init --env` for each of the games, and `etude check` of it."""

from __future__ import annotations

import pytest

from etude.config.load import load_config
from tests.cli.projects import etude

ENVIRONMENTS = ["gym", "gym:Blackjack-v1", "reasoning_gym:chain_sum", "textarena"]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_project_for_it(tmp_path, environment):
    made = etude("init", tmp_path / "new", "--env", environment, "--model", "somewhere/model")
    assert made.exit_code == 0, made.stderr
    assert len((tmp_path / "new" / "config.yml").read_text().splitlines()) < 60
    config = load_config(tmp_path / "new" / "config.yml")
    needs = config.workflow.needs()
    assert needs and all(need.is_met for need in needs)
    assert config.finetuning.enabled and config.eval.general.dataset is not None
