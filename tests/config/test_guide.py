"""The guide to extending the harness works as it is written, and so does its example config."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.config.builder import Builder
from etude.config.load import load_config, resolved_yaml
from etude.config.registry import register_dataset, register_llm
from etude.core.errors import ConfigError
from etude.rollout.datasets import JsonDatasetConfig
from tests.config.parts import RemoteConfig

COMPLETE = (Path(__file__).parents[1] / "seed_guide.yml").read_text(encoding="utf-8")


@pytest.fixture
def guide(tmp_path: Path, empty_registry: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The guide's example as a file, with its components registered."""

    async def build(config, builder):
        yield config

    register_llm(config_type=RemoteConfig)(build)
    register_dataset(config_type=JsonDatasetConfig)(build)
    monkeypatch.delitem(sys.modules, "tests.seed_guide", raising=False)
    importlib.import_module("tests.seed_guide")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yml"
    path.write_text(COMPLETE)
    yield path


async def test_the_complete_config_loads_and_its_components_are_initialized(
    guide: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINING_API_KEY", "sk-training")
    config = load_config(guide)
    assert config.finetuning.num_epochs == 20
    assert config.finetuning.target_model == "my_model"
    assert config.trainer_adapters["my_adapter"].backend.learning_rate == 1e-5  # type: ignore[attr-defined]
    async with Builder(config) as builder:
        trainer = await builder.get_trainer("my_trainer")
        await trainer.bind_components(
            trajectory_builder=await builder.get_trajectory_builder("my_builder"),
            trainer_adapter=await builder.get_trainer_adapter("my_adapter"),
        )
        await trainer.initialize(run_config=config.finetuning)
        assert (
            trainer.trajectory_builder.trajectory_builder_config.reward == config.finetuning.reward_function
        )
        await trainer.cleanup()


def test_a_plain_text_key_from_the_environment_stays_out_of_the_resolved_config(
    guide: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRAINING_API_KEY", "sk-training")
    written = resolved_yaml(load_config(guide))
    assert "sk-training" not in written
    assert "api_key: ${TRAINING_API_KEY}" in written


def test_what_is_wrong_in_a_block_of_the_readers_own_is_told_with_its_place(
    guide: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in os.environ if "KEY" in name]:
        monkeypatch.delenv(name)
    guide.write_text(COMPLETE.replace("batch_size: 8", "batchsize: 8").replace("1e-5", "fast"))
    with pytest.raises(ConfigError) as raised:
        load_config("config.yml")
    key, rate, size = str(raised.value).splitlines()
    assert key.startswith("config.yml:34:7: ") and "'TRAINING_API_KEY' is not set" in key
    assert rate.startswith("config.yml:35:7: ") and "expected a number, found 'fast'" in rate
    assert size.startswith("config.yml:36:7: ") and "did you mean 'batch_size'? Allowed: endpoint" in size
