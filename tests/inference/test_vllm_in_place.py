"""Whole weights that a running vLLM takes, and those that it says to take and does not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from etude.inference.answer import TokenRequest
from etude.inference.vllm_process import VllmProcess
from etude.inference.vllm_processes import VllmProcesses
from etude.models.policy import Policy
from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from tests.inference.test_vllm import PROMPT, command, engine_of, logprobs_of, options_of, until
from tests.vllm import commands

__all__ = ["command"]

SHAPE = TinyShape(hidden_size=64, heads=2, intermediate_size=96, max_context=128)


def model(folder: Path, seed: int, *, tied: bool) -> Path:
    """Random weights, with an output layer of their own or with that of the embeddings."""
    build_policy(build_tokenizer(["yes, no"], vocab_size=300), seed, SHAPE).export(folder)
    if not tied:
        config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


async def require_weights(processes: VllmProcesses, name: Path, weights: Path) -> None:
    """The logprobs under the model `name` are those of `weights`."""
    [process] = processes.processes
    engine = engine_of(process, str(name), weights)
    engine._processes = processes
    sampled = await engine.sample(TokenRequest(PROMPT, key=3))
    expected = logprobs_of(Policy.load(weights), PROMPT, sampled.ids)
    assert torch.tensor(sampled.logprobs) == pytest.approx(expected, abs=1e-4)
    await engine.close()


@pytest.mark.slow
@commands
async def test_whole_weights_are_loaded_without_a_restart_and_stay_after_one(command, tmp_path):
    first, second = model(tmp_path / "a", 1, tied=False), model(tmp_path / "b", 2, tied=False)
    processes = VllmProcesses([VllmProcess(options_of(tmp_path / "vllm", command))])
    await processes.start(str(first))
    [process] = processes.processes
    pid = process.pid
    await require_weights(processes, first, first)
    await processes.start(str(second), in_place=True)
    assert process.pid == pid
    await require_weights(processes, second, second)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: process.restarts == 1 and process.state == "running")
    await require_weights(processes, second, second)
    await processes.stop()


@pytest.mark.slow
@commands
async def test_weights_that_are_not_loaded_in_truth_are_those_of_a_new_process(command, tmp_path, caplog):
    first, second = model(tmp_path / "a", 1, tied=True), model(tmp_path / "b", 2, tied=True)
    processes = VllmProcesses([VllmProcess(options_of(tmp_path / "vllm", command))])
    await processes.start(str(first))
    [process] = processes.processes
    pid = process.pid
    await processes.start(str(second), in_place=True)
    assert process.pid != pid
    assert f"vLLM did not load ParallelLMHead of {second}; it is started again" in caplog.text
    await require_weights(processes, second, second)
    await processes.stop()
