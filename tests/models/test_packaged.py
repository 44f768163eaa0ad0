"""A GGUF file is a model like any other: here a real one, as a package ships it."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.errors import RequestError
from etude.inference.local import LocalLlmConfig
from etude.models.policy import Policy
from etude.models.source import PACKAGED, locate
from etude.models.speech import Speech
from etude.preflight.finding import Findings
from etude.preflight.local_model import check_local_model, outline
from tests.models.test_source import hub_away as hub_away
from tests.pretrained import needs_real_model, real_gguf, real_model

pytestmark = needs_real_model


def test_a_gguf_file_is_the_model_that_was_unpacked_from_it():
    """Weights, stop tokens, template and context."""
    packed = Policy.load(real_gguf(), device="cpu", dtype="bfloat16")
    folder = Policy.load(real_model(), device="cpu", dtype="bfloat16")
    assert packed.digest() == folder.digest()
    assert packed.stop_ids == folder.stop_ids
    assert packed.tokenizer.decode([*packed.stop_ids]) == "<|im_end|>"
    assert packed.max_context == folder.max_context == 8192
    assert packed.tokenizer.chat_template == folder.tokenizer.chat_template
    assert not packed.is_quantized
    assert packed.tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]  # As the model's own tokenizer.


@pytest.mark.usefixtures("hub_away")
def test_where_the_hub_is_away_its_name_is_the_folder_that_was_made():
    assert locate(PACKAGED) == str(real_model())


def test_a_broken_file_is_a_sentence(tmp_path: Path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(real_gguf().read_bytes()[:100_000])
    for load in (Policy.load, Speech.load, outline):
        with pytest.raises(RequestError, match=r"cannot load the model .*broken\.gguf"):
            load(file)


def test_check_says_what_was_made_of_it():
    findings = Findings()
    llm = LocalLlmConfig(model=str(real_gguf()), dtype="float32")
    check_local_model("policy", llm, str(real_gguf()), None, [], findings)
    told = "\n".join(finding.detail for finding in findings.items)
    assert "135 M parameters" in told
    assert "unpacked from GGUF" in told and "<|im_end|>" in told
