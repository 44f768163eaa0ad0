"""Configs of the NeMo Agent Toolkit, taken over: what is mapped, what is said of the rest."""

import contextlib
import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from etude.core.errors import ConfigError, EtudeError, RequestError
from etude.integrations.nat.import_config import agent_file, function_names, import_nat, write_project
from tests.cli import parts
from tests.cli.projects import etude

RL = """
general:
  telemetry: {logging: {console: {_type: console, level: INFO}}}
llms:
  policy:
    _type: openai
    model_name: tictactoe
    base_url: http://gpu:8000/v1
    api_key: default
    temperature: 0.7
    logprobs: true
    top_logprobs: 1
    parallel_tool_calls: false
  opponent:
    _type: nim
    model_name: meta/llama-3.1-8b-instruct
workflow:
  _type: rl_with_openpipe_art
  player_model: policy
eval:
  general:
    max_concurrency: 16
    output_dir: out/eval
    output: {cleanup: true}
    dataset:
      _type: json
      file_path: data/data.json
      structure: {question_key: prompt, answer_key: target}
  evaluators:
    rl_accuracy: {_type: rl_accuracy}
    step-value: {_type: step_value_computation}
trajectory_builders:
  openpipe_traj_builder: {_type: openpipe_art_traj_builder, num_generations: 4}
trainer_adapters:
  openpipe_trainer_adapter:
    _type: openpipe_art_trainer_adapter
    backend:
      ip: gpu
      port: 7623
      name: tictactoe
      project: demo
      base_model: Qwen/Qwen2.5-3B-Instruct
      api_key: default
      init_args: {max_seq_length: 8192}
      engine_args: {gpu_memory_utilization: 0.9, tensor_parallel_size: 1}
    training: {beta: 0.1, learning_rate: 1.0e-5, weight_decay: 0.01}
trainers:
  openpipe_trainer: {_type: openpipe_art_trainer}
finetuning:
  enabled: true
  trainer: openpipe_trainer
  trajectory_builder: openpipe_traj_builder
  trainer_adapter: openpipe_trainer_adapter
  reward_function: {name: rl_accuracy}
  target_functions: [player]
  target_model: tictactoe
  num_epochs: 8
  output_dir: out/finetuning
  curriculum_learning:
    enabled: true
    initial_percentile: 0.3
    min_reward_diff: -0.5
    random_subsample: 5.0
"""

DPO = """
llms:
  player: {_type: openai, model_name: tiny, max_tokens: 16}
workflow: {_type: dpo_tic_tac_toe}
eval:
  general:
    dataset: {_type: csv, file_path: rows.csv}
  evaluators:
    won: {_type: won}
trajectory_builders:
  pairs: {_type: dpo_traj_builder, ttc_step_name: move, exhaustive_pairs: false, max_pairs_per_turn: 2}
trainer_adapters:
  customizer:
    _type: nemo_customizer_trainer_adapter
    entity_host: https://nmp.example.com
    datastore_host: https://data.example.com
    namespace: dpo
    customization_config: meta/llama@v1
    hyperparameters:
      training_type: dpo
      finetuning_type: lora
      epochs: 2
      learning_rate: 1.0e-4
      dpo: {ref_policy_kl_penalty: 0.2, sft_loss_weight: 0.1}
    deploy_on_completion: true
trainers:
  runs: {_type: nemo_customizer_trainer, num_runs: 3, deduplicate_pairs: true}
finetuning:
  enabled: true
  trainer: runs
  trajectory_builder: pairs
  trainer_adapter: customizer
  reward_function: {name: won}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = [{"id": str(n), "prompt": f"question {n}", "target": "yes"} for n in range(4)]
    (tmp_path / "data" / "data.json").write_text(json.dumps(rows))
    (tmp_path / "rows.csv").write_text("id,question,answer\n1,hello?,yes\n2,hi?,no\n")
    return tmp_path


def taken_over(text, **options):
    path = Path("nat.yml")
    path.write_text(text)
    return import_nat(path, **options)


def said(imported):
    """All that is said of each key."""
    told = {}
    for note in imported.notes:
        told[note.key] = f"{told.get(note.key, '')} {note.message}"
    return told


def test_a_config_for_art_is_one_that_is_checked_without_complaint(folder, monkeypatch):
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-test")
    (folder / "nat.yml").write_text(RL)
    shown = etude("import-nat", "nat.yml", "agent")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.rstrip().endswith("next: cd agent && etude check config.yml")
    checked = etude("check", "agent/config.yml")
    assert checked.exit_code == 0, checked.stdout
    assert "grpo data (grpo), trained by openpipe_art" in checked.stdout


def test_a_config_for_customizer_becomes_one_that_trains_here(folder, base):
    (folder / "nat.yml").write_text(DPO)
    shown = etude("import-nat", "nat.yml", "agent", "--model", base, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["files"] == ["config.yml", "agent.py"]
    checked = etude("check", "agent/config.yml")
    assert checked.exit_code == 0, checked.stdout
    assert "dpo data (dpo), trained by local" in checked.stdout


def test_every_block_has_its_counterpart(folder):
    config = taken_over(RL).config
    assert config["llms"]["policy"] == {
        "_type": "openai",
        "model_name": "tictactoe",
        "base_url": "http://gpu:8000/v1",
        "api_key": "default",
        "temperature": 0.7,
        "top_logprobs": 1,
        "provider": "vllm",
    }
    assert config["llms"]["opponent"]["base_url"] == "https://integrate.api.nvidia.com/v1"
    assert config["workflow"] == "agent:play"
    assert config["eval"] == {
        "general": {
            "max_concurrency": 16,
            "output_dir": "out/eval",
            "dataset": {
                "_type": "json",
                "file_path": str(folder / "data" / "data.json"),
                "structure": {"question_key": "prompt", "answer_key": "target"},
            },
        },
        "evaluators": {"rl_accuracy": "agent:rl_accuracy", "step-value": "agent:step_value"},
    }
    assert config["trajectory_builders"] == {"openpipe_traj_builder": {"_type": "grpo", "num_generations": 4}}
    adapter = config["trainer_adapters"]["openpipe_trainer_adapter"]
    assert adapter["_type"] == "openpipe_art"
    assert adapter["backend"] == yaml.safe_load(RL)["trainer_adapters"]["openpipe_trainer_adapter"]["backend"]
    assert adapter["training"] == {
        "beta": 0.1,
        "learning_rate": 1e-5,
        "trainer_args": {"weight_decay": 0.01},
    }
    assert config["trainers"] == {"openpipe_trainer": {"_type": "epochs"}}
    assert config["finetuning"] == {
        "enabled": True,
        "trainer": "openpipe_trainer",
        "trajectory_builder": "openpipe_traj_builder",
        "trainer_adapter": "openpipe_trainer_adapter",
        "num_epochs": 8,
        "output_dir": "out/finetuning",
        "reward_function": {"name": "rl_accuracy"},
        "target_model": "policy",
        "curriculum_learning": {"enabled": True, "initial_percentile": 0.3, "min_reward_diff": 0},
    }


def test_what_could_not_be_taken_over_is_listed_with_its_line(folder):
    imported = taken_over(RL)
    assert set(said(imported)) == {
        "general",
        "llms.policy.parallel_tool_calls",
        "workflow",
        "eval.general.output",
        "eval.evaluators.rl_accuracy",
        "eval.evaluators.step-value",
        "trainer_adapters.openpipe_trainer_adapter.training",
        "finetuning.target_functions",
        "finetuning.curriculum_learning.min_reward_diff",
        "finetuning.curriculum_learning.random_subsample",
    }
    lines = RL.splitlines()
    for note in imported.notes:
        assert note.key.rpartition(".")[2] in lines[note.line - 1], note


def test_a_customizers_options_become_those_of_training_here(folder):
    imported = taken_over(DPO, model="some/model")
    config = imported.config
    assert config["llms"]["player"] == {"_type": "local", "model": "some/model", "max_tokens": 16}
    assert config["trainer_adapters"]["customizer"] == {
        "_type": "local",
        "learning_rate": 1e-4,
        "passes": 2,
        "lora": {},
    }
    assert config["trajectory_builders"]["pairs"] == {
        "_type": "dpo",
        "compare": "turns",
        "num_generations": 1,
        "min_reward_diff": 0.01,
        "pairs": "best_vs_worst",
        "max_pairs_per_group": 2,
        "beta": 0.2,
    }
    assert config["finetuning"]["num_epochs"] == 3
    told = said(imported)
    assert {f"trainer_adapters.customizer.{key}" for key in ("entity_host", "deploy_on_completion")} <= set(
        told
    )
    assert "trainer_adapters.customizer.hyperparameters.dpo.sft_loss_weight" in told
    assert "trainers.runs.deduplicate_pairs" in told
    assert "step reward" in told["trajectory_builders.pairs"]


def test_one_generation_is_no_group(folder):
    imported = taken_over(RL.replace("num_generations: 4", "num_generations: 1"))
    assert imported.config["trajectory_builders"]["openpipe_traj_builder"]["num_generations"] == 2
    assert (
        "one episode is no group"
        in said(imported)["trajectory_builders.openpipe_traj_builder.num_generations"]
    )


def test_the_toolkits_default_of_two_generations_stays(folder):
    imported = taken_over(RL.replace(", num_generations: 4", ""))
    assert imported.config["trajectory_builders"]["openpipe_traj_builder"]["num_generations"] == 2


def test_an_agent_that_is_written_already_is_used(folder):
    imported = taken_over(RL, workflow="my_agent:play")
    assert imported.config["workflow"] == "my_agent:play"
    assert "workflow" not in said(imported)


def test_components_that_were_ported_already_stay_as_they_are(folder):
    assert parts.CountingConfig.type_name == "counting"
    text = re.sub(
        r"customizer:\n.*?\ntrainers:",
        "customizer: {_type: counting, methods: [dpo]}\ntrainers:",
        DPO,
        flags=re.S,
    )
    imported = taken_over(text)
    assert imported.config["trainer_adapters"] == {"customizer": {"_type": "counting", "methods": ["dpo"]}}
    assert imported.config["llms"]["player"]["_type"] == "openai"
    assert not [key for key in said(imported) if key.startswith("trainer_adapters")]


def test_a_dataset_from_a_function_and_one_that_is_not_there(folder):
    custom = "{_type: custom, function: my_pkg.data.load, kwargs: {split: train}}"
    text = re.sub(r"dataset: \{.*\}", f"dataset: {custom}", DPO)
    assert taken_over(text).config["eval"]["general"]["dataset"] == {
        "_type": "python",
        "function": "my_pkg.data:load",
        "arguments": {"split": "train"},
    }
    told = said(taken_over(DPO.replace("rows.csv", "gone.csv")))
    assert "there is no file gone.csv" in told["eval.general.dataset.file_path"]
    told = said(taken_over(DPO.replace("_type: csv", "_type: xls")))
    assert "`_type: xls` is not read here" in told["eval.general.dataset"]


def test_models_and_components_of_other_kinds_are_named(folder):
    text = DPO.replace("_type: openai", "_type: aws_bedrock").replace(
        "_type: dpo_traj_builder", "_type: mine"
    )
    told = said(taken_over(text.replace("nemo_customizer_trainer_adapter", "mine_too")))
    assert "`_type: aws_bedrock` became `openai`" in told["llms.player"]
    assert "`_type: mine` has no counterpart, and became `grpo`" in told["trajectory_builders.pairs"]
    assert "`_type: mine_too` has no counterpart, and became `local`" in told["trainer_adapters.customizer"]


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("llms: [a]", ConfigError, r"nat.yml:1:1: llms: expected a mapping"),
        ("llms: {a: 3}", ConfigError, r"llms.a: expected a mapping"),
        (
            "llms: {a: {_type: openai}}\neval: {general: [1]}",
            ConfigError,
            r"nat.yml:2:8: eval.general: expected",
        ),
        ("workflow: {_type: x}", RequestError, r"nat.yml has no `llms`"),
        ("llms: {", ConfigError, r"not valid YAML"),
        (
            DPO.replace("exhaustive_pairs: false", "min_score_diff: a"),
            ConfigError,
            r"expected a number, found 'a'",
        ),
    ],
)
def test_a_file_that_is_no_such_config_is_refused(folder, text, error, told):
    with pytest.raises(error, match=told):
        taken_over(text)


JUNK = [None, -1.5, "x", [1], {1: 2}]


def paths(data, path=()):
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (*path, key)
        yield from paths(value, (*path, key))


@pytest.mark.parametrize("text", [RL, DPO], ids=["rl", "dpo"])
def test_whatever_a_key_holds_is_taken_over_or_refused(folder, text):
    """Every key of the file with every kind of wrong value."""
    whole = yaml.safe_load(text)
    for path in paths(whole):
        for junk in JUNK:
            *parents, last = path
            data = node = copy.deepcopy(whole)
            for key in parents:
                node = node[key]
            node[last] = junk
            with contextlib.suppress(EtudeError):
                imported = taken_over(yaml.safe_dump(data, sort_keys=False))
                assert set(imported.config) >= {"llms", "workflow", "eval"}, path
                compile(imported.agent or "", "agent.py", "exec")


def test_nothing_is_overwritten(folder):
    (folder / "agent").mkdir()
    (folder / "agent" / "agent.py").write_text("mine")
    imported = taken_over(DPO)
    with pytest.raises(RequestError, match=r"has agent.py already"):
        write_project(imported, Path("nat.yml"), folder / "agent")
    assert (folder / "agent" / "agent.py").read_text() == "mine"


def test_evaluators_get_python_names_that_are_free():
    names = function_names(["accuracy", "step-value", "step value", "class", "1st", "play"])
    assert names == {
        "accuracy": "accuracy",
        "step-value": "step_value",
        "step value": "step_value_",
        "class": "evaluator_class",
        "1st": "evaluator_1st",
        "play": "evaluator_play",
    }
    compile(agent_file('a "config".yml', names), "agent.py", "exec")
