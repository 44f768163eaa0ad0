"""The parts that a workflow brings along: used where the config names none, and stored like written ones."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import yaml

from etude.config import registry
from etude.config.component import Supplies, WorkflowConfig
from etude.config.load import load_config, parse_config, resolved_yaml
from etude.config.registry import register_workflow
from etude.core.errors import ConfigError, RequestError
from etude.rollout.datasets import SeedsConfig
from etude.rollout.evaluator import MeasuredConfig


class GameConfig(WorkflowConfig, name="game"):
    """A game of two."""

    size: int = 8
    faulty: ClassVar[str | None] = None

    def supplies(self) -> Supplies:
        """Seeds, and a reward for each seat."""
        if self.faulty:
            raise RequestError(self.faulty)
        seeds = {"_type": "seeds", "size": self.size}
        names = ("first", "second")
        return Supplies(
            dataset=seeds,
            validation=seeds | {"split": "validation"},
            evaluators={name: {"_type": "measured", "agent": name} for name in names},
            reward="first",
            reward_of_model={"alice": "first", "bob": "second"},
        )


@pytest.fixture(autouse=True)
def game() -> Iterator[None]:
    @register_workflow(config_type=GameConfig)
    async def build(config: Any, builder: Any) -> Any:
        yield config

    yield
    del registry._registrations["workflow", "game"]


LLMS = {name: {"_type": "openai", "model_name": "m", "base_url": "http://x/v1"} for name in ("alice", "bob")}


def config(**blocks: Any) -> Any:
    return parse_config({"llms": LLMS, "workflow": {"_type": "game"}, **blocks})


def test_what_a_config_does_not_name_follows_from_its_workflow():
    made = config(finetuning={"enabled": True, "target_model": "bob"})
    settings = made.finetuning.run_configuration
    assert made.eval.general.dataset == SeedsConfig(size=8)
    assert settings.validation_dataset == SeedsConfig(size=8, split="validation")
    assert made.eval.evaluators["second"] == MeasuredConfig(agent="second")
    assert made.finetuning.reward_function.name == "second"


def test_what_a_config_names_stands():
    seeds = {"_type": "seeds", "size": 3}
    made = config(
        eval={"general": {"dataset": seeds}, "evaluators": {"mine": {"_type": "measured"}}},
        finetuning={"enabled": True, "target_model": "bob"},
    )
    assert made.eval.general.dataset == SeedsConfig(size=3)
    assert made.finetuning.run_configuration.validation_dataset == SeedsConfig(size=8, split="validation")
    assert [*made.eval.evaluators] == ["mine"] and made.finetuning.reward_function.name == "mine"


def test_a_dataset_of_the_run_configuration_is_one_too():
    settings = {"dataset": {"_type": "seeds", "size": 2}}
    assert config(finetuning={"run_configuration": settings}).eval.general.dataset is None


def test_each_target_is_rewarded_for_what_its_model_did():
    targets = {"alice": {"reward_function": {"name": "second"}}, "again": {"model": "bob"}}
    made = config(finetuning={"enabled": True, "targets": targets}).finetuning.targets
    assert [target.reward_function.name for target in made.values()] == ["second", "second"]
    only = config(llms={"bob": LLMS["bob"]}, finetuning={"enabled": True}).finetuning
    assert (only.target_model, only.reward_function.name) == ("bob", "second")


def test_a_stored_config_has_all_of_it_and_loads_again(tmp_path):
    made = config(finetuning={"enabled": True, "target_model": "bob"})
    (tmp_path / "config.yml").write_text(resolved_yaml(made))
    assert yaml.safe_load(resolved_yaml(made))["eval"]["general"]["dataset"]["_type"] == "seeds"
    again = load_config(tmp_path / "config.yml")
    assert again.eval == made.eval
    assert again.finetuning.reward_function == made.finetuning.reward_function


def test_a_workflow_that_cannot_tell_is_an_error_at_its_place(monkeypatch):
    monkeypatch.setattr(GameConfig, "faulty", "no game 'chess'")
    with pytest.raises(ConfigError, match="workflow: no game 'chess'"):
        config()
