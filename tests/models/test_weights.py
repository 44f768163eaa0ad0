"""Weights on disk: what is written is what was in memory, and memory that tensors share is no matter."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from etude.models.weights import digest, file_parts, load_tensors, load_with_digest, save_tensors

DIGEST = "61717b290fb6251c39373dea73866467ebca52e7413d7d7933b3cbde0fe6b667"


def test_tensors_that_share_memory_or_lie_across_it_are_written_each_in_full(tmp_path: Path):
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"whole": whole, "rows": whole[1:], "turned": whole.T, "number": torch.tensor(2.5)}
    save_tensors(tensors, tmp_path / "some.safetensors")
    read = load_tensors(tmp_path / "some.safetensors")
    assert {name: value.tolist() for name, value in read.items()} == {
        name: value.tolist() for name, value in tensors.items()
    }
    assert digest(read) == digest(tensors)


def test_a_file_is_what_safetensors_writes_and_its_digest_is_known_without_it(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, 3, generator=generator)
    tensors = {"b.weight": numbers, 'ä "q"': numbers.T, "a": numbers[1], "none": numbers[:0]}
    tensors |= {"half": numbers.bfloat16(), "step": torch.tensor(3.0), "wide": numbers.double()}
    path = tmp_path / "some.safetensors"
    written = save_tensors(tensors, path)
    plain = {name: value.contiguous().clone() for name, value in tensors.items()}
    assert path.read_bytes() == safetensors.torch.save(plain)
    assert written == hashlib.sha256(path.read_bytes()).hexdigest() == digest(tensors)
    assert load_with_digest(path)[1] == written


def test_a_digest_is_that_of_names_and_values():
    tensors = {"b": torch.zeros(2), "a": torch.ones(3, dtype=torch.bfloat16)}
    # Runs on disk have digests of this kind: another one would be taken for other weights.
    assert digest(tensors) == digest(dict(reversed(tensors.items()))) == DIGEST
    assert digest({**tensors, "b": torch.tensor([0.0, 1e-30])}) != digest(tensors)


def test_what_lies_on_a_cpu_as_it_is_to_be_written_is_not_copied():
    plain, turned = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t()
    given = {"a": plain, "b": turned, "c": plain[1], "d": plain.bfloat16()}
    _, *parts = (np.frombuffer(part, np.uint8) for part in file_parts(given))
    places = [part.ctypes.data == one.data_ptr() for part, one in zip(parts, given.values(), strict=True)]
    assert places == [True, False, True, True]
