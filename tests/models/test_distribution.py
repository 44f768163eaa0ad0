"""The distribution of a token: its bytes, truncation, masks of forms, and grammars of another engine."""

import copy
import random

import llguidance
import llguidance.hf
import numpy as np
import pytest
import torch

from etude.core.call import ChatRequest, Constraint, Sampling
from etude.models import grammar
from etude.models.distribution import Adjustment, adjust_logits
from etude.models.grammar import Grammars
from etude.models.text_codec import constrained_sampling
from tests.models.tiny_models import CALCULATOR, chatml_policy, policy, user


def kept_ids(logits, sampling):
    """The ids of the tokens that can be drawn."""
    (row,) = adjust_logits(torch.tensor([logits]), [Adjustment(sampling)])
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
    mine, theirs = kept_ids(logits, Sampling(**changes)), by_hand(logits, Sampling(**changes))
    # The last token of thousands may be on either side of a sum in float32.
    assert len(set(mine) ^ set(theirs)) <= (1 if len(theirs) > 1000 else 0)


def test_rows_that_cannot_go_on_say_why():
    model = policy()
    sampling = Sampling(constraint=Constraint("json_object"))
    wrong = [model.codec.grammars.shaper(sampling, (8, 9)) for _ in range(2)]
    opening = model.tokenizer.convert_tokens_to_ids("a")
    grammar.advance([(each, opening) for each in wrong], model.codec.vocabulary)
    assert wrong[0].shape().allowed is None and "its form" in wrong[0].fault


def test_the_bytes_of_tokens_add_up_to_their_text():
    text = "what is é 1 + 2? naïve 😀 日本<|end|>"
    codec = policy().codec
    ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(map(codec.grammars.token_bytes, ids)) == text.encode()
    assert codec.grammars.token_bytes(ids[-1]) == b"<|end|>"


FORMS = {
    "json_object": Constraint("json_object"),
    "json_schema": Constraint("json_schema", '{"type": "array", "items": {"type": "integer"}}'),
    "regex": Constraint("regex", "[ab]{3}(/|\n)?"),
    "choice": Constraint("choice", '["yes", "no", "what is it"]'),
    "grammar": Constraint("grammar", 'start: number ("+" number)*\nnumber: /[0-9]{1,2}/'),
    "tools": None,
}


@pytest.fixture(scope="module", params=["plain", "thinking"])
def grammars(request):
    """Of a model whose turns two tokens end, of which the tokenizer names one."""
    codec = chatml_policy().codec
    tokenizer, vocabulary = copy.deepcopy(codec.tokenizer), codec.vocabulary
    if request.param == "thinking":
        tokenizer.add_tokens(["<think>", "</think>"])
        vocabulary = len(tokenizer)
    return Grammars(tokenizer, {*codec.stop_ids, 2}, vocabulary)


def make_constraint(name, grammars):
    if name != "tools":
        return FORMS[name]
    asked = ChatRequest((user("2+3"),), tools=(CALCULATOR,), tool_choice="required")
    return constrained_sampling(asked, chatml_policy().template).constraint


def allowed_ids(matcher, vocabulary):
    """The tokens that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:vocabulary].nonzero()[0].tolist()


@pytest.mark.parametrize("name", FORMS)
def test_an_engine_that_reads_the_text_by_llguidance_makes_the_same_masks(grammars, name):
    constraint, prompt = make_constraint(name, grammars), (8, 9)
    # As vLLM's backend `guidance` does: with the one end that the tokenizer names.
    words = llguidance.hf.from_tokenizer(grammars.tokenizer, grammars.vocabulary)
    text = llguidance.grammar_from("grammar", grammars.text(constraint, prompt))
    choose, ends = random.Random(name), set()
    closing = {
        token for token in range(grammars.vocabulary) if grammars.tokenizer.decode([token])[:1] in '"}]'
    }
    for _ in range(8):
        theirs = llguidance.LLMatcher(words, text)
        ours = grammars.shaper(Sampling(constraint=constraint), prompt).matcher
        for _ in range(150):
            tokens = allowed_ids(theirs, grammars.vocabulary)
            assert tokens == allowed_ids(ours, grammars.vocabulary)
            if may_end := grammars.stop_ids & set(tokens):
                ends |= may_end
            token = choose.choice([each for each in tokens if each in closing] or tokens)
            if token in grammars.stop_ids:
                break
            assert theirs.consume_token(token) and ours.consume_token(token)
    assert ends == grammars.stop_ids, "answers may end with either"
