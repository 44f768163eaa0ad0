"""Mistakes of a new user, and the facts of the answer to each."""

import re
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


MISTAKES = [
    ("finetuning:", "finetuning:\n  num_epoch: 3", "11:3", r"'num_epochs'\? .*: enabled, "),
    (
        "    _type: local",
        "    _type: local\n    modle: tiny",
        "4:5",
        r"'llms.policy.modle' .*'model'\? .*: prices, model",
    ),
    ("finetuning:", "finetuning:\n  num_epochs: abc", "11:3", "integer, found 'abc'"),
    (
        "finetuning:",
        "trainer_adapters: {a: {_type: local, token_budget: -1}}\nfinetuning:",
        "10:38",
        "found -1",
    ),
    ("finetuning:", "finetuning:\n  target_functions: [a, 7]", "11:25", r"\.1: .*string"),
    ("llms:\n  policy:\n    _type: local", "llms:\n  - _type: local", "1:1", "dictionary, .*a list"),
    ("llms:\n", "llms:\n  7: local\n", "2:3", "'7' .*in quotes"),
    ("my_agent:play", "my_agent", "4:1", r"'agent'\? .*: agent, function, "),
    ("    _type: local", "    type: local", "2:3", r"'type' .*'_type'\. .*: local, openai"),
    ("    _type: local", "    _type: opnai", "3:5", r"no model type 'opnai'; .*'openai'\?"),
    ("    _type: local", "    _type: openai", "2:3", "'llms.policy.model_name' is missing"),
    *(
        ("enabled: true", f"enabled: true\n  {key}: {written}", "12:3", answer)
        for key, written, answer in (
            ("num_epochs", "yes", "integer, found 'yes'"),
            ("num_epochs", "true", "number, found true"),
            ("output_dir", "${A_RUN:-${HOME}}", r"'\$\{' .*\$\{NAME\} .*\$\{NAME:-default\}"),
        )
    ),
    (
        "enabled: true",
        "enabled: true\ntrainer_adapters: {local: {_type: local, learning_rate: 1e999}}",
        "12:42",
        "trainer_adapters.local.learning_rate: .*number, found inf",
    ),
    (
        "    _type: local",
        "    _type: openai\n    model_name: m\n    pool: {sise: 3}",
        "5:12",
        r"'llms.policy.pool.sise' .*'size'\? .*: size, idle",
    ),
    (
        "    _type: local",
        "    _type: local\n    model: ${ETUDE_TEST_MODLE}",
        "4:5",
        r"'ETUDE_TEST_MODLE' .*'ETUDE_TEST_MODEL'\? .*: \$\{ETUDE_TEST_MODLE:-",
    ),
    ("finetuning:", "finetuning:\n  trainer: epoch", "11:3", r"'epochs'\? .*: epochs"),
    (
        "workflow: my_agent:play",
        "workflow: {_type: my_agent_workflow, llm: polcy}",
        "4:38",
        r"'llms' has no model 'polcy'; .*'policy'\? .*: policy",
    ),
    ("  enabled: true", "  enabled: true: yes", "11:16", "text with ':' or '{' in quotes"),
    ("train.jsonl", "train.txt", "7:5", r": \.json, \.jsonl, \.csv, \.parquet"),
    ("    _type: local", "    _type: my_agent:play", "3:5", r"decorators etude\."),
    ("workflow: my_agent:play\n", "", "1:1", "'workflow' is missing, and finetuning"),
    ("  evaluators:\n    correct: my_agent:correct\n", "", "5:1", "'eval.evaluators' is missing, and"),
    (
        "    correct: my_agent:correct",
        "    correct: my_agent:correct\n    other: my_agent:correct",
        "11:1",
        "'finetuning.reward_function' .*'eval.evaluators' has several; .*: correct, other",
    ),
    (
        "    _type: local",
        "    _type: openai\n    api_key: '**********'\n    model_name: m",
        "4:5",
        "secrets; .*-o llms.policy.api_key=…",
    ),
]
"""The text of `GOOD` that is replaced, its replacement, the place, and a pattern of the answer."""


@pytest.mark.parametrize(("text", "mistake", "place", "answer"), MISTAKES)
def test_a_mistake_is_answered_in_one_line_with_its_place_and_what_to_write(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, mistake: str, place: str, answer: str
):
    monkeypatch.setenv("ETUDE_TEST_MODEL", "tiny")
    assert text in GOOD
    said = complaint(folder, GOOD.replace(text, mistake))
    assert said.startswith(f"config.yml:{place}: ") and "\n" not in said
    assert re.search(answer, said)


@pytest.mark.parametrize(
    ("text", "place", "answer"),
    [
        ("", "", "empty; `etude init`"),
        ("- llms\n", ":1:1", "mapping .*found a list"),
        ("llms\n", ":1:1", "mapping .*found 'llms'"),
        ("a: 1\n---\nb: 2\n", ":2:1", "found another document"),
        ("a: {b: ${HOME}}\n", ":1:9", "text with ':' or '{' in quotes"),
        ("null: 1\n", ":1:1", "key 'None' is not text"),
        ("a: &x [*x]\n", "", "alias"),
    ],
)
def test_a_file_that_holds_no_config(folder: Path, text: str, place: str, answer: str):
    said = complaint(folder, text)
    assert said.startswith(f"config.yml{place}: ") and re.search(answer, said)


def test_a_file_that_cannot_be_read_is_no_config(folder: Path):
    (folder / "config.yml").write_bytes(b"\xff\xfe\x00")
    for name, answer in {
        "confg.yml": "did you mean config.yml",
        "nowhere/c.yml": "no config file nowhere/c.yml",
        ".": "folder.*config.yml",
        "config.yml": "config.yml: .*UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=answer):
            load_config(name)


def test_everything_wrong_is_told_at_once_in_the_order_of_the_file(folder: Path):
    said = complaint(
        folder,
        GOOD.replace("_type: local", "_type: opnai")
        .replace("my_agent:correct", "my_agent:corect")
        .replace("enabled: true", "enabled: true\n  num_epoch: 3\n  seed: -1"),
        ("finetuning.error_budgt=1",),
    )
    assert [line.split(": ")[0] for line in said.splitlines()] == [
        "config.yml:3:5",
        "config.yml:9:5",
        "config.yml:12:3",
        "config.yml:13:3",
        "-o finetuning.error_budgt",
    ]


def test_a_wrong_override_is_named_as_it_was_typed(folder: Path):
    said = complaint(folder, GOOD, ("finetuning.num_epoch=3", "finetuning.seed.x=3"))
    wrong, unknown = said.splitlines()
    assert unknown.startswith("-o finetuning.num_epoch: ") and "did you mean 'num_epochs'" in unknown
    assert wrong.startswith("-o finetuning.seed.x: ") and wrong.endswith("found a mapping")
    below = complaint(folder, f"{GOOD}  seed: 1\n", ("finetuning.seed.x=3",))
    assert below.startswith("-o finetuning.seed.x: ") and below.endswith("found a mapping")


def test_what_the_environment_holds_or_looks_like_a_secret_is_never_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ETUDE_TEST_SECRET", "hunter2")
    said = complaint(folder, GOOD.replace("enabled: true", "enabled: true\n  seed: ${ETUDE_TEST_SECRET}"))
    assert said.startswith("config.yml:12:3: finetuning.seed: ") and "hunter2" not in said
    key = "_type: openai\n    model_name: m\n    api_key: 7777777"
    said = complaint(folder, GOOD.replace("_type: local", key))
    assert said.startswith("config.yml:5:5: llms.policy.api_key: ") and "7777777" not in said
