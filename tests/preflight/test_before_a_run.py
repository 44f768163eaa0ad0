"""Before a run: own algorithms, services, and the estimate."""

from __future__ import annotations

import pytest
import torch

import etude
from etude.algorithms.grpo import ReinforcePP, Rloo
from etude.algorithms.malt import Malt
from etude.config.load import parse_config
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.preflight.doctor import examine_services
from etude.preflight.estimate import episode_counts, estimate_run
from etude.preflight.finding import Findings
from etude.preflight.own_algorithm import is_custom, try_algorithm
from tests.json_server import JsonServer


def config(*, enabled=True, replace_flat_groups=0, **finetuning):
    builder = {"_type": "grpo", "num_generations": 4, "examples_per_epoch": 10}
    builder["replace_flat_groups"] = replace_flat_groups
    made = parse_config({"trajectory_builders": {"grpo": builder}, "finetuning": finetuning})
    return made.model_copy(update={"finetuning": made.finetuning.model_copy(update={"enabled": enabled})})


@pytest.mark.parametrize(
    ("epochs", "interval", "validations"), [(1, 5, 2), (5, 5, 2), (6, 5, 3), (10, 5, 3), (3, 1, 4)]
)
def test_validations_are_before_at_intervals_and_at_the_end(epochs, interval, validations):
    settings = config(num_epochs=epochs, run_configuration={"validation_interval": interval})
    assert episode_counts(settings, 100, 7) == (epochs * 10 * 4, validations * 7)


def test_an_epoch_has_no_more_examples_than_there_are():
    assert episode_counts(config(num_epochs=2), 3, 0) == (2 * 3 * 4, 0)
    # An evaluation plays each once.
    assert episode_counts(config(enabled=False, num_epochs=2), 3, 0) == (0, 3)


@pytest.mark.parametrize(("examples", "played"), [(100, 14), (12, 12), (3, 3)])
def test_examples_that_replace_flat_groups_are_counted(examples, played):
    settings = config(num_epochs=2, replace_flat_groups=4)
    assert episode_counts(settings, examples, 0) == (2 * played * 4, 0)
    assumptions = estimate_run(settings, examples, 0, 50.0).assumptions
    assert any("in place of flat ones" in each for each in assumptions) is (examples > 10)


def own(base=etude.Grpo, **methods):
    """An algorithm that overrides methods of another one."""
    return type("Own", (base,), {"__module__": __name__, "__qualname__": "Own", **methods}, name="")()


GOOD = {
    "one of ours with another name": own(),
    "tensors for advantages": own(advantages=lambda self, group: torch.ones(len(group), 1)),
    "another loss": own(loss=lambda self, logprobs_BT, batch: (logprobs_BT.sum(), {"a": torch.ones(())})),
    "pairs": own(etude.Dpo, pair_loss=lambda self, margin_P: torch.relu(1 - margin_P)),
    "no data without plays": own(Malt),
    "imitation": own(etude.ExpertIteration),
    "over the whole batch": own(ReinforcePP),
    "rloo": own(Rloo),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("examples", [[], [Example("a", {"question": "?"}), Example("b")]])
def test_what_works_is_not_complained_about(name, examples):
    assert is_custom(GOOD[name])
    try_algorithm(GOOD[name], examples)


def raising(self, *arguments):
    raise ValueError("boom")


def undefined(self, group, tally):
    return missing  # noqa: F821


HERE = r"test_before_a_run\.py:\d+: "


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"samples": raising}, rf"Own\.raising raised .*{HERE}ValueError: boom"),
        ({"samples": undefined}, rf"Own\.undefined raised .*{HERE}NameError"),
        ({"samples": lambda self, group, tally: [1]}, r"returned a list \(\[1\]\), and `Sequence\[Sample "),
        ({"compare": lambda self, rewards: [1.0]}, r"what it returned cannot be used \(it has compare\)"),
        ({"advantages": lambda self, group: [0.5 for _ in group]}, r"<lambda> returned a list \(\[0\.5, "),
        ({"advantages": lambda self, group: [[0.5, 1.0]] * 4}, r"with 1 turns got \[0\.5, 1\.0\]"),
        ({"advantages": lambda self, group: [[float("nan")]] * 4}, r"with 1 turns got \[nan\]"),
        ({"loss": lambda self, logprobs, batch: logprobs.sum()}, "<lambda> returned a Tensor"),
        ({"loss": lambda self, logprobs, batch: (logprobs, {})}, "only for scalar outputs"),
        ({"loss": lambda self, logprobs, batch: (batch.weights_BT.sum(), {})}, "it has no gradient"),
        ({"loss": lambda self, logprobs, batch: (logprobs.sum().log(), {})}, "is not finite: it is nan"),
        ({"loss": lambda self, logprobs, batch: (logprobs.sum(), {"a": "b"})}, "expected, found a str"),
        ({"loss": lambda self, logprobs, batch: (logprobs * batch.reference_BT, {})}, "raised .*TypeError"),
    ],
)
def test_what_is_wrong_is_said_with_the_method_or_the_line(methods, message):
    with pytest.raises(RequestError, match=message):
        try_algorithm(own(**methods), [])


GONE = "http://127.0.0.1:9/v1"


async def examined(url: str, **more) -> list[tuple[str, str, str]]:
    policy = {"_type": "openai", "model_name": "tiny", "base_url": url, "api_key": "canary-services-1"}
    config = parse_config({"llms": {"policy": policy}, **more})
    findings = Findings()
    await examine_services(config, findings)
    return [(each.what, each.status, each.detail) for each in findings.items]


async def test_a_model_answers_one_call(tmp_path):
    message = {"role": "assistant", "content": "yes"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    with JsonServer(lambda path, headers, body: (200, {"model": "tiny", "choices": choices})) as server:
        (answered, stored) = await examined(server.url, storage=f"file://{tmp_path}")
    assert answered[:2] == ("model policy", "ok") and "answered a call in" in answered[2]
    assert stored[:2] == ("storage", "ok")


async def test_a_model_that_is_not_there():
    [(_, status, detail)] = await examined(GONE)
    assert status == "error" and "base_url" in detail and "canary" not in detail


async def test_a_backend_that_does_not_answer(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "a?"}\n')
    found = await examined(
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
