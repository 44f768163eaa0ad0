"""A vLLM process and what is sampled from it; see `tests/vllm.py` for the real one."""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.config.finetuning import LoraOptions
from etude.core.call import Constraint, Delta, Sampling
from etude.core.errors import EngineAway, EngineError, ImpossibleCall
from etude.engines.vllm_engine import VllmEngine, VllmProcesses
from etude.engines.vllm_process import VllmOptions, VllmProcess
from etude.models.distribution import adjust_logits
from etude.models.policy import Policy
from etude.models.text_codec import TextCodec
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from etude.models.weights import write_lora_folder
from tests.forked import ROOT, Forked, programs
from tests.models.tiny_models import change_weights, continuing
from tests.support import is_alive, until
from tests.vllm import STAND_IN, choose_command, commands

PROMPT = (5, 40, 41, 42)


@pytest.fixture
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    return choose_command(request.param, monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    tokenizer = build_tokenizer(["yes, no, perhaps"], vocab_size=300)
    # vLLM takes no heads smaller than 32.
    shape = TinyShape(hidden_size=128, heads=4, intermediate_size=96, max_context=128)
    build_policy(tokenizer, 1, shape).export(folder)
    # As Llama 3 has it: turns end in tokens of which the tokenizer names one alone.
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return folder


def make_options(folder: Path, command: tuple[str, ...] = STAND_IN) -> VllmOptions:
    """Of a vLLM that answers. The stand-in is forked, so that it starts at once."""
    if command == STAND_IN:
        command = (str(programs() / "python"), *STAND_IN[1:])
    return VllmOptions(
        folder, "float32", command, ("--enforce-eager",), look_seconds=0.1, backoff_seconds=0.1
    )


def silent(folder: Path) -> VllmOptions:
    """Of a stand-in without a model."""
    return replace(make_options(folder), arguments=("--echo",))


@asynccontextmanager
async def running(options: VllmOptions, source: Path) -> AsyncIterator[VllmProcess]:
    process = VllmProcess(options)
    try:
        await process.start(str(source))
        yield process
    finally:
        await process.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    request: pytest.FixtureRequest, source: Path, tmp_path_factory
) -> AsyncIterator[VllmProcess]:
    """A process that several tests ask: to start one takes seconds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        command = choose_command(request.param, monkeypatch)
        async with running(make_options(tmp_path_factory.mktemp("served"), command), source) as process:
            yield process


def make_engine(process: VllmProcess, name: str, source: Path) -> VllmEngine:
    return VllmEngine(VllmProcesses([process]), name, TextCodec.load(source), max_tokens=16, wait=600)


def measure_logprobs(policy: Policy, prompt: tuple[int, ...], ids: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        logits = policy.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), list(ids)]


def lora_folder(source: Path, folder: Path, seed: int) -> Policy:
    """LoRA weights that change the model a lot, written to `folder`; and the model with them."""
    policy = Policy.load(source)
    policy.use_lora(LoraOptions(r=4, alpha=8), seed)
    change_weights(policy, lambda one: one.normal_(generator=torch.Generator().manual_seed(seed)), "lora_B")
    write_lora_folder(policy.trainable(), LoraOptions(r=4, alpha=8), base=str(source), folder=folder)
    return policy


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "server", ["stand-in", pytest.param("real", marks=pytest.mark.vllm)], indirect=True, scope="module"
)
async def test_logprobs_are_those_of_the_learner_for_the_base_and_for_lora_weights(server, source, tmp_path):
    trained = lora_folder(source, tmp_path / "lora", 3)
    await server.add_lora("lora-1", tmp_path / "lora")
    answers = {}
    for name, policy in ((str(source), Policy.load(source)), ("lora-1", trained)):
        engine, told = make_engine(server, name, source), list[Delta]()
        sampled = await engine.sample(continuing(PROMPT, key=7, top_logprobs=2, on_delta=told.append))
        expected = measure_logprobs(policy, PROMPT, sampled.completion_ids)
        assert torch.tensor(sampled.logprobs) == pytest.approx(expected, abs=1e-4)
        assert [token.ids[0] for token in told] == list(sampled.completion_ids)
        again = await engine.sample(continuing(PROMPT, key=7, top_logprobs=2))
        assert again.completion_ids == sampled.completion_ids
        assert [len(top) for top in sampled.top_logprobs] == [2] * len(sampled.completion_ids)
        answers[name] = sampled.completion_ids
        await engine.close()
    assert len(set(answers.values())) == 2
    await server.remove_lora("lora-1")
    gone = make_engine(server, "lora-1", source)
    with pytest.raises(EngineError, match="404"):
        await gone.sample(continuing(PROMPT))
    await gone.close()


@pytest.mark.slow
@commands
async def test_a_crash_is_noticed_and_mended_with_its_lora_weights(command, source, tmp_path):
    async with running(make_options(tmp_path, command), source) as process:
        lora_folder(source, tmp_path / "lora", 3)
        await process.add_lora("lora-1", tmp_path / "lora")
        engine = make_engine(process, "lora-1", source)
        request = continuing(PROMPT, Sampling(temperature=0))
        before = await engine.sample(request)
        first = process.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.state == "restarting")
        assert "code -9" in process.reason and "vllm.log" in process.reason
        again = await engine.sample(request)
        assert again.completion_ids == before.completion_ids, "it waited until vLLM was back"
        assert process.pid != first and process.restarts == 1
        await engine.close()


EVERYTHING = Sampling(
    temperature=0.7,
    top_p=0.9,
    max_tokens=5,
    stop=("x",),
    top_k=7,
    min_p=0.1,
    min_tokens=2,
    stop_token_ids=(9,),
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.1,
    logit_bias=((4, -5.0), (6, 2.5)),
)
CONSTRAINTS = (
    Constraint("json_object"),
    Constraint("json_schema", '{"type": "array", "items": {"enum": [1, "b", null]}, "maxItems": 3}'),
    Constraint("choice", '["yes", "no"]'),
    Constraint("regex", "[a-f]{3,}!"),
    Constraint("grammar", 'start: "a" | "b" start'),
)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("server", ["stand-in"], indirect=True, scope="module")
async def test_every_parameter_of_sampling_goes_through_in_vllms_words(server, source):
    engine = make_engine(server, str(source), source)
    ends = sorted({*engine.codec.stop_ids, 9})
    async with httpx.AsyncClient(base_url=server.base_url) as client:
        await engine.sample(continuing(PROMPT, EVERYTHING, key=3))
        asked = (await client.get("/asked")).json()
        expected = {name: getattr(EVERYTHING, name) for name in SPELLED_OUT}
        assert asked == asked | expected | {
            "stop": ["x"],
            "stop_token_ids": ends,
            "logit_bias": {"4": -5.0, "6": 2.5},
        }
        await engine.sample(continuing(PROMPT))
        plain = (await client.get("/asked")).json()
        # Or vLLM would take them from the model's generation config.
        assert [plain[name] for name in ("top_k", "min_p", "repetition_penalty")] == [0, 0.0, 1.0]
        assert not {"logit_bias", "structured_outputs"} & plain.keys()
        for constraint in CONSTRAINTS:
            await engine.sample(continuing(PROMPT, Sampling(max_tokens=1, constraint=constraint)))
            text = engine.codec.grammars.text(constraint, PROMPT)
            assert (await client.get("/asked")).json()["structured_outputs"] == {"grammar": text}
        with pytest.raises(ImpossibleCall, match="its regex: "):
            await engine.sample(continuing(PROMPT, Sampling(constraint=Constraint("regex", "("))))
    await engine.close()


SPELLED_OUT = ("temperature", "top_p", "max_tokens", "top_k", "min_p", "min_tokens", "frequency_penalty")


@pytest.mark.vllm
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("server", ["real"], indirect=True, scope="module")
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: constraint.kind)
async def test_the_real_vllm_samples_under_the_learners_grammars(server, source, constraint):
    engine, policy = make_engine(server, str(source), source), Policy.load(source)
    sampling = Sampling(temperature=0.8, top_k=9, max_tokens=24, constraint=constraint)
    for key in range(4):
        sampled = await engine.sample(continuing(PROMPT, sampling, key=key))
        shapes = policy.codec.grammars.replay(sampling, PROMPT, sampled.completion_ids)
        assert shapes is not None, "it has the form as the learner reads that"
        with torch.no_grad():
            all_ids = torch.tensor([[*PROMPT, *sampled.completion_ids]])
            logits = policy.model(all_ids).logits[0, len(PROMPT) - 1 : -1]
        ids = torch.tensor(sampled.completion_ids)
        expected = adjust_logits(logits, shapes, ids).log_softmax(-1)[torch.arange(len(ids)), ids]
        assert torch.tensor(sampled.logprobs) == pytest.approx(expected, abs=1e-4)
    await engine.close()


async def test_an_engine_that_fails_is_told_with_its_exception_and_not_with_code_0(source, tmp_path):
    options = replace(make_options(tmp_path), arguments=("--dying",))
    async with running(options, source) as process:
        engine = make_engine(process, str(source), source)
        with pytest.raises(EngineAway, match="answered 500"):
            await engine.sample(continuing(PROMPT))
        await until(lambda: process.state == "restarting")
        cause = rf"vLLM ended without .*\(ValueError: head_dim 16 is not supported\)\. .* {options.log}:"
        assert re.match(cause, process.reason)
        await engine.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("server", ["stand-in"], indirect=True, scope="module")
@pytest.mark.parametrize(("logprob", "token"), [(0.5, 1), ("NaN", 1), (-0.5, 300)])
async def test_impossible_values_are_a_failed_call(server, source, logprob, token, monkeypatch):
    async def choices(engine, base_url, body):
        fields = {"tokens": ["token_id:1"], "token_logprobs": [logprob], "top_logprobs": [{}]}
        yield {"finish_reason": "stop", "text": "", "logprobs": fields, "token_ids": [token]}

    engine = make_engine(server, str(source), source)
    monkeypatch.setattr(VllmEngine, "_choices", choices)
    with pytest.raises(EngineError, match=r"content\[0\].logprob is|token id 300 is beyond"):
        await engine.sample(continuing(PROMPT))
    await engine.close()


PARENT = """
import asyncio, sys
from pathlib import Path
from etude.engines.vllm_process import VllmOptions
from etude.engines.vllm_process import VllmProcess

async def main():
    process = VllmProcess(VllmOptions(Path(sys.argv[1]), "float32", tuple(sys.argv[3:]), ("--echo",)))
    await process.start(sys.argv[2])
    print(process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_it_ends_with_a_parent_that_was_killed(source, tmp_path):
    arguments = ["-c", PARENT, str(tmp_path), str(source), *silent(tmp_path).command]
    parent = Forked(arguments, ROOT, dict(os.environ), program="python")
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.communicate()
    await until(lambda: not is_alive(pid))


async def test_a_process_that_hangs_is_started_anew(source, tmp_path):
    options = replace(silent(tmp_path), hung_seconds=0.5)
    async with running(options, source) as process:
        first = process.pid
        async with httpx.AsyncClient() as client:
            await client.post(f"{process.base_url}/hang")
        await until(lambda: process.state == "restarting")
        assert "for 0.5 s" in process.reason
        await until(lambda: process.state == "running")
        assert process.pid != first


SHAPE = TinyShape(hidden_size=64, heads=2, intermediate_size=96, max_context=128)


def written_model(folder: Path, seed: int, *, tied: bool) -> Path:
    """Random weights, with an output layer of their own or with the embeddings'."""
    build_policy(build_tokenizer(["yes, no"], vocab_size=300), seed, SHAPE).export(folder)
    if not tied:
        config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


async def require_weights(processes: VllmProcesses, name: Path, weights: Path) -> None:
    """The logprobs under the model `name` are `weights`'."""
    [process] = processes.processes
    engine = make_engine(process, str(name), weights)
    engine._processes = processes
    sampled = await engine.sample(continuing(PROMPT, key=3))
    expected = measure_logprobs(Policy.load(weights), PROMPT, sampled.completion_ids)
    assert torch.tensor(sampled.logprobs) == pytest.approx(expected, abs=1e-4)
    await engine.close()


@pytest.mark.slow
@commands
async def test_whole_weights_are_loaded_without_a_restart_and_stay_after_one(command, tmp_path):
    first, second = written_model(tmp_path / "a", 1, tied=False), written_model(tmp_path / "b", 2, tied=False)
    processes = VllmProcesses([VllmProcess(make_options(tmp_path / "vllm", command))])
    await processes.start(str(first))
    [process] = processes.processes
    pid = process.pid
    await require_weights(processes, first, first)
    await processes.start(str(second), in_place=True)
    assert process.pid == pid
    await require_weights(processes, second, second)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: process.restarts == 1 and process.state == "running", 600.0)
    await require_weights(processes, second, second)
    await processes.stop()


@pytest.mark.slow
@commands
async def test_weights_that_are_not_loaded_in_truth_are_those_of_a_new_process(command, tmp_path, caplog):
    first, second = written_model(tmp_path / "a", 1, tied=True), written_model(tmp_path / "b", 2, tied=True)
    processes = VllmProcesses([VllmProcess(make_options(tmp_path / "vllm", command))])
    await processes.start(str(first))
    [process] = processes.processes
    pid = process.pid
    await processes.start(str(second), in_place=True)
    assert process.pid != pid
    assert f"vLLM did not load ParallelLMHead of {second}; " in caplog.text
    await require_weights(processes, second, second)
    await processes.stop()
