"""From a file to a validated config, and back."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from etude.algorithms.grpo import Grpo
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.component import EvaluatorConfig, LlmRef, ReferenceTo
from etude.config.finetuning import FinetuneConfig
from etude.config.load import load_config, parse_config, resolved_yaml
from etude.config.registry import register_evaluator
from etude.core.errors import ConfigError
from etude.loop.trainer import EpochTrainerConfig
from etude.rollout.datasets import JsonDatasetConfig, JsonlDatasetConfig, PythonDatasetConfig
from etude.rollout.evaluator import FunctionEvaluatorConfig, WeightedEvaluatorConfig
from etude.rollout.workflow import FunctionWorkflowConfig
from tests.config.parts import AgentConfig, LocalConfig

SMALL = """\
llms: {policy: local}
workflow: my_agent:play
eval:
  general: {dataset: train.jsonl}
  evaluators: {correct: my_agent:correct}
finetuning: {enabled: true}
"""


def write(folder: Path, text: str, name: str = "config.yml") -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return name


def test_most_of_a_config_may_be_left_out(folder: Path):
    config = load_config(write(folder, SMALL))
    assert config.llms == {"policy": LocalConfig()}
    assert config.workflow == FunctionWorkflowConfig(function="my_agent:play")
    assert config.eval.general.dataset == JsonlDatasetConfig(file_path=Path("train.jsonl"))
    assert config.eval.general.max_concurrency == 8
    assert config.eval.evaluators == {"correct": FunctionEvaluatorConfig(function="my_agent:correct")}
    assert config.trajectory_builders == {"grpo": Grpo()}
    assert config.trainer_adapters == {"local": LocalAdapterConfig()}
    assert config.trainers == {"epochs": EpochTrainerConfig()}
    finetuning = config.finetuning
    assert finetuning.trainer == "epochs"
    assert finetuning.trajectory_builder == "grpo"
    assert finetuning.trainer_adapter == "local"
    assert finetuning.target_model == "policy"
    assert finetuning.reward_function.name == "correct"
    assert finetuning.run_configuration.config_file == folder / "config.yml"


def test_the_only_local_model_is_trained_and_of_two_one_must_be_named(folder: Path):
    text = SMALL.replace("{policy: local}", "{judge: {_type: openai, model_name: m}, policy: local}")
    assert load_config(write(folder, text)).finetuning.target_model == "policy"
    text = SMALL.replace("{policy: local}", "{one: local, two: local}")
    with pytest.raises(ConfigError, match=r"'llms' has several; .*: one, two"):
        load_config(write(folder, text))
    named = text.replace("enabled: true", "enabled: true, target_model: two")
    assert load_config(write(folder, named)).finetuning.target_model == "two"


@pytest.mark.parametrize(
    ("written", "workflow"),
    [
        ("my_agent:play", FunctionWorkflowConfig(function="my_agent:play")),
        (
            "{_type: 'my_agent:play', arguments: {n: 3}}",
            FunctionWorkflowConfig(function="my_agent:play", arguments={"n": 3}),
        ),
        ("{_type: function, function: 'my_agent:play'}", FunctionWorkflowConfig(function="my_agent:play")),
        ("{function: 'my_agent:play'}", FunctionWorkflowConfig(function="my_agent:play")),
        ("{_type: my_agent_workflow, llm: policy}", AgentConfig(llm="policy")),
    ],
)
def test_the_ways_to_write_a_workflow(folder: Path, written: str, workflow: object):
    assert load_config(write(folder, SMALL.replace("my_agent:play", written))).workflow == workflow


@pytest.mark.parametrize(
    ("written", "dataset"),
    [
        ("train.jsonl", JsonlDatasetConfig(file_path=Path("train.jsonl"))),
        ("data/train.JSON", JsonDatasetConfig(file_path=Path("data/train.JSON"))),
        ("{_type: train.jsonl, limit: 5}", JsonlDatasetConfig(file_path=Path("train.jsonl"), limit=5)),
        ("{file_path: train.jsonl, limit: 5}", JsonlDatasetConfig(file_path=Path("train.jsonl"), limit=5)),
        ("{_type: json, file_path: train}", JsonDatasetConfig(file_path=Path("train"))),
        ("my_agent:examples", PythonDatasetConfig(function="my_agent:examples")),
    ],
)
def test_the_ways_to_write_a_dataset(folder: Path, written: str, dataset: object):
    config = load_config(write(folder, SMALL.replace("train.jsonl", written)))
    assert config.eval.general.dataset == dataset


def test_a_second_file_of_examples_has_the_columns_of_the_first(folder: Path):
    text = SMALL.replace(
        "dataset: train.jsonl", "dataset: {_type: train.jsonl, id_key: n, limit: 5}"
    ).replace("enabled: true", "enabled: true, run_configuration: {validation_dataset: val.json}")
    validation = load_config(write(folder, text)).finetuning.run_configuration.validation_dataset
    assert validation == JsonDatasetConfig(file_path=Path("val.json"), id_key="n")
    alone = "finetuning: {run_configuration: {validation_dataset: val.json}}"
    validation = load_config(write(folder, alone)).finetuning.run_configuration.validation_dataset
    assert validation == JsonDatasetConfig(file_path=Path("val.json"))


def test_a_registered_component_may_be_named_by_its_import_path(folder: Path):
    (folder / "my_trainer.py").write_text(
        "from etude import TrainerConfig, register_trainer\n"
        "class MyConfig(TrainerConfig, name='mine'):\n    steps: int = 1\n"
        "@register_trainer(config_type=MyConfig)\n"
        "async def mine(config, builder):\n    yield config\n"
    )
    text = SMALL + "trainers: {a: 'my_trainer:mine', b: {_type: mine, steps: 3}}\n"
    config = load_config(write(folder, text.replace("enabled: true", "enabled: true, trainer: b")))
    assert [(entry.type_name, entry.steps) for entry in config.trainers.values()] == [
        ("mine", 1),
        ("mine", 3),
    ]  # type: ignore[attr-defined]
    assert "_type: my_trainer:mine" in resolved_yaml(config)


def test_files_are_looked_for_beside_the_config_then_in_the_current_folder(folder: Path):
    for name in ("project/train.jsonl", "train.jsonl", "tiny/x"):
        write(folder, "", name)

    def find(dataset: str, model: str) -> tuple[object, object]:
        text = SMALL.replace("train.jsonl", dataset).replace("local", f"{{_type: local, model: {model}}}")
        config = load_config(write(folder, text, "project/config.yml"))
        data, llm = config.eval.general.dataset, config.llms["policy"]
        assert isinstance(data, JsonlDatasetConfig) and isinstance(llm, LocalConfig)
        return data.file_path, llm.model

    assert find("train.jsonl", "tiny") == (folder / "project/train.jsonl", str(folder / "tiny"))
    assert find("val.jsonl", "Qwen/Qwen3-0.6B") == (Path("val.jsonl"), "Qwen/Qwen3-0.6B")
    assert find(str(folder / "train.jsonl"), "/no/tiny") == (folder / "train.jsonl", "/no/tiny")
    assert find("~/train.jsonl", "tiny")[0] == Path("~/train.jsonl")


def test_overrides_reach_everything_that_may_be_left_out(folder: Path):
    config = load_config(
        write(folder, SMALL),
        [
            "finetuning.num_epochs=5",
            "trainer_adapters.local.learning_rate=1e-3",
            "workflow.arguments.n=7",
            "eval.general.dataset.limit=3",
            "llms.policy.model=other",
            "finetuning.run_configuration.validation_dataset=val.jsonl",
        ],
    )
    assert config.finetuning.num_epochs == 5
    assert config.trainer_adapters["local"] == LocalAdapterConfig(learning_rate=1e-3)
    assert config.workflow == FunctionWorkflowConfig(function="my_agent:play", arguments={"n": 7})
    assert config.eval.general.dataset == JsonlDatasetConfig(file_path=Path("train.jsonl"), limit=3)
    assert config.llms["policy"] == LocalConfig(model="other")
    validation = config.finetuning.run_configuration.validation_dataset
    assert validation == JsonlDatasetConfig(file_path=Path("val.jsonl"))


def test_an_override_may_repair_what_the_file_has_wrong(folder: Path):
    text = SMALL.replace("my_agent:play", "gone:play").replace("enabled: true", "enabled: true, seed: x")
    overrides = ["workflow=my_agent:play", "finetuning.seed=${ETUDE_TEST_SEED:-3}"]
    assert load_config(write(folder, text), overrides).finetuning.seed == 3


def test_the_environment_is_read_where_a_value_stands(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ETUDE_TEST_EPOCHS", "4")
    monkeypatch.setenv("ETUDE_TEST_AGENT", "my_agent:play")
    monkeypatch.setenv("ETUDE_TEST_DATA", "train.jsonl")
    text = (
        SMALL.replace(
            "enabled: true", "enabled: '${ETUDE_TEST_ON:-true}', num_epochs: '${ETUDE_TEST_EPOCHS}'"
        )
        .replace("my_agent:play", "${ETUDE_TEST_AGENT}")
        .replace("train.jsonl", "'${ETUDE_TEST_DATA}'")
    )
    config = load_config(write(folder, text))
    assert config.finetuning.enabled
    assert config.finetuning.num_epochs == 4
    assert config.workflow == FunctionWorkflowConfig(function="my_agent:play")
    written = resolved_yaml(config)
    assert "function: ${ETUDE_TEST_AGENT}" in written
    assert "file_path: ${ETUDE_TEST_DATA}" in written
    assert "num_epochs: ${ETUDE_TEST_EPOCHS}" in written


def test_the_same_config_from_a_mapping(folder: Path):
    data = {
        "llms": {"policy": LocalConfig(model="other")},
        "workflow": {"_type": "my_agent_workflow", "llm": "policy"},
        "eval": {
            "general": {"dataset": JsonDatasetConfig(file_path=Path("x.json"))},
            "evaluators": {
                "correct": "my_agent:correct",
                "both": WeightedEvaluatorConfig(weights={"correct": 1.0}),
            },
        },
        "finetuning": {"enabled": True, "reward_function": {"name": "both"}},
    }
    config = parse_config(data, ["finetuning.num_epochs=2"])
    assert config.llms["policy"] is data["llms"]["policy"]  # type: ignore[index]
    assert config.finetuning.num_epochs == 2
    assert config.finetuning.run_configuration.config_file is None
    assert "num_epochs" not in data["finetuning"]
    with pytest.raises(ConfigError, match=r"^key 'finetuning.x' is not known\."):
        parse_config({"finetuning": {"x": 1}})


def test_the_resolved_config_loads_as_the_same_config(folder: Path):
    text = SMALL.replace("enabled: true", "enabled: true, run_configuration: {validation_dataset: val.json}")
    text = text.replace("{policy: local}", "{policy: {_type: local, model: 'costs 5 $${X} a $'}}")
    write(folder, "[]", "project/val.json")
    write(folder, (folder / "my_agent.py").read_text(), "project/my_own.py")
    text = text.replace("my_agent:correct", "my_own:correct")
    config = load_config(write(folder, text, "project/config.yml"), ["finetuning.num_epochs=5"])
    again = load_config(write(folder, resolved_yaml(config), "runs/one/config.yml"))
    assert again == config
    assert resolved_yaml(again) == resolved_yaml(config)


def test_names_that_may_be_left_out_are_only_checked_when_they_are_there(folder: Path):
    class JudgeConfig(EvaluatorConfig, name="judge"):
        """One model, or several, or none."""

        model: LlmRef | None = None
        others: list[LlmRef] = Field(default_factory=list)
        panel: Annotated[list[str] | None, ReferenceTo("llms")] = None

    async def build(config, builder):
        yield config

    register_evaluator(config_type=JudgeConfig)(build)
    text = SMALL.replace("my_agent:correct", "{_type: judge}")
    assert load_config(write(folder, text)).eval.evaluators == {"correct": JudgeConfig()}
    for keys in ("model: x", "others: [policy, x]", "panel: [x]"):
        with pytest.raises(ConfigError, match=r"'llms' has no model 'x'\. Allowed: policy"):
            load_config(write(folder, SMALL.replace("my_agent:correct", f"{{_type: judge, {keys}}}")))


@pytest.mark.parametrize("left_out", ["", ", trainer: null"])
def test_a_block_that_is_made_in_python_and_one_of_a_file_mean_the_same_components(
    folder: Path, left_out: str
):
    own = "trainers: {mine: epochs}\n"
    text = SMALL.replace("enabled: true", f"enabled: true{left_out}")
    from_file = load_config(write(folder, own + text))
    block = FinetuneConfig(enabled=True)
    made = parse_config(
        {
            "trainers": {"mine": "epochs"},
            "llms": {"policy": "local"},
            "workflow": "my_agent:play",
            "eval": {"general": {"dataset": "train.jsonl"}, "evaluators": {"correct": "my_agent:correct"}},
            "finetuning": block,
        }
    )
    for config in (from_file, made):
        finetuning = config.finetuning
        named = (finetuning.trainer, finetuning.trajectory_builder, finetuning.trainer_adapter)
        assert named == ("mine", "grpo", "local")
    assert (block.trainer, block.reward_function) == ("epochs", None), "the block is copied"


def test_a_component_that_a_block_names_is_looked_for_in_its_section(folder: Path):
    text = SMALL.replace("enabled: true", "enabled: true, trainer: epochs")
    with pytest.raises(ConfigError, match="'trainers' has no trainer 'epochs'"):
        load_config(write(folder, "trainers: {mine: epochs}\n" + text))


def test_a_config_that_does_not_train_may_leave_open_which_component_is_meant(folder: Path):
    config = load_config(write(folder, "trainer_adapters: {a: local, b: local}\n"))
    assert config.finetuning.trainer_adapter is None
    write(folder, resolved_yaml(config), "again.yml")
    assert load_config("again.yml").finetuning.trainer_adapter is None
