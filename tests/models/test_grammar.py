"""Another engine samples by the text of a grammar of which the learner forms its distributions."""

from __future__ import annotations

import copy
import random

import llguidance
import llguidance.hf
import numpy as np
import pytest

from etude.core.call import ChatRequest, Constraint, Sampling
from etude.models.grammar import Grammars
from etude.models.tool_grammar import sampling_of
from tests.models.tiny_models import CALCULATOR, chatml_policy, user

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
    speech = chatml_policy().speech
    tokenizer, vocabulary = copy.deepcopy(speech.tokenizer), speech.vocabulary
    if request.param == "thinking":
        tokenizer.add_tokens(["<think>", "</think>"])
        vocabulary = len(tokenizer)
    return Grammars(tokenizer, {*speech.stop_ids, 2}, vocabulary)


def constraint_of(name, grammars):
    if name != "tools":
        return FORMS[name]
    asked = ChatRequest((user("2+3"),), tools=(CALCULATOR,), tool_choice="required")
    return sampling_of(asked, chatml_policy().template).constraint


def allowed(matcher, vocabulary):
    """The tokens that may come next."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, bitorder="little")[:vocabulary].nonzero()[0].tolist()


@pytest.mark.parametrize("name", FORMS)
def test_an_engine_that_reads_the_text_by_llguidance_makes_the_same_masks(grammars, name):
    constraint, prompt = constraint_of(name, grammars), (8, 9)
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
            tokens = allowed(theirs, grammars.vocabulary)
            assert tokens == allowed(ours, grammars.vocabulary)
            if may_end := grammars.stop_ids & set(tokens):
                ends |= may_end
            token = choose.choice([each for each in tokens if each in closing] or tokens)
            if token in grammars.stop_ids:
                break
            assert theirs.consume_token(token) and ours.consume_token(token)
    assert ends == grammars.stop_ids, "answers may end with either"
