"""Components from configs: built once, closed in reverse order."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from etude.config.builder import Builder
from etude.config.component import EvaluatorConfig, ReferenceTo
from etude.config.load import load_config, parse_config
from etude.config.registry import register_evaluator
from etude.config.schema import Config
from etude.core.errors import ConfigError, EtudeError, RequestError
from etude.rollout.datasets import JsonlDatasetConfig, PythonDatasetConfig


class TracedConfig(EvaluatorConfig, name="traced"):
    """An evaluator that notes when it is made and closed, and needs others."""

    needs: Annotated[list[str], ReferenceTo("evaluators")] = Field(default_factory=list)
    at_once: bool = False


@pytest.fixture
def make_traced(parts: object) -> Callable[..., tuple[Config, list[str]]]:
    """Makes a config whose evaluators need each other as told, and the list of what happens."""

    def make(at_once: bool = False, **needs: list[str]) -> tuple[Config, list[str]]:
        events: list[str] = []

        @register_evaluator(config_type=TracedConfig)
        async def build(config, builder):
            await asyncio.sleep(0)
            if config.at_once:
                await asyncio.gather(*map(builder.get_evaluator, config.needs))
            else:
                for name in config.needs:
                    await builder.get_evaluator(name)
            me = "".join(name for name, entry in builder.config.eval.evaluators.items() if entry is config)
            events.append(f"make {me}")
            yield me
            events.append(f"close {me}")
            assert me != "broken"

        entries = {
            name: {"_type": "traced", "needs": needed, "at_once": at_once} for name, needed in needs.items()
        }
        return parse_config({"eval": {"evaluators": entries}}), events

    return make


async def test_a_component_is_built_once_and_closed_in_reverse_order(make_traced: Any):
    config, events = make_traced(a=["b"], b=[], c=["b"])
    async with Builder(config) as builder:
        assert await builder.get_evaluator("a") == "a"
        assert await builder.get("evaluators", "c") == "c"
        assert await builder.get_evaluator("a") == "a"
        assert events == ["make b", "make a", "make c"]
    assert events[3:] == ["close c", "close a", "close b"]


@pytest.mark.parametrize("at_once", [False, True])
async def test_two_that_ask_at_once_get_the_same(make_traced: Any, at_once: bool):
    config, events = make_traced(at_once, a=["c", "d"], b=["d", "c"], c=["e"], d=["e"], e=[])
    async with Builder(config) as builder:
        assert await asyncio.gather(*map(builder.get_evaluator, "abab")) == ["a", "b", "a", "b"]
    assert sorted(events) == sorted(f"{what} {name}" for name in "abcde" for what in ("make", "close"))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("asked", ["a", "abc"])
async def test_components_that_need_each_other_in_a_circle_are_an_error(make_traced: Any, at_once, asked):
    config, _ = make_traced(at_once, a=["b", "d"], b=["c"], c=["a"], d=[])
    async with Builder(config) as builder:
        with pytest.raises(RequestError, match=r"circle: evaluators\.(.)( -> evaluators\..){2}.*\.\1$"):
            await asyncio.wait_for(asyncio.gather(*map(builder.get_evaluator, asked)), 10)


async def test_an_error_in_the_cleanup_of_a_component_is_told_and_ends_nothing(make_traced: Any, caplog):
    config, events = make_traced(a=["broken"], broken=[])
    async with Builder(config) as builder:
        await builder.get_evaluator("a")
    assert events[2:] == ["close a", "close broken"]
    assert "closing evaluators.broken failed: " in caplog.text and __file__ in caplog.text


async def test_an_unknown_name_is_answered_with_the_nearest(make_traced: Any):
    config, _ = make_traced(correct=[])
    async with Builder(config) as builder:
        with pytest.raises(RequestError, match=r"no evaluator 'corect'; .*'correct'\? .*: correct"):
            await builder.get_evaluator("corect")
        with pytest.raises(RequestError, match=r"no model 'policy'\. Allowed: none"):
            await builder.get_llm("policy")
        with pytest.raises(RequestError, match=r"no 'workflow'; .*`workflow: my_agent:play`"):
            await builder.get_workflow()
        with pytest.raises(RequestError, match=r"no dataset; add `eval: {general: {dataset:"):
            await builder.get_dataset()


async def test_what_a_component_raises_is_told_with_its_name_and_place(parts: object):
    @register_evaluator(config_type=TracedConfig)
    async def build(config, builder):
        raise KeyError("url")
        yield

    config = parse_config({"eval": {"evaluators": {"a": "traced"}}})
    async with Builder(config) as builder:
        for _ in range(2):
            with pytest.raises(EtudeError) as raised:
                await builder.get_evaluator("a")
            assert str(raised.value).startswith("cannot build evaluators.a (_type: traced): ")
            assert str(raised.value).endswith("KeyError: 'url'")
            assert __file__ in str(raised.value)


async def test_another_dataset_may_be_a_file(folder: Path):
    (folder / "project").mkdir()
    (folder / "project/val.jsonl").write_text("")
    (folder / "project/config.yml").write_text(
        "eval: {general: {dataset: {_type: json, file_path: x.json, id_key: n, limit: 3}}}"
    )
    async with Builder(load_config("project/config.yml")) as builder:
        file: Any = await builder.get_dataset("val.jsonl")
        assert file == JsonlDatasetConfig(file_path=folder / "project/val.jsonl", id_key="n")
        assert await builder.get_dataset(PythonDatasetConfig(function="m:f", arguments={"n": {1: 2, "b": 3}}))
        with pytest.raises(ConfigError, match=r"'val.txt' .* suffix.*: .json, .jsonl"):
            await builder.get_dataset("val.txt")
