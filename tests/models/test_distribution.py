"""The distribution of a token: truncation by its definition, masks of forms at once and alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from etude.core.call import Constraint, Sampling
from etude.models import grammar
from etude.models.distribution import Shape, masked, shaped
from etude.models.rendering import token_bytes
from etude.models.tiny import build_tokenizer
from tests.models.tiny_models import policy


def kept(logits, sampling):
    """The ids of the tokens that can be drawn."""
    (row,) = shaped(torch.tensor([logits]), [Shape(sampling)])
    return row.isfinite().nonzero().flatten().tolist()


def by_hand(logits, sampling):
    probs = torch.softmax(torch.tensor(logits), 0).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = [token for token in order if probs[token] >= sampling.min_p * probs[order[0]]]
    order = order[: sampling.top_k or None]
    total, mass, nucleus = sum(probs[token] for token in order), 0.0, []
    for token in order:
        if sampling.top_p < 1 and mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += probs[token]
    return sorted(nucleus)


@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"top_k": 3000},
        {"min_p": 0.1},
        {"top_p": 0.5, "top_k": 2000, "min_p": 0.001},
        {"top_p": 0.3, "min_p": 0.2},
    ],
)
def test_truncation_among_few_and_many_likely_tokens(changes, spread):
    torch.manual_seed(0)
    logits = (torch.randn(5000) * spread).tolist()
    mine, theirs = kept(logits, Sampling(**changes)), by_hand(logits, Sampling(**changes))
    # The last token of thousands may be on either side of a sum in float32.
    assert len(set(mine) ^ set(theirs)) <= (1 if len(theirs) > 1000 else 0)


def constrained(model, count: int, **changes):
    sampling = Sampling(constraint=Constraint("json_object"), **changes)
    return [model.speech.grammars.shaper(sampling, (8, 9)) for _ in range(count)]


@pytest.mark.parametrize("one_by_one", [0, 1 << 14])
def test_a_step_of_masked_rows_is_shaped_at_once_to_the_same_bits(one_by_one, monkeypatch):
    monkeypatch.setattr(grammar, "_ONE_BY_ONE", one_by_one)
    model = policy()
    vocabulary, chance = model.speech.vocabulary, torch.Generator().manual_seed(0)
    shapers = constrained(model, 9)
    for step in range(12):
        if step in (4, 8):  # Rows leave, and the others change places.
            shapers = shapers[:0:-1]
        logits_BV = torch.randn(len(shapers), vocabulary, generator=chance)
        fast_BV = masked(logits_BV, shapers)
        slow_BV = shaped(logits_BV, [each.shape() for each in shapers])
        assert fast_BV is not None
        assert torch.equal(fast_BV, slow_BV)
        tokens = slow_BV.softmax(-1).multinomial(1, generator=chance)[:, 0].tolist()
        grammar.advance(list(zip(shapers, tokens, strict=True)), vocabulary)


def test_rows_with_more_than_a_mask_and_rows_that_cannot_go_on_are_shaped_alone():
    model = policy()
    vocabulary = model.speech.vocabulary
    for others in (
        constrained(model, 1, temperature=0.5),
        constrained(model, 1, top_k=3),
        constrained(model, 1, min_tokens=3),
        constrained(model, 1, presence_penalty=1.0),
        [None],
    ):
        shapers = [*constrained(model, 1), *others]
        opening = model.tokenizer.convert_tokens_to_ids("{")
        bound = [(each, opening) for each in shapers if each is not None]
        grammar.advance(bound, vocabulary)
        assert masked(torch.zeros(2, vocabulary), shapers) is None
    wrong = constrained(model, 2)
    grammar.advance([(each, model.tokenizer.convert_tokens_to_ids("a")) for each in wrong], vocabulary)
    assert masked(torch.zeros(2, vocabulary), wrong) is None
    assert wrong[0].shape() is not None and "cannot be held to its form" in wrong[0].fault


WORDS = "what is é 1 + 2? naïve 😀 日本"
END = "<｜end▁of▁turn｜>"


def byte_level() -> Any:
    tokenizer = build_tokenizer([WORDS], vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    return tokenizer


def byte_fallback(*more: Any) -> Any:
    """As Llama 2 and Gemma have it: blanks are signs, and what is in no token is bytes."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "é", "\ufffd", "h"]
    model = models.BPE(
        {name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|end|>")


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bytes": byte_level,
    "fallback": byte_fallback,
    "fallback without the first blank": lambda: byte_fallback(decoders.Strip(" ", 1, 0)),
}


@pytest.fixture(scope="module", params=TOKENIZERS.values(), ids=TOKENIZERS.keys())
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_they_are_those_that_llguidance_knows(tokenizer: Any) -> None:
    known = from_tokenizer(tokenizer)
    found = {token: token_bytes(tokenizer, token) for token in range(len(tokenizer))}
    # With this byte, which is in no text, it marks special tokens.
    [marked] = [token for token, bytes in found.items() if bytes == b"\xff"]
    assert found == {token: known.decode_bytes([token]) for token in found} | {marked: b"\xff"}
