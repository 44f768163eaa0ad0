"""The run that `nat finetune` asks for, and clients that serve every episode of its agent."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, ConflictError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

from etude.config.builder import Builder
from etude.config.load import parse_config, resolved_yaml
from etude.core.errors import MissingExtraError, RequestError
from etude.core.records import RunEnded
from etude.integrations.nat.components import NatWorkflowConfig
from etude.integrations.nat.run import open_run, trained_model, translate, unfinished_run
from etude.integrations.nat.transport import EpisodeTransport, keep_steps, read_steps
from etude.store.journal import Journal, ModelLog
from etude.wire.gateway import API_KEY, BASE_URL
from tests.rollout.running import collect, collect_one, jobs
from tests.support import ScriptedEngine


class Llm(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    type: str = "openai"
    model_name: str = "base"
    temperature: float | None = 0.7
    base_url: str | None = None
    api_key: str | None = None


class Toolkit(BaseModel):
    """The settings that are read from the toolkit's config."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llms: dict[str, Llm] = Field(default_factory=lambda: {"policy": Llm()})
    eval: Any = SimpleNamespace(general=SimpleNamespace(max_concurrency=5), evaluators={"right": None})
    trajectory_builders: Any = {"b": SimpleNamespace(builder={"num_generations": 3})}
    trainer_adapters: Any = {"a": SimpleNamespace(adapter={"learning_rate": 0.5}, model={})}
    trainers: Any = Field(default_factory=lambda: {"t": trainer()})


def trainer(**given):
    known = dict.fromkeys(
        ("validation_dataset", "seed", "deterministic", "error_budget", "fine_tune_from_scratch")
    )
    return SimpleNamespace(trainer={}, **(known | {"timeout": None, "max_calls": None} | given))


def translated_options(folder, **given):
    curriculum = SimpleNamespace(model_dump=lambda: given.pop("curriculum", {"enabled": False}))
    options = SimpleNamespace(
        endpoint=None,
        validation_config_file=None,
        result_json_path="$.answer",
        dataset=None,
        validation_dataset=None,
        validation_interval=5,
    )
    for key in [key for key in given if hasattr(options, key)]:
        setattr(options, key, given.pop(key))
    plain = {
        "trainer": "t",
        "trajectory_builder": "b",
        "trainer_adapter": "a",
        "reward_function": SimpleNamespace(name="right"),
        "target_functions": ["<workflow>"],
        "target_model": None,
        "num_epochs": 2,
        "output_dir": folder,
    }
    return SimpleNamespace(curriculum_learning=curriculum, run_configuration=options, **(plain | given))


def test_every_part_has_its_place(tmp_path):
    config = translate(Toolkit(), translated_options(tmp_path))
    assert config.llms["policy"].model_dump(include={"model", "temperature"}) == {
        "model": "base",
        "temperature": 0.7,
    }
    assert config.workflow.model == "policy"
    assert config.workflow.result_json_path == "$.answer"
    assert config.eval.general.max_concurrency == 5
    assert config.trajectory_builders["b"].num_generations == 3
    assert config.trainer_adapters["a"].learning_rate == 0.5
    assert config.trainers["t"].type_name == "epochs"
    assert config.finetuning.reward_function.name == "right"
    assert config.finetuning.num_epochs == 2
    assert config.finetuning.output_dir == tmp_path


def test_what_the_toolkit_has_no_keys_for_is_the_trainers(tmp_path):
    given = trainer(seed=3, error_budget=0.0, timeout=7.0, validation_dataset=Path("held_out.jsonl"))
    config = translate(Toolkit(trainers={"t": given}), translated_options(tmp_path))
    assert (config.finetuning.seed, config.finetuning.error_budget) == (3, 0.0)
    assert config.eval.general.timeout == 7.0
    held_out = config.finetuning.run_configuration.validation_dataset
    assert held_out.file_path == Path("held_out.jsonl").absolute()


def test_a_model_that_is_trained_at_a_server_is_sampled_there_with_its_tokens(tmp_path):
    adapters = {"a": SimpleNamespace(adapter={"_type": "lm_server"}, model={"max_tokens": 9})}
    llms = {"policy": Llm(base_url="http://localhost:8000/v1", api_key="secret")}
    found = translate(Toolkit(trainer_adapters=adapters, llms=llms), translated_options(tmp_path))
    policy = found.llms["policy"]
    assert (policy.type_name, policy.base_url, policy.provider, policy.max_tokens) == (
        "openai",
        "http://localhost:8000/v1",
        "etude",
        9,
    )
    assert "secret" not in resolved_yaml(found)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"endpoint": "http://localhost/generate"}, "--endpoint.*leave it out"),
        ({"validation_config_file": "other.yml"}, "--validation_dataset"),
        ({"reward_function": SimpleNamespace(name="wrong")}, "right"),
        ({"curriculum": {"random_subsample": 5.0}}, "random_subsample"),
    ],
)
def test_what_cannot_be_followed_is_refused_before_anything_runs(tmp_path, given, told):
    with pytest.raises(RequestError, match=told):
        translate(Toolkit(), translated_options(tmp_path, **given))


async def test_the_same_command_finds_the_run_that_it_left(tmp_path):
    config = translate(Toolkit(), translated_options(tmp_path))
    assert unfinished_run(config) is None
    async with open_run(config) as run:
        assert unfinished_run(config) is None, "a run in use is not resumed"
    assert unfinished_run(config) == run.path
    async with open_run(translate(Toolkit(), translated_options(tmp_path, num_epochs=7))) as longer:
        assert longer.path == run.path
        await ModelLog(longer.journal).add(RunEnded())
    assert unfinished_run(config) is None, "a run that is over is not resumed"


LLMS = {
    "policy": SimpleNamespace(model_name="Qwen/Qwen2.5-0.5B-Instruct"),
    "judge": SimpleNamespace(model_name="gpt-4o"),
}


def test_the_trained_model_is_named_by_its_entry_or_by_its_model():
    assert trained_model(LLMS, "policy") == trained_model(LLMS, "Qwen/Qwen2.5-0.5B-Instruct") == "policy"
    for wanted, told in ((None, "finetuning.target_model"), ("policy-2", "judge")):
        with pytest.raises(RequestError, match=told):
            trained_model(LLMS, wanted)


@pytest.mark.skipif(find_spec("nat") is not None, reason="the toolkit is installed")
async def test_without_the_toolkit_its_workflow_says_what_to_install():
    async with Builder(parse_config({"workflow": {"_type": "nat", "config_file": "c.yml"}})) as builder:
        with pytest.raises(MissingExtraError, match=r"\[nat\]"):
            await builder.get_workflow()


def test_a_run_of_nat_finetune_is_gone_on_with_by_its_command():
    with pytest.raises(RequestError, match="`nat finetune`"):
        NatWorkflowConfig().toolkit_config()


async def test_steps_of_an_episode_are_there_after_a_crash(tmp_path):
    steps = [{"payload": {"event_type": "LLM_END", "data": {"output": "yes", "payload": object()}}}]
    with Journal(tmp_path / "run.db") as journal:
        await keep_steps(journal, "train/1/a/0", steps)
    with Journal(tmp_path / "run.db") as journal:
        [found] = read_steps(journal, "train/1/a/0")
        assert read_steps(journal, "train/1/a/1") == []
    assert found["payload"]["event_type"] == "LLM_END"
    assert found["payload"]["data"]["payload"].startswith("<object")


MODEL = "policy"
SPEAKER = ContextVar("the episode that runs", default=None)


def asking(function="<workflow>"):
    """A client that was made before there was any episode."""
    http = httpx.AsyncClient(transport=EpisodeTransport(MODEL, lambda: (SPEAKER.get(), function)))
    return AsyncOpenAI(api_key=API_KEY, base_url=BASE_URL, max_retries=0, http_client=http)


def blocking():
    http = httpx.Client(transport=EpisodeTransport(MODEL, lambda: (SPEAKER.get(), "tool")))
    return OpenAI(api_key=API_KEY, base_url=BASE_URL, max_retries=0, http_client=http)


def question(text):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]}


def repeating():
    return ScriptedEngine(lambda request: request.messages[-1]["content"])


async def test_episodes_that_run_at_once_with_one_client_are_kept_apart(tmp_path):
    client = asking()

    async def workflow(example, episode):
        SPEAKER.set(episode)
        first = asyncio.create_task(client.chat.completions.create(**question(f"{example.id}, please")))
        second = await client.chat.completions.create(**question(f"{example.id} again"))
        return [(await first).choices[0].message.content, second.choices[0].message.content]

    with Journal(tmp_path / "run.db") as journal:
        records = await collect(workflow, journal, engine=repeating(), work=jobs(8))
    for record in records:
        assert record.output == [f"{record.example.id}, please", f"{record.example.id} again"]
        assert {call.request.messages[0]["content"] for call in record.calls} == set(record.output)


async def test_a_thread_may_wait_for_its_answer(tmp_path):
    client = blocking()

    async def workflow(example, episode):
        SPEAKER.set(episode)
        said = await asyncio.to_thread(client.chat.completions.create, **question("hi"))
        return said.choices[0].message.content

    with Journal(tmp_path / "run.db") as journal:
        record = await collect_one(workflow, journal, engine=repeating())
    assert (record.output, [call.function for call in record.calls]) == ("hi", ["tool"])


async def test_the_trained_model_is_for_episodes_alone():
    with pytest.raises(ConflictError, match=r"separate entry .*`llms`"):
        await asking().chat.completions.create(**question("how good was it?"))
    with pytest.raises(ConflictError, match=r"outside .*episode"):
        blocking().chat.completions.create(**question("how good was it?"))
