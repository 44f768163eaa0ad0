"""Ready agents with tools, and calls that play a user."""

from __future__ import annotations

from typing import Any

import pytest

import etude
from etude.algorithms.samples import targeted_calls
from etude.config.builder import Builder
from etude.config.load import parse_config
from etude.core.episode import EpisodeRecord, Example
from etude.core.errors import RequestError
from etude.loop.arguments import tools_configs, with_python_objects
from etude.rollout.collector import Collector, EpisodeJob
from etude.store.journal import Journal
from tests.support import ScriptedEngine

LLM = {"_type": "openai", "model_name": "stand-in", "api_key": "none", "base_url": "http://localhost:9/v1"}


def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


def calls(*pairs: tuple[int, int]) -> dict[str, Any]:
    """A message that asks for sums."""
    wanted = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": "add", "arguments": f'{{"left": {left}, "right": {right}}}'},
        }
        for index, (left, right) in enumerate(pairs)
    ]
    return {"role": "assistant", "content": None, "tool_calls": wanted}


async def play(
    journal: Journal, workflow: dict[str, Any], inputs: dict[str, Any], **scripts: Any
) -> tuple[EpisodeRecord, dict[str, ScriptedEngine]]:
    """The record of an episode of a workflow of a config, with a scripted engine for each model."""
    data = {
        "llms": dict.fromkeys(scripts, LLM),
        "tools": {"sums": {"_type": "functions", "functions": [f"{__name__}:add"]}},
        "workflow": workflow,
    }
    config = parse_config(data)
    engines = {name: ScriptedEngine(script) for name, script in scripts.items()}
    async with Builder(config) as builder:
        tools = {name: await builder.get_tools(name) for name in config.tools}
        agent = await builder.get_workflow()
        collector = Collector(agent, engines, journal, tools=tools, default_model="policy")
        record = await collector.run(EpisodeJob("train/a/0", Example("a", inputs)))
    return record, engines


async def test_an_agent_calls_tools_until_it_needs_no_more(journal: Journal) -> None:
    script = [calls((1, 2), (3, 4)), calls((3, 7)), "It is 10."]
    workflow = {"_type": "agent", "system": "You add for {name}."}
    record, engines = await play(journal, workflow, {"question": "1+2+3+4?", "name": "Ada"}, policy=script)
    assert record.output == "It is 10.", record.failure
    last = engines["policy"].requests[-1]
    assert [(message["role"], message["content"]) for message in last.messages] == [
        ("system", "You add for Ada."),
        ("user", "1+2+3+4?"),
        ("assistant", None),
        ("tool", "3"),
        ("tool", "7"),
        ("assistant", None),
        ("tool", "10"),
    ]
    assert [tool["function"]["name"] for tool in last.tools] == ["add"]


@pytest.mark.parametrize(
    ("keys", "inputs", "prompt"),
    [
        ({}, {"question": "Why?", "level": 3}, "Why?"),
        ({}, {"text": "Only this."}, "Only this."),
        ({"prompt": "{level}: {text}"}, {"text": "Both", "level": 3}, "3: Both"),
        ({}, {"messages": [{"role": "user", "content": "As messages"}], "level": 3}, "As messages"),
    ],
)
async def test_prompts(journal: Journal, keys: Any, inputs: dict[str, Any], prompt: str) -> None:
    record, engines = await play(journal, {"_type": "agent", **keys}, inputs, policy=["Fine."])
    assert record.output == "Fine."
    assert engines["policy"].requests[0].messages == ({"role": "user", "content": prompt},)


@pytest.mark.parametrize(
    ("keys", "inputs", "problem"),
    [
        ({}, {"left": 1, "right": 2}, "inputs left, right; "),
        ({"prompt": "{lfet}"}, {"left": 1}, "workflow.prompt: example 'a' has no input '{lfet}'"),
    ],
)
async def test_prompts_that_cannot_be_made(journal: Journal, keys: Any, inputs: Any, problem: str) -> None:
    record, _ = await play(journal, {"_type": "agent", **keys}, inputs, policy=["Fine."])
    assert record.failure is not None and problem in record.failure.reason


async def test_an_agent_that_only_calls_tools_is_stopped(journal: Journal) -> None:
    workflow = {"_type": "agent", "max_turns": 3}
    record, engines = await play(journal, workflow, {"question": "?"}, policy=[calls((1, 1))])
    assert record.output == "" and len(engines["policy"].requests) == 3
    assert ["3 turns" in event.text for event in record.events if event.kind == "note"] == [True]


async def test_calls_that_play_a_user_are_never_trained(journal: Journal) -> None:
    """Also where one model plays both, and all functions are trained."""

    async def sell(example: Any, episode: etude.Episode) -> str:
        with episode.function("<user>"):
            asked = await episode.chat([{"role": "user", "content": "Hello! How can I help you?"}])
        return (await episode.chat([{"role": "user", "content": asked.text}])).text

    engine = ScriptedEngine(["A ticket!", "Here it is."])
    record = await Collector(etude.workflow(sell), {"policy": engine}, journal).run(
        EpisodeJob("train/a/0", Example("a", {}))
    )
    assert [call.function for call in record.calls] == ["<user>", "<workflow>"]
    assert [call.index for call in targeted_calls(record, ["*"], "policy")] == [1]
    assert targeted_calls(record, ["<user>"], "policy") == []


def test_tools_of_a_program_are_named_by_their_path_or_kept_as_they_are() -> None:
    def local(word: str) -> str:
        return word

    sets = tools_configs(
        {"sums": [add], "words": local, "remote": {"_type": "mcp", "url": "http://there/mcp"}}
    )
    assert sets["sums"] == {"_type": "functions", "functions": [f"{__name__}:add"]}
    assert sets["words"].type_name == "live" and sets["words"].value == [local]
    assert sets["remote"] == {"_type": "mcp", "url": "http://there/mcp"}
    assert list(tools_configs([add])) == ["tools"]
    config = parse_config({"tools": sets})
    again = with_python_objects(config, tools={"sums": [add], "words": local})
    assert again.tools["sums"] is config.tools["sums"]
    with pytest.raises(RequestError, match=r"tools: .* config"):
        with_python_objects(config, tools={"sums": [local]})
