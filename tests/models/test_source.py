"""Where models are looked for: what is meant as a path never reaches the hub."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from etude.core.errors import RequestError
from etude.engines.local import LocalLlmConfig
from etude.models.policy import Policy
from etude.models.source import PACKAGED, locate
from etude.models.text_codec import TextCodec
from etude.preflight.finding import Findings
from etude.preflight.local_model import check_local_model, outline
from tests.pretrained import needs_real_model, real_gguf, real_model

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/qwen-small", "models/llama", "my-model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    (tmp_path / "model.bin").write_text("weights")
    return tmp_path


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.get_session", refuse)


@pytest.fixture
def hub_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's cache, empty; its address is one where nobody answers."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(cache), raising=False)
    return cache


@pytest.mark.usefixtures("here", "no_hub", "hub_away")
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("models/lama", r"did you mean 'models/llama'\?"),
        ("models", r"no config\.json"),
        ("lora", "LoRA weights.* `etude export`"),
        ("model.bin", r"folder.* \.gguf"),
        ("/nowhere/at/all", "model '/nowhere/at/all': .* not exist"),
        ("x" * 5000 + "/", "not exist"),
        ("my-run:best", "export a run's model with `etude export RUN`"),
    ],
)
def test_what_is_meant_as_a_folder_is_refused_with_the_nearest_and_without_the_hub(
    source: Any, told: str
) -> None:
    for load in (locate, Policy.load, TextCodec.load):
        with pytest.raises(RequestError, match=told):
            load(source)


@pytest.mark.usefixtures("here", "no_hub")
def test_a_folder_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("models/llama") == "models/llama"
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert locate("~/my-model") == str(Path.cwd() / "my-model")


@pytest.mark.usefixtures("here", "hub_away")
def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("transformers would try again and again")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    for load in (Policy.load, TextCodec.load):
        with pytest.raises(RequestError) as raised:
            load("some-owner/something-else")
        line = str(raised.value)
        assert "\n" not in line
        assert "no folder 'some-owner/something-else'" in line
        assert f"cannot be reached: {NOWHERE}" in line


@pytest.mark.usefixtures("here")
def test_a_model_of_the_cache_needs_no_hub(hub_away: Path) -> None:
    snapshot = hub_away / "models--my--modle" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (hub_away / "models--my--modle" / "refs").mkdir()
    (hub_away / "models--my--modle" / "refs" / "main").write_text("abc")
    assert locate("my/modle") == str(snapshot)


pytestmark = needs_real_model


@pytest.mark.slow
def test_a_gguf_file_is_the_model_that_was_unpacked_from_it():
    """Weights, stop tokens, template and context."""
    packed = Policy.load(real_gguf(), device="cpu", dtype="bfloat16")
    folder = Policy.load(real_model(), device="cpu", dtype="bfloat16")
    assert packed.digest() == folder.digest()
    assert packed.stop_ids == folder.stop_ids
    assert packed.tokenizer.decode([*packed.stop_ids]) == "<|im_end|>"
    assert packed.max_context == folder.max_context == 8192
    assert packed.tokenizer.chat_template == folder.tokenizer.chat_template
    assert packed.tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]  # As the model's own tokenizer.


@pytest.mark.usefixtures("hub_away")
def test_where_the_hub_is_away_its_name_is_the_folder_that_was_made():
    assert locate(PACKAGED) == str(real_model())


def test_a_broken_file_is_a_sentence(tmp_path: Path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(real_gguf().read_bytes()[:100_000])
    for load in (Policy.load, TextCodec.load, outline):
        with pytest.raises(RequestError, match=r"model '.*broken\.gguf'.*download it"):
            load(file)


@pytest.mark.slow
def test_check_says_what_was_made_of_it():
    findings = Findings()
    llm = LocalLlmConfig(model=str(real_gguf()), dtype="float32")
    check_local_model("policy", llm, str(real_gguf()), None, findings)
    told = "\n".join(finding.detail for finding in findings.items)
    assert "135 M parameters" in told
    assert "unpacked from GGUF" in told and "<|im_end|>" in told
