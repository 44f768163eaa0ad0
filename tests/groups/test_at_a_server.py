"""The shared model group against a real `etude serve`: settings, and a server that is not there yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from openai import BadRequestError

from etude.backends.lm_server import LanguageModelClient, LmServerAdapter, LmServerAdapterConfig
from etude.backends.openai_api import connect
from etude.core.errors import RequestError
from etude.engines.openai_compatible import OpenAiEngine
from etude.engines.openai_config import OpenAiLlmConfig
from etude.groups import ModelJobs, ModelSettings, OpenAiSharedModelGroup, Step, agents_of_model
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.protocols import adp
from etude.store.journal import Journal
from etude.store.log import ModelLog
from tests.algorithms.scripted_episodes import played
from tests.server.process import ServerProcess

ACCEPT = "Decision: accept"
FAST = {"lora_rank": 2, "batch_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_tokenizer(["You are prover. e Decide now. proof lie yes no"], vocab_size=300)
    shape = TinyShape(hidden_size=16, layers=1, heads=2, intermediate_size=32, max_context=256)
    build_policy(tokenizer, 0, shape).export(folder)
    return folder


@pytest.fixture(scope="module")
def unstarted(model, tmp_path_factory) -> Iterator[ServerProcess]:
    """The server of all tests, whose address is known before it is started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ServerProcess(
        model, tmp_path_factory.mktemp("server"), "--engine-wait", "60", "--port", str(port)
    )
    server.address = f"http://127.0.0.1:{port}"
    yield server
    server.stop()


@pytest.fixture(scope="module")
def server(unstarted) -> ServerProcess:
    if not unstarted.is_running:
        unstarted.start()
    return unstarted


@pytest.fixture
async def plays(tmp_path):
    """Several ways to say it, one of which is better than another."""
    return [
        await played(tmp_path, adp(), [text, ACCEPT], id=f"train/1/e/{number}", generation=number)
        for number, text in enumerate(["proof", "yes", "no"])
    ]


@pytest.fixture
async def pair(tmp_path):
    tree = await played(tmp_path, adp(), ["yes", "no", ACCEPT], generation=9, widths={"prover": 2})
    return {"prover": [Step(tree, 0)]}, {"prover": [Step(tree, 1)]}


class Setting:
    """One journal, and groups on it as other processes would make them."""

    def __init__(self, server, folder):
        self.server, self.folder = server, folder
        self.journals: list[Journal] = []

    def group(self, journal="run", name="pair", *, free_engine=False, hyperparameters=None, **settings):
        """A group of a process of its own."""
        for known in self.journals:
            known.close()
        kept = Journal(self.folder / f"{journal}.db")
        self.journals.append(kept)
        url = f"{self.server.address}/v1"
        llm = OpenAiLlmConfig(model_name="tiny", base_url=url, api_key="none", max_tokens=2)
        values = ({} if "lora_rank" in settings else FAST) | (hyperparameters or {})
        config = LmServerAdapterConfig(free_engine=free_engine, hyperparameters=values)
        backend = LmServerAdapter(
            config, connect(config, llm, needs_key=False), LanguageModelClient(url), "tiny"
        )
        line = ModelJobs("policy", backend, OpenAiEngine(llm), ModelLog(kept, name))
        agents = agents_of_model(
            adp(), dict.fromkeys(adp().agents, "policy"), "policy", name, ModelSettings("tiny", **settings)
        )
        return OpenAiSharedModelGroup(name, agents, line, adp())

    def jobs(self):
        """All jobs of the server, oldest first."""
        return list(self.server.client().fine_tuning.jobs.list(limit=100))[::-1]

    def job(self, ref):
        return self.server.client().fine_tuning.jobs.retrieve(ref.metadata["job_id"])

    def close(self):
        """Cancel the jobs that nobody waited for: the next test would have to."""
        for journal in self.journals:
            journal.close()
        for job in self.jobs() if self.server.is_running else ():
            if job.status not in ("succeeded", "failed", "cancelled"):
                with contextlib.suppress(BadRequestError):  # It has just ended.
                    self.server.client().fine_tuning.jobs.cancel(job.id)


@pytest.fixture
def setting(server, tmp_path) -> Iterator[Setting]:
    made = Setting(server, tmp_path)
    yield made
    made.close()


async def trained(group, play):
    """The version that one job made."""
    await group.create_supervised_fine_tune_job({"prover": [play]})
    await group.wait_for_fine_tune_job(timeout=120, poll_interval=0.1)
    return await group.switch_to_next_model()


async def test_a_group_waits_for_a_server_that_is_not_there_yet_and_says_so(unstarted, tmp_path, caplog):
    """The first of the tests: the others go on with the server that it starts."""
    setting = Setting(unstarted, tmp_path)
    with caplog.at_level(logging.INFO):
        with pytest.raises(TimeoutError, match="no language-model server answers at"):
            await setting.group(name="late").wait_for_ready(timeout=0.2)
        assert f"waiting up to 0.2 s for a language-model server at {unstarted.address}" in caplog.text
        assert "ConnectError" in caplog.text
        waiting = asyncio.create_task(setting.group(name="late").wait_for_ready(timeout=120))
        try:
            await asyncio.to_thread(unstarted.start)
        finally:
            await waiting
    setting.close()


async def test_the_settings_reach_the_job(setting, pair, plays):
    settings = {"num_epochs": 7, "dpo_beta": 0.9, "lora_rank": 4, "lora_alpha_scale": 3.0}
    group = setting.group(name="settings", rl_learning_rate=3e-4, **settings)
    dpo = setting.job(await group.create_dpo_fine_tune_job(*pair)).method.dpo.hyperparameters.model_dump()
    assert (dpo["n_epochs"], dpo["beta"], dpo["learning_rate"]) == (7, 0.9, 3e-4)
    assert (dpo["lora_rank"], dpo["lora_alpha"]) == (4, group.lora_alpha) == (4, 12.0)
    plain = setting.group("plain", "plain", hyperparameters={"n_epochs": 2})
    ref = await plain.create_supervised_fine_tune_job({"prover": [plays[0]]})
    supervised = setting.job(ref).method.supervised.hyperparameters.model_dump()
    assert (supervised["n_epochs"], supervised["lora_rank"]) == (2, 2)
    assert plain.num_epochs is None


@pytest.mark.slow
async def test_a_group_goes_on_from_a_state_in_another_journal(setting, plays):
    group = setting.group("first", "moved")
    made = await trained(group, plays[0])
    state = group.get_state_dict()
    group = setting.group("second", "moved")
    group.set_state(state)
    await group.eval()
    assert (group.model_name, group.jobs.engine.version) == (made.location, 1)
    assert await group.get_fine_tune_job_status() == "succeeded"
    assert await group.switch_to_next_model() == made
    assert (await trained(group, plays[1])).number == 2
    first, second = group.lineage()
    assert (first.version, first.data, second.data.parent) == (made, None, 1)
    assert setting.job(second.job).model == made.location


async def test_a_line_of_another_model_is_an_error_that_names_both(setting, plays, pair):
    group = setting.group(name="line")
    group.jobs.model = "polcy"
    for create in (
        group.create_supervised_fine_tune_job({"prover": plays}),
        group.create_grpo_fine_tune_job({"prover": plays}),
        group.create_dpo_fine_tune_job(*pair),
        group.create_supervised_fine_tune_job({}, {"verifier": plays}),
    ):
        with pytest.raises(RequestError, match=r"of the model 'polcy', and agent '.*' answered with"):
            await create
