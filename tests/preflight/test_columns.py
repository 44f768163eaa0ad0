"""Before a run: the inputs that are read, own algorithms, services, and the estimate."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import pytest
import torch

import etude
from etude.algorithms.grpo import ReinforcePP, Rloo
from etude.algorithms.malt import Malt
from etude.config.load import parse_config
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.preflight.doctor import examine_services, try_loop
from etude.preflight.estimate import episode_counts
from etude.preflight.finding import Findings
from etude.preflight.user_code import inputs_read, is_custom, try_algorithm
from etude.protocols.workflow import ProtocolWorkflow
from tests.endpoint_process import EndpointProcess


async def plain(example, episode):
    async with nullcontext():
        reply = await episode.chat([{"role": "user", "content": f"{example.inputs['question']}?"}])
    return reply.text


def perhaps(example, episode):
    if episode:
        return example.inputs["one"]
    try:
        return example.inputs["two"]
    except KeyError:
        return [example.inputs["three"] for _ in range(3)]


def asked_for(example, episode):
    return f"{example.inputs['hint']}!" if "hint" in example.inputs else ""


def written(example, episode):
    example.inputs["question"] = 1
    other = {"inputs": 1}
    return other["inputs"], episode.inputs["question"]


def set_before(example, episode):
    example.inputs["hint"] = example.inputs["question"]
    return example.inputs["hint"]


def suppressed(example, episode):
    with suppress(KeyError):
        return example.inputs["question"]


def returned_before(example, episode):
    if example.inputs["kind"] == "text":
        return example.inputs["text"]
    return example.inputs["question"]


class Agent:
    async def __call__(self, example, episode):
        return example.inputs["question"]

    def method(self, example, episode):
        return example.inputs["question"]


SURE = [("question", True)]


@pytest.mark.parametrize(
    ("fn", "reads"),
    [
        (plain, SURE),
        (perhaps, [("one", False), ("two", False), ("three", False)]),
        (asked_for, []),
        (written, []),
        (set_before, SURE),
        (suppressed, [("question", False)]),
        (returned_before, [("kind", False), ("text", False), ("question", False)]),
        (Agent(), SURE),
        (Agent().method, SURE),
        (functools.partial(plain), SURE),
        (functools.lru_cache(plain), SURE),
        (len, []),
        (lambda example, episode: example.inputs["question"], []),
        (ProtocolWorkflow.__call__, []),
    ],
)
def test_the_inputs_that_a_function_reads(fn, reads):
    assert [(read.name, read.is_certain) for read in inputs_read(fn)] == reads


def config(**finetuning):
    builder = {"_type": "grpo", "num_generations": 4, "examples_per_epoch": 10}
    return parse_config({"trajectory_builders": {"grpo": builder}, "finetuning": finetuning})


@pytest.mark.parametrize(
    ("epochs", "interval", "validations"), [(1, 5, 2), (5, 5, 2), (6, 5, 3), (10, 5, 3), (3, 1, 4)]
)
def test_validations_are_before_at_intervals_and_at_the_end(epochs, interval, validations):
    settings = config(num_epochs=epochs, run_configuration={"validation_interval": interval})
    assert episode_counts(settings, 100, 7) == (epochs * 10 * 4, validations * 7)


def test_an_epoch_has_no_more_examples_than_there_are():
    assert episode_counts(config(num_epochs=2), 3, 0) == (2 * 3 * 4, 0)


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


HERE = r"test_columns\.py:\d+: "


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"samples": raising}, rf"Own\.raising raised .*{HERE}ValueError: boom"),
        ({"samples": undefined}, rf"Own\.undefined raised .*{HERE}NameError"),
        ({"samples": lambda self, group, tally: [1]}, r"returned a list \(\[1\]\), and `Sequence\[Sample "),
        ({"groups": lambda self, *given: None}, r"<lambda> returned None, and `list\[UnitGroup\]`"),
        ({"compare": lambda self, rewards: [1.0]}, r"what it returned cannot be used \(it has compare\)"),
        ({"advantages": lambda self, group: [0.5 for _ in group]}, r"<lambda> returned a list \(\[0\.5, "),
        ({"advantages": lambda self, group: [[0.5]]}, "it gave 1 lists for 4 samples"),
        ({"advantages": lambda self, group: [[0.5, 1.0]] * 4}, r"with 1 turns got \[0\.5, 1\.0\]"),
        ({"advantages": lambda self, group: [[float("nan")]] * 4}, r"with 1 turns got \[nan\]"),
        ({"advantages": lambda self, group: [["high"]] * 4}, r"<lambda> returned a list \(\[\['high'"),
        ({"normalised": lambda self, units: [1.0]}, r"<lambda> returned a list \(\[1\.0\]\)"),
        ({"loss": lambda self, logprobs, batch: logprobs.sum()}, "<lambda> returned a Tensor"),
        ({"loss": lambda self, logprobs, batch: None}, r"<lambda> returned None, and `tuple\[Tensor"),
        ({"loss": lambda self, logprobs, batch: (logprobs, {})}, r"a Tensor of shape \(8, \d\)"),
        ({"loss": lambda self, logprobs, batch: (1.0, {})}, r"and `tuple\[Tensor, dict\[str, float\]\]` is"),
        ({"loss": lambda self, logprobs, batch: (batch.weights_BT.sum(), {})}, "it has no gradient"),
        ({"loss": lambda self, logprobs, batch: (logprobs.sum().log(), {})}, "is not finite: it is nan"),
        ({"loss": lambda self, logprobs, batch: (logprobs.sum(), {"a": "b"})}, "a str; expected: .* 'a'"),
        ({"loss": lambda self, logprobs, batch: (logprobs * batch.entropy_BT, {})}, "raised .*TypeError"),
    ],
)
def test_what_is_wrong_is_said_with_the_method_or_the_line(methods, message):
    with pytest.raises(RequestError, match=message):
        try_algorithm(own(**methods), [])


@pytest.fixture
def endpoint() -> Iterator[EndpointProcess]:
    server = EndpointProcess("one")
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def examined(url: str, tmp_path, **more) -> list[tuple[str, str, str]]:
    policy = {"_type": "openai", "model_name": "tiny", "base_url": url, "api_key": "canary-services-1"}
    config = parse_config({"llms": {"policy": policy}, **more})
    findings = Findings()
    await examine_services(config, findings)
    return [(each.what, each.status, each.detail) for each in findings.items]


async def test_a_model_answers_one_call(endpoint: EndpointProcess, tmp_path):
    storage = {"storage": f"file://{tmp_path}"}
    (listed, answered, stored) = await examined(endpoint.url, tmp_path, **storage)
    assert listed[:2] == (f"model policy at {endpoint.url}", "ok")
    assert answered[:2] == ("model policy", "ok") and "answered a call in" in answered[2]
    assert stored[:2] == ("storage", "ok")


async def test_a_model_that_is_not_there(endpoint: EndpointProcess, tmp_path):
    endpoint.kill()
    found = await examined(endpoint.url, tmp_path)
    assert [status for _, status, _ in found] == ["error", "error"]
    assert "base_url" in found[1][2] and "canary" not in str(found)


async def test_a_backend_that_does_not_answer(endpoint: EndpointProcess, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"id": "a", "question": "a?"}\n')
    found = await examined(
        endpoint.url,
        tmp_path,
        workflow="tests.processes.fragile:play",
        eval={
            "general": {"dataset": str(tmp_path / "train.jsonl")},
            "evaluators": {"length": "tests.processes.fragile:length"},
        },
        trainer_adapters={"lm_server": {"_type": "lm_server", "base_url": "http://127.0.0.1:9"}},
        finetuning={"enabled": True, "trainer_adapter": "lm_server"},
    )
    assert ("backend lm_server", "error") in [each[:2] for each in found]


@pytest.mark.slow
def test_the_loop_works_here():
    findings = Findings()
    try_loop(findings)
    assert [(each.what, each.status) for each in findings.items] == [
        ("loop: collect", "ok"),
        ("loop: train", "ok"),
        ("loop: kill and resume", "ok"),
        ("loop", "ok"),
    ]
