"""A package that patches transformers for an earlier release: models run here all the same."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from transformers import masking_utils

from etude.models.policy import Policy
from tests.models.tiny_models import chatml_policy

IDS = torch.tensor([[9, 10, 11, 12, 13]])


def old_patch(config, input_embeds, attention_mask, cache_position, past_key_values, position_ids, layer_idx):
    """The arguments that the function had before; it is put in its place by `import art`."""
    raise AssertionError("it is called with other arguments")


@pytest.fixture
def art_was_imported(monkeypatch):
    patches = ModuleType("art.transformers.patches")
    patches._preprocess_mask_arguments = masking_utils._preprocess_mask_arguments
    patches._patched_preprocess_mask_arguments = old_patch
    monkeypatch.setitem(sys.modules, "art.transformers.patches", patches)
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", old_patch)


def test_a_model_runs_in_a_process_that_has_imported_art(tmp_path, art_was_imported):
    tiny = chatml_policy()
    tiny.export(tmp_path / "model")
    loaded = Policy.load(tmp_path / "model", device="cpu")
    with torch.no_grad():
        assert loaded.model(input_ids=IDS).logits.shape[:2] == (1, 5)


def test_a_patch_that_fits_stays(tmp_path, art_was_imported, monkeypatch):
    patches = sys.modules["art.transformers.patches"]

    def fits(*args, **kwargs):
        return patches._preprocess_mask_arguments(*args, **kwargs)

    fits.__wrapped__ = patches._preprocess_mask_arguments  # its signature is that of the original
    monkeypatch.setattr(patches, "_patched_preprocess_mask_arguments", fits)
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", fits)
    chatml_policy()
    assert masking_utils._preprocess_mask_arguments is fits
