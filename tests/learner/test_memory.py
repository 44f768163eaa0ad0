"""Free memory, a GPU whose memory runs out, and steps in bfloat16 that are finer than its numbers."""

import os
import platform
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.core.job import ModelVersion
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import Optimiser, Schedule
from etude.models.device import available_memory, release_freed_memory
from tests.learner.gradients import forest, to_batch, train
from tests.models.tiny_models import fresh_policy


def test_the_free_memory_of_a_gpu_counts_what_torch_holds_and_does_not_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (1000, 5000)}[device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert available_memory("cuda:1") == 1100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return it by themselves")
def test_what_was_freed_goes_back_to_the_system():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    blocks = [torch.ones(25_000) for _ in range(2_000)]
    last = blocks.pop()  # What lies above it would go by itself.
    blocks.clear()
    before = resident()
    release_freed_memory()
    assert resident() < before - 100_000_000
    del last


OPTIONS = LearnerOptions(learning_rate=1e-5, weight_decay=0.1, schedule=Schedule("cosine", trainings=3))
STEPS = {"batch_size": 4, "passes": 1}


def half_policy():
    of = fresh_policy()
    of.model.to(torch.bfloat16)
    of.keep_base()
    return of


def job(seed: int = 0, units: int = 8):
    return to_batch(forest(seed, units))


class Exhausting(Supervised, name=""):
    """A loss for which memory runs out until layers are computed twice."""

    def loss(self, logprobs_BT, batch):
        self.__dict__["losses"] = losses = self.__dict__.get("losses", 0) + 1
        if losses == 2:
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        return super().loss(logprobs_BT, batch)


def test_a_step_that_runs_out_of_memory_is_computed_again_with_checkpointing():
    plain, short = (Learner(fresh_policy(), LearnerOptions(token_budget=60)) for _ in range(2))
    train(plain, job(), Supervised(), **STEPS)
    train(short, job(), Exhausting(), **STEPS)
    assert "computed twice" in str(short.note) and plain.note is None
    assert short.policy.digest() == plain.policy.digest()
    refused = Learner(fresh_policy(), LearnerOptions(gradient_checkpointing=False, token_budget=60))
    with pytest.raises(torch.OutOfMemoryError):
        train(refused, job(), Exhausting(), **STEPS)


@pytest.mark.slow
def test_steps_far_below_the_resolution_move_the_model_as_in_float32():
    half, full = half_policy(), half_policy()
    full.model.float()
    start = full.copy_tensors()
    options = LearnerOptions(learning_rate=1e-5)
    learners = [Learner(of, options) for of in (half, full)]
    losses = [train(learner, job(units=6), Supervised(), passes=120)["loss"] for learner in learners]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    masters, wanted = learners[0].optimiser.masters, full.trainable()
    ways = [
        torch.cat([(now[name] - start[name]).detach().flatten() for name in start])
        for now in (masters, wanted)
    ]
    assert torch.cosine_similarity(*ways, dim=0) > 0.97
    assert float(ways[0].norm()) == pytest.approx(float(ways[1].norm()), rel=0.03)
    for name, weight in half.trainable().items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, masters[name].to(torch.bfloat16))
    name = "model.layers.0.mlp.up_proj.weight"
    large = start[name].abs() > 0.25
    # Each of these steps is a fiftieth of what would change a bfloat16 number of this size: 2**-8 of it.
    assert 0.25 * 2.0**-8 / 50 > 1e-5
    assert float((half.trainable()[name] != start[name])[large].float().mean()) > 0.5


@pytest.mark.parametrize("packing", ["tree", "padded"])
def test_gradients_of_many_passes_are_summed_up_in_float32(packing):
    of, parts = half_policy(), defaultdict(list)
    learner = Learner(of, LearnerOptions(packing=packing, token_budget=60))
    for name, weight in of.trainable().items():
        weight.register_post_accumulate_grad_hook(lambda weight, name=name: parts[name].append(weight.grad))
    learner.add_gradient(job(units=40), Grpo())
    for name, master in learner.optimiser.masters.items():
        assert len(parts[name]) > 3
        assert {part.dtype for part in parts[name]} == {torch.bfloat16}
        assert torch.equal(master.grad, sum(part.float() for part in parts[name]))
    assert all(weight.grad is None for weight in of.trainable().values())


def test_a_training_in_one_precision_is_gone_on_with_in_another(tmp_path):
    full, half = Learner(fresh_policy(), OPTIONS), Learner(half_policy(), OPTIONS)
    for learner, other, name in ((full, half, "full"), (half, full, "half")):
        learner.reset()
        train(learner, job(), Supervised(), **STEPS)
        (tmp_path / name).mkdir()
        digest = learner.snapshot().save(tmp_path / name)
        version = ModelVersion(number=1, location=str(tmp_path / name), digest=digest)
        other.policy.adopt(version)
        other.restore(tmp_path / name)
        assert other.step == learner.step
        assert {value.dtype for value in other.optimiser.tensors().values()} == {torch.float32}
        train(other, job(1), Supervised(), **STEPS)


def test_on_cuda_a_step_is_one_kernel_and_goes_on_from_a_checkpoint():
    def optimiser():
        held = {"weight": torch.nn.Parameter(torch.empty(4, 3, device="cuda:0"))}
        made = Optimiser(held, betas=(0.9, 0.95), weight_decay=0.1)
        held["weight"].grad = torch.empty(4, 3, device="cuda:0")
        return made

    with FakeTensorMode():  # The device need not be there.
        before, after = optimiser(), optimiser()
        before.step(1e-3)
        after.restore({name: tensor.detach().cpu() for name, tensor in before.tensors().items()})
        (state,) = after.adam.state.values()
        assert {tensor.device.type for tensor in state.values()} == {"cuda"}
        after.step(1e-3)
    assert after.adam.defaults["fused"]
