"""Kernels on CUDA give what a CPU computes step by step: by their formulas, and compiled."""

from __future__ import annotations

import logging

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.learner import fused
from etude.models.device import choose_device
from tests.learner.gradients import assert_same, batch_of, gradient_of
from tests.learner.test_lean_llama import KNOWN, cosine, policy_of
from tests.learner.trees import forest

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
ROOMS = "etude.learner.lean", "etude.learner.head"


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(fused, "_LEAST", 0)


def with_formulas_of_kernels(monkeypatch):
    for room in ROOMS:
        monkeypatch.setattr(f"{room}.is_kernel", lambda x: True)


@pytest.mark.parametrize("name", KNOWN)
def test_the_formulas_of_kernels_give_the_same_gradient(monkeypatch, name):
    of, batch = policy_of(name, lora=False), batch_of(forest(4, 40))
    plain = gradient_of(of, batch, Grpo())
    with_formulas_of_kernels(monkeypatch)
    assert_same(gradient_of(of, batch, Grpo()), plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_they_do_too(monkeypatch, dtype):
    """By the compiler for CPUs: that all of it compiles in one piece, and is right."""
    batches = [batch_of(forest(4, size)) for size in (40, 60, 90)]
    plain = [gradient_of(policy_of("Qwen3Config", False, dtype), batch, Grpo()) for batch in batches]
    with_formulas_of_kernels(monkeypatch)
    monkeypatch.setattr(fused, "is_kernel", lambda x: True)
    compiled = [gradient_of(policy_of("Qwen3Config", False, dtype), batch, Grpo()) for batch in batches]
    for one, other in zip(compiled, plain, strict=True):
        if dtype == torch.float32:
            assert_same(one, other)
        else:
            assert cosine(one[1], other[1]) > 0.999


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_gpu_has_the_gradient_of_a_cpu(name, lora, dtype):
    batch = batch_of(forest(4, 40))
    _, exact = gradient_of(policy_of(name, lora), batch, Grpo())
    of = policy_of(name, lora, dtype)
    of.device = choose_device("cuda")
    of.model.to(of.device)
    found = {key: value.cpu() for key, value in gradient_of(of, batch, Grpo())[1].items()}
    assert cosine(found, exact) > (0.999999 if dtype == torch.float32 else 0.999)


def test_where_nothing_compiles_it_is_computed_as_it_stands_and_that_is_said(monkeypatch, caplog):
    def fails(x):
        raise RuntimeError("no C compiler\nmore of it")

    @fused.fused
    def double(x):
        return x * 2

    fused._compiles.cache_clear()
    monkeypatch.setattr(fused, "is_kernel", lambda x: True)
    monkeypatch.setattr(fused, "_tried", lambda: fails)
    with caplog.at_level(logging.WARNING, "etude.learner"):
        assert [double(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    fused._compiles.cache_clear()
    (said,) = caplog.messages
    assert said.endswith("compiles nothing here: no C compiler")
