"""The toolkit's agents as components here, without the toolkit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.errors import MissingExtraError, RequestError
from etude.integrations.nat.components import NatWorkflowConfig
from etude.integrations.nat.transport import Steps
from etude.store.journal import Journal


@pytest.mark.skipif(find_spec("nat") is not None, reason="the toolkit is installed")
async def test_without_the_toolkit_its_workflow_says_what_to_install():
    async with Builder(parse_config({"workflow": {"_type": "nat", "config_file": "c.yml"}})) as builder:
        with pytest.raises(MissingExtraError, match=r"\[nat\]"):
            await builder.get_workflow()


def test_a_run_of_nat_finetune_is_gone_on_with_by_its_command():
    with pytest.raises(RequestError, match="`nat finetune`: type that command again"):
        NatWorkflowConfig().toolkit_config()


async def test_steps_of_an_episode_are_there_after_a_crash(tmp_path):
    steps = [{"payload": {"event_type": "LLM_END", "data": {"output": "yes", "payload": object()}}}]
    with Journal(tmp_path / "run.db") as journal:
        await Steps(journal).keep("train/1/a/0", steps)
    with Journal(tmp_path / "run.db") as journal:
        [found] = Steps(journal).of("train/1/a/0")
        assert Steps(journal).of("train/1/a/1") == []
    assert found["payload"]["event_type"] == "LLM_END"
    assert found["payload"]["data"]["payload"].startswith("<object")
