"""Mistakes of a new user, and the sentence that answers each."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config.load import load_config
from etude.core.errors import ConfigError

GOOD = """\
llms:
  policy:
    _type: local
workflow: my_agent:play
eval:
  general:
    dataset: train.jsonl
  evaluators:
    correct: my_agent:correct
finetuning:
  enabled: true
"""


def complaint(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    """The error text for a config file of this text."""
    (folder / "config.yml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config("config.yml", overrides)
    assert raised.value.exit_code == 2
    return str(raised.value)


def test_the_config_that_the_mistakes_are_made_in_is_right(folder: Path):
    (folder / "config.yml").write_text(GOOD)
    assert load_config("config.yml").finetuning.enabled


MISTAKES = {
    "misspelt key": (
        "finetuning:",
        "finetuning:\n  num_epoch: 3",
        "config.yml:11:3: key 'finetuning.num_epoch' is not known; did you mean 'num_epochs'? Allowed: "
        "enabled, trainer, trajectory_builder, trainer_adapter, reward_function, target_functions, "
        "target_model, targets, curriculum_learning, warm_up, fine_tune_from_scratch, collect_ahead, "
        "num_epochs, output_dir, "
        "seed, deterministic, error_budget, alarms, run_configuration",
    ),
    "key at the wrong level": (
        "  general:",
        "  max_concurrency: 4\n  general:",
        "config.yml:6:3: key 'eval.max_concurrency' is not known here; it belongs in 'eval.general'. "
        "Allowed: general, evaluators",
    ),
    "misspelt key of a component": (
        "    _type: local",
        "    _type: local\n    modle: tiny",
        "config.yml:4:5: key 'llms.policy.modle' is not known; did you mean 'model'? Allowed: "
        "prices, budget, model",
    ),
    "wrong type": (
        "finetuning:",
        "finetuning:\n  num_epochs: abc",
        "config.yml:11:3: finetuning.num_epochs: expected an integer >= 1, found 'abc'",
    ),
    "out of two bounds, in one line": (
        "finetuning:",
        "finetuning:\n  curriculum_learning: {initial_percentile: 30}",
        "config.yml:11:25: finetuning.curriculum_learning.initial_percentile: "
        "expected a number > 0 and <= 1, found 30",
    ),
    "empty list": (
        "finetuning:",
        "finetuning:\n  target_functions: []",
        "config.yml:11:3: finetuning.target_functions: expected a list of texts of length >= 1, found a list",
    ),
    "wrong item of a list": (
        "finetuning:",
        "finetuning:\n  target_functions: [a, 7]",
        "config.yml:11:25: finetuning.target_functions.1: expected text, found 7; put it in quotes",
    ),
    "text in place of a mapping": (
        "finetuning:",
        "finetuning:\n  reward_function: correct",
        "config.yml:11:3: finetuning.reward_function: expected a mapping with the keys name, found 'correct'",
    ),
    "list in place of a mapping of components": (
        "llms:\n  policy:\n    _type: local",
        "llms:\n  - _type: local",
        "config.yml:1:1: llms: expected a mapping, found a list",
    ),
    "key that is no text": (
        "llms:\n",
        "llms:\n  7: local\n",
        "config.yml:2:3: key '7' is not text; put it in quotes",
    ),
    "module without function": (
        "workflow: my_agent:play",
        "workflow: my_agent",
        "config.yml:4:1: workflow: there is no workflow type 'my_agent'; did you mean "
        "'my_agent_workflow'? Allowed: function, my_agent_workflow. "
        "A Python function is written module:name",
    ),
    "type without underscore": (
        "    _type: local",
        "    type: local",
        "config.yml:2:3: key 'llms.policy._type' is missing; 'type' is written '_type'. "
        "Allowed: local, openai",
    ),
    "unknown type": (
        "    _type: local",
        "    _type: opnai",
        "config.yml:3:5: llms.policy: there is no model type 'opnai'; did you mean 'openai'? "
        "Allowed: local, openai",
    ),
    "type of another kind": (
        "    _type: local",
        "    _type: grpo",
        "config.yml:3:5: llms.policy: 'grpo' is registered as trajectory builder, not as model. "
        "Allowed: local, openai",
    ),
    "missing key": (
        "    _type: local",
        "    _type: openai",
        "config.yml:2:3: key 'llms.policy.model_name' is missing; it takes text",
    ),
    "text that YAML takes for something else": (
        "    _type: local",
        "    _type: openai\n    model_name: true",
        "config.yml:4:5: llms.policy.model_name: expected text, found true; put it in quotes",
    ),
    **{
        f"{written} is no number": (
            "enabled: true",
            f"enabled: true\n  num_epochs: {written}",
            f"config.yml:12:3: finetuning.num_epochs: expected an integer >= 1, found {found}",
        )
        for written, found in (("yes", "'yes'"), ("1:30", "'1:30'"), ("true", "true"), ("0b11", "'0b11'"))
    },
    **{
        f"{written} is no share": (
            "enabled: true",
            f"enabled: true\n  error_budget: {written}",
            f"config.yml:12:3: finetuning.error_budget: expected a number >= 0 and <= 1, found {found}",
        )
        for written, found in (("yes", "'yes'"), ("false", "false"), (".nan", "nan"))
    },
    **{
        f"{written} is no rate": (
            "enabled: true",
            f"enabled: true\ntrainer_adapters: {{local: {{_type: local, learning_rate: {written}}}}}",
            "config.yml:12:42: trainer_adapters.local.learning_rate: expected a finite number, found inf",
        )
        for written in (".inf", "1e999", "'inf'")
    },
    "a reference in a reference": (
        "enabled: true",
        "enabled: true\n  output_dir: ${A_RUN:-${HOME}}",
        "config.yml:12:3: finetuning.output_dir: the default of 'A_RUN' holds another reference, which "
        "is not read; write a plain default",
    ),
    "misspelt key deep in a component": (
        "    _type: local",
        "    _type: openai\n    model_name: m\n    pool: {sise: 3}",
        "config.yml:5:12: key 'llms.policy.pool.sise' is not known; did you mean 'size'? Allowed: size, idle",
    ),
    "missing variable": (
        "    _type: local",
        "    _type: local\n    model: ${ETUDE_TEST_MODLE}",
        "config.yml:4:5: llms.policy.model: the environment variable 'ETUDE_TEST_MODLE' is not set; "
        "did you mean 'ETUDE_TEST_MODEL'? Set it, or give a default: ${ETUDE_TEST_MODLE:-default}",
    ),
    "broken reference to a variable": (
        "    _type: local",
        "    _type: local\n    model: ${1}",
        "config.yml:4:5: llms.policy.model: '${' must begin ${NAME} or ${NAME:-default}; "
        "write $${ for the text itself",
    ),
    "missing cross reference": (
        "finetuning:",
        "finetuning:\n  trainer: epoch",
        "config.yml:11:3: finetuning.trainer: 'trainers' has no trainer 'epoch'; did you mean 'epochs'? "
        "Allowed: epochs",
    ),
    "component that refers to a missing model": (
        "workflow: my_agent:play",
        "workflow: {_type: my_agent_workflow, llm: polcy}",
        "config.yml:4:38: workflow.llm: 'llms' has no model 'polcy'; did you mean 'policy'? Allowed: policy",
    ),
    "colon in a value": (
        "  enabled: true",
        "  enabled: true: yes",
        "config.yml:11:16: not valid YAML: mapping values are not allowed here; check the indentation, "
        "or put a value that holds ': ' in quotes",
    ),
    "dataset of an unknown format": (
        "    dataset: train.jsonl",
        "    dataset: train.txt",
        "config.yml:7:5: eval.general.dataset: the suffix of 'train.txt' does not tell its format"
        ". Allowed: .json, .jsonl, .csv, .parquet",
    ),
    "module that is not there": (
        "workflow: my_agent:play",
        "workflow: {_type: function, function: my_agnt:play}",
        "config.yml:4:12: workflow: cannot import 'my_agnt:play': there is no module 'my_agnt' in "
        "FOLDER or the installed packages; did you mean 'my_agent'?",
    ),
    "plain function where a component is needed": (
        "    _type: local",
        "    _type: my_agent:play",
        "config.yml:3:5: llms.policy: 'my_agent:play' is not registered as model: "
        "it needs one of the decorators etude.register_…",
    ),
    "no workflow": (
        "workflow: my_agent:play\n",
        "",
        "config.yml:1:1: key 'workflow' is missing, and finetuning is enabled; "
        "add your agent, such as `workflow: my_agent:play`",
    ),
    "no evaluator": (
        "  evaluators:\n    correct: my_agent:correct\n",
        "",
        "config.yml:5:1: key 'eval.evaluators' is missing, and finetuning is enabled; add what scores an "
        "episode, such as `eval: {evaluators: {correct: my_agent:correct}}`",
    ),
    "several evaluators": (
        "    correct: my_agent:correct",
        "    correct: my_agent:correct\n    other: my_agent:correct",
        "config.yml:11:1: key 'finetuning.reward_function' is missing: 'eval.evaluators' has several; "
        "name one of: correct, other",
    ),
    "masked secret": (
        "    _type: local",
        "    _type: openai\n    api_key: '**********'\n    model_name: m",
        "config.yml:4:5: llms.policy.api_key: secrets are not kept in run folders; "
        "give it again: -o llms.policy.api_key=…",
    ),
}
"""The line of `GOOD` that is replaced, its replacement, and the whole answer."""


@pytest.mark.parametrize(("line", "mistake", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_with_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, mistake: str, expected: str
):
    monkeypatch.setenv("ETUDE_TEST_MODEL", "tiny")
    assert GOOD.count(line) == 1 or line.endswith(":")
    said = complaint(folder, GOOD.replace(line, mistake))
    assert said.replace(str(folder), "FOLDER") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "config.yml: the file is empty; `etude init` writes a config to start from"),
        ("- llms\n", "config.yml:1:1: expected a mapping of keys to values, found a list"),
        ("llms\n", "config.yml:1:1: expected a mapping of keys to values, found 'llms'"),
        (
            "a: 1\n---\nb: 2\n",
            "config.yml:2:1: not valid YAML: found another document; keep one document; "
            "remove the line '---'",
        ),
        (
            "a: {b: ${HOME}}\n",
            "config.yml:1:9: not valid YAML: expected ',' or '}', but got '{'; put a value that holds '${' "
            "in quotes",
        ),
        ("null: 1\n", "config.yml:1:1: key 'None' is not text; put it in quotes"),
        (
            "a: 'b\n",
            "config.yml:2:1: not valid YAML: found unexpected end of stream; a text in quotes ends with one",
        ),
        ("a: &x [*x]\n", "config.yml:1:4: not valid YAML: an alias refers to itself"),
        ("a: !!bool maybe\n", "config.yml:1:4: not valid YAML: 'maybe' is neither true nor false"),
    ],
)
def test_a_file_that_holds_no_config(folder: Path, text: str, expected: str):
    assert complaint(folder, text) == expected


def test_a_missing_file_is_named_with_its_neighbour(folder: Path):
    (folder / "config.yml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"^there is no config file confg.yml; did you mean config.yml\?$"):
        load_config("confg.yml")
    with pytest.raises(
        ConfigError, match=r"^there is no config file nowhere/c.yml: there is no folder nowhere$"
    ):
        load_config("nowhere/c.yml")


def test_a_folder_or_a_binary_file_is_no_config(folder: Path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(folder)
    (folder / "config.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config.yml:1: not a text file in UTF-8"):
        load_config("config.yml")


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file(folder: Path):
    said = complaint(
        folder,
        GOOD.replace("_type: local", "_type: opnai")
        .replace("my_agent:correct", "my_agent:corect")
        .replace("enabled: true", "enabled: true\n  num_epoch: 3\n  seed: -1\n  trainer: epoch"),
        ("finetuning.error_budgt=1",),
    )
    assert [line.split(": ")[0] for line in said.splitlines()] == [
        "config.yml:3:5",
        "config.yml:9:5",
        "config.yml:12:3",
        "config.yml:13:3",
        "config.yml:14:3",
        "-o finetuning.error_budgt",
    ]


def test_a_wrong_override_is_named_as_it_was_typed(folder: Path):
    assert complaint(folder, GOOD, ("finetuning.num_epoch=3",)).startswith(
        "-o finetuning.num_epoch: key 'finetuning.num_epoch' is not known; did you mean 'num_epochs'?"
    )
    assert (
        complaint(folder, GOOD, ("finetuning.num_epochs.x=3",))
        == "-o finetuning.num_epochs.x: finetuning.num_epochs: expected an integer >= 1, found a mapping"
    )


def test_what_the_environment_holds_is_never_shown(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ETUDE_TEST_SECRET", "hunter2")
    said = complaint(folder, GOOD.replace("enabled: true", "enabled: true\n  seed: ${ETUDE_TEST_SECRET}"))
    assert said == (
        "config.yml:12:3: finetuning.seed: expected an integer >= 0, "
        "found what ${ETUDE_TEST_SECRET} stands for"
    )


def test_what_looks_like_a_secret_is_never_shown(folder: Path):
    said = complaint(
        folder, GOOD.replace("_type: local", "_type: openai\n    model_name: m\n    api_key: 7777777")
    )
    assert (
        said
        == "config.yml:5:5: llms.policy.api_key: expected text, found something of type int; put it in quotes"
    )
