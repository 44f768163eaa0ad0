"""Before a run: services, and the number of its episodes."""

from unittest.mock import AsyncMock

import pytest

import etude
from etude.backends.lm_server import LmServerAdapter
from etude.config.load import parse_config
from etude.core.episode import Example, LoggedExample, count_episodes
from etude.core.errors import RequestError
from etude.preflight.check import examine_services
from etude.preflight.estimate import episode_counts
from etude.preflight.finding import Findings
from tests.json_server import JsonServer, chat_completion


def config(*, enabled=True, replace_flat_groups=0, **finetuning):
    builder = {"_type": "grpo", "num_generations": 4, "examples_per_epoch": 10}
    builder["replace_flat_groups"] = replace_flat_groups
    made = parse_config({"trajectory_builders": {"grpo": builder}, "finetuning": finetuning})
    return made.model_copy(update={"finetuning": made.finetuning.model_copy(update={"enabled": enabled})})


def examples(count):
    return [Example(str(n)) for n in range(count)]


@pytest.mark.parametrize(
    ("epochs", "interval", "validations"), [(1, 5, 2), (5, 5, 2), (6, 5, 3), (10, 5, 3), (3, 1, 4)]
)
def test_validations_are_before_at_intervals_and_at_the_end(epochs, interval, validations):
    settings = config(num_epochs=epochs, run_configuration={"validation_interval": interval})
    assert episode_counts(settings, examples(100), 7) == (epochs * 10 * 4, validations * 7)


@pytest.mark.parametrize(("count", "played"), [(100, 14), (12, 12), (3, 3)])
def test_examples_that_replace_flat_groups_are_counted(count, played):
    settings = config(num_epochs=2, replace_flat_groups=4)
    assert episode_counts(settings, examples(count), 0) == (2 * played * 4, 0)
    # An evaluation plays each once.
    assert episode_counts(config(enabled=False), examples(count), 0) == (0, count)


def test_all_episodes_of_a_log_are_counted():
    logged = [LoggedExample(str(n), episodes=n, read=lambda n: None, origin="log") for n in (1, 2, 9)]
    assert episode_counts(config(num_epochs=2), logged, 0) == (2 * 12, 0)
    assert count_episodes([*logged, Example("played")], 4) == 16


GONE = "http://127.0.0.1:9/v1"


async def examine(url: str, **more) -> list[tuple[str, str, str]]:
    policy = {"_type": "openai", "model_name": "tiny", "base_url": url, "api_key": "canary-services-1"}
    config = parse_config({"llms": {"policy": policy}, **more})
    findings = Findings()
    await examine_services(config, findings)
    return [(each.what, each.status, each.detail) for each in findings.items]


async def test_a_model_answers_one_call(tmp_path):
    with JsonServer(lambda path, headers, body: (200, chat_completion("tiny", "yes"))) as server:
        (answered, stored) = await examine(server.url, storage=f"file://{tmp_path}")
    assert answered[:2] == ("model policy", "ok") and "tiny answered" in answered[2]
    assert stored[:2] == ("storage", "ok")


async def test_a_model_that_is_not_there():
    [(_, status, detail)] = await examine(GONE)
    assert status == "error" and "base_url" in detail and "canary" not in detail


@pytest.mark.parametrize("error", [None, KeyError("of an own adapter")])
async def test_a_backend_that_does_not_answer(tmp_path, monkeypatch, error):
    if error is not None:
        monkeypatch.setattr(LmServerAdapter, "is_healthy", AsyncMock(side_effect=error))
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "a?"}\n')
    found = await examine(
        GONE,
        workflow="tests.processes.fragile:play",
        eval={
            "general": {"dataset": str(tmp_path / "train.jsonl")},
            "evaluators": {"length": "tests.processes.fragile:length"},
        },
        trainer_adapters={"lm_server": {"_type": "lm_server", "base_url": "http://127.0.0.1:9"}},
        finetuning={"enabled": True, "trainer_adapter": "lm_server"},
    )
    assert ("backend lm_server", "error") in [each[:2] for each in found]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retry": "no"}, "retry .*True or False, found 'no'"),
        ({"progress": "yes"}, "progress .*True, False .*Progress"),
        ({"output_dir": None}, "output_dir .*folder, found None"),
        ({"overrides": "seed=1"}, "overrides .*list .*, found 'seed=1'"),
    ],
)
def test_arguments_of_wrong_types_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        etude.resume("no-run", **arguments)


@pytest.mark.parametrize("name", ["epochs", "patience", "warm_up", "validation_interval"])
def test_a_setting_of_training_is_refused_in_an_evaluation(name):
    with pytest.raises(RequestError, match=f"{name}: .*evaluation"):
        etude.evaluate("config.yml", **{name: 3})
