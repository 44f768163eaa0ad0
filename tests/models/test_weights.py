"""Weights on disk: what is written is what was in memory, and memory that tensors share is no matter."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.models import weights
from etude.models.weights import digest, load_tensors, save_tensors


def test_tensors_that_share_memory_or_lie_across_it_are_written_each_in_full(tmp_path: Path):
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"whole": whole, "rows": whole[1:], "turned": whole.T, "number": torch.tensor(2.5)}
    save_tensors(tensors, tmp_path / "some.safetensors")
    read = load_tensors(tmp_path / "some.safetensors")
    assert {name: value.tolist() for name, value in read.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }
    assert digest(read) == digest(tensors)


def test_a_digest_is_that_of_names_and_values():
    tensors = {"b": torch.zeros(2), "a": torch.ones(3, dtype=torch.bfloat16)}
    # Runs on disk have digests of this kind: another one would be taken for other weights.
    assert digest(tensors) == digest(dict(reversed(tensors.items()))) == "8f0cbe71462e473d727c10d36fb7b734"
    assert digest({**tensors, "b": torch.tensor([0.0, 1e-30])}) != digest(tensors)


def test_what_lies_on_a_cpu_as_it_is_to_be_written_is_not_copied(tmp_path, monkeypatch):
    plain, turned = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t()
    given = {"plain": plain, "turned": turned, "part": plain[1], "half": plain.bfloat16()}
    written, write = {}, weights.save_file

    def watched(tensors, path):
        written.update(tensors)
        write(tensors, path)

    monkeypatch.setattr(weights, "save_file", watched)
    save_tensors(given, tmp_path / "some.safetensors")
    assert {name: one.data_ptr() == given[name].data_ptr() for name, one in written.items()} == {
        "plain": True,
        "turned": False,
        "part": False,
        "half": True,
    }
    found = load_tensors(tmp_path / "some.safetensors")
    assert all(torch.equal(found[name], one) for name, one in given.items())
