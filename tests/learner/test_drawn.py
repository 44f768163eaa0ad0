"""The learner forms the distributions that tokens were drawn from, and its head the chosen tokens'."""

import asyncio
import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms.grpo import Grpo
from etude.core.call import Constraint, Sampling
from etude.core.errors import TrainingError
from etude.core.sample import Sample, Turn
from etude.engines.embedded import EmbeddedEngine
from etude.learner.head import Head, selective_logprobs
from etude.learner.learner import sample_logprobs
from etude.models.distribution import Adjustment
from tests.learner.gradients import assert_same, get_gradient, gradient_by_autograd, to_batch
from tests.models.tiny_models import continuing, family, fresh_policy, policy
from tests.support import one_quick

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
AS_JSON = Constraint("json_schema", json.dumps(SCHEMA))
SINGLE = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 7,
    "min_p": 0.05,
    "min_tokens": 8,
    "frequency_penalty": 0.7,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.4,
    "logit_bias": ((20, 3.0), (1, 2.0), (35, -100.0)),
    "constraint": AS_JSON,
}
PROMPT = (8, 9, 10, 30, 11, 9)


async def _answer(of, samplings):
    engine = EmbeddedEngine(of)
    try:
        requests = [continuing(PROMPT, sampling, key) for key, sampling in enumerate(samplings)]
        return await asyncio.gather(*map(engine.sample, requests))
    finally:
        await engine.close()


def make_samples(of, *samplings, advantage=1.0):
    """A sample of an answer for each, with the logprobs of the engine."""
    answers = asyncio.run(_answer(of, samplings))
    return [
        Sample(
            ids=PROMPT + answer.completion_ids,
            mask=(False,) * len(PROMPT) + (True,) * len(answer.completion_ids),
            logprobs=(0.0,) * len(PROMPT) + answer.logprobs,
            advantages=(0.0,) * len(PROMPT) + (advantage * (-1) ** index,) * len(answer.completion_ids),
            turns=(Turn(len(PROMPT), len(PROMPT) + len(answer.completion_ids), sampling=sampling.shape()),),
        )
        for index, (answer, sampling) in enumerate(zip(answers, samplings, strict=True))
    ]


def allowed_ids(of, constraint, answer):
    """The ids that llguidance allows after each token of an answer."""
    import llguidance.hf
    import numpy

    vocabulary = of.codec.vocabulary
    words = llguidance.hf.from_tokenizer(of.tokenizer, n_vocab=vocabulary, eos_token=sorted(of.stop_ids))
    schema = {**json.loads(constraint.text), "x-guidance": {"whitespace_pattern": r"[ ]?|\n[ \t]{0,16}"}}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    matcher = llguidance.LLMatcher(words, grammar)
    for token in answer:
        bits = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
        yield numpy.unpackbits(bits, bitorder="little")[:vocabulary].nonzero()[0].tolist()
        assert matcher.consume_token(token)


def by_hand(of, sample):
    """The logprob of each sampled token with its gradient, from the definitions, a token at a time."""
    (turn,) = sample.turns
    wanted, answer = turn.sampling, sample.ids[turn.start :]
    forms = list(allowed_ids(of, wanted.constraint, answer)) if wanted.constraint else [None] * len(answer)
    logits_TV = of.model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0].float()
    for index, token in enumerate(answer):
        prefix, values = sample.ids[: turn.start + index], logits_TV[turn.start + index - 1].clone()
        left = set(range(len(values)) if forms[index] is None else forms[index])
        if index < wanted.min_tokens:
            left = left - set(of.stop_ids) or left
        for other, bias in wanted.logit_bias:
            values[other] = values[other] + bias
        for other in set(prefix):
            factor = wanted.repetition_penalty
            values[other] = values[other] / factor if values[other] > 0 else values[other] * factor
        for other, count in Counter(answer[:index]).items():
            values[other] = values[other] - count * wanted.frequency_penalty - wanted.presence_penalty
        if wanted.temperature:
            values = values / wanted.temperature
            left = _truncate(values.detach(), left, wanted)
        yield values[token] - torch.logsumexp(values[sorted(left)], 0)


def _truncate(values, left, wanted):
    order = sorted(left, key=(-values).tolist().__getitem__)
    shares = torch.softmax(values[order], 0).tolist()
    kept = [(o, s) for o, s in zip(order, shares, strict=True) if s >= wanted.min_p * shares[0]]
    kept = kept[: wanted.top_k or None]
    total, mass, nucleus = sum(share for _, share in kept), 0.0, []
    for other, share in kept:
        if wanted.top_p < 1 and mass >= wanted.top_p * total:
            break
        nucleus.append(other)
        mass += share
    return nucleus


def assert_agree(of, samples):
    for sample, learned in zip(samples, sample_logprobs(of, samples), strict=True):
        own = sample.logprobs[len(PROMPT) :]
        assert learned[len(PROMPT) :] == pytest.approx(own, abs=1e-4)
        with torch.no_grad():
            assert [float(value) for value in by_hand(of, sample)] == pytest.approx(own, abs=1e-4)


@pytest.mark.parametrize("name", SINGLE)
def test_engine_and_learner_have_the_same_logprobs_for_each_parameter(name):
    changes = {name: SINGLE[name], "max_tokens": 16}
    assert_agree(policy(), make_samples(policy(), Sampling(**changes)))


ANY = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([0, 3, 40]),
    min_p=st.sampled_from([0.0, 0.1]),
    min_tokens=st.sampled_from([0, 5]),
    frequency_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    logit_bias=st.sampled_from([(), ((1, 4.0),), ((12, -5.0), (20, 5.0))]),
    constraint=st.sampled_from([None, AS_JSON]),
    max_tokens=st.just(16),
    seed=st.integers(0, 5),
)


@pytest.mark.slow
@given(st.lists(ANY, min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_engine_and_learner_have_the_same_logprobs_for_all_parameters_together(samplings):
    assert_agree(policy(), make_samples(policy(), *samplings))


@pytest.mark.parametrize("packing", one_quick("tree", "padded"))
@pytest.mark.parametrize("changes", one_quick(SINGLE, {"constraint": AS_JSON}), ids=["all", "schema"])
def test_the_gradient_of_constrained_samples_is_that_of_a_naive_loop(packing, changes):
    of = fresh_policy(2)
    wanted = Sampling(**changes, max_tokens=16)
    # The last one has the tokens of the first, sampled otherwise.
    samples = make_samples(of, wanted, wanted, Sampling(max_tokens=8))
    (turn,) = samples[0].turns
    samples.append(replace(samples[0], turns=(replace(turn, sampling=Sampling()),)))
    ours = get_gradient(of, to_batch(samples), Grpo(correction="none"), packing=packing)
    losses = []
    for sample in samples:
        rows = zip(by_hand(of, sample), sample.logprobs[len(PROMPT) :], strict=True)
        for logprob, before in rows:
            ratio, gain = torch.exp(logprob - before), sample.advantages[-1]
            losses.append(-torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain))
    assert_same(ours, gradient_by_autograd(of, sum(losses) / len(losses)))


def test_a_token_that_truncation_would_leave_out_by_now_still_has_a_gradient():
    of = fresh_policy(3)
    samples = make_samples(of, Sampling(top_k=1, max_tokens=6))
    samples[0] = replace(samples[0], ids=(*PROMPT, *(token ^ 1 for token in samples[0].ids[len(PROMPT) :])))
    _, gradient = get_gradient(of, to_batch(samples), Grpo())
    assert all(bool(value.isfinite().all()) for value in gradient.values())


def test_an_answer_of_another_form_is_trained_on_without_it(caplog):
    of = policy()
    plain = make_samples(of, Sampling(max_tokens=6))
    turn = replace(plain[0].turns[0], sampling=Sampling(constraint=AS_JSON))
    assert sample_logprobs(of, [replace(plain[0], turns=(turn,))]) == sample_logprobs(of, plain)
    assert "(json_schema)" in caplog.text


def test_a_constraint_that_cannot_be_kept_is_an_error():
    plain = make_samples(policy(), Sampling(max_tokens=6))
    turn = replace(plain[0].turns[0], sampling=Sampling(constraint=Constraint("regex", "[a")))
    with pytest.raises(TrainingError, match="its regex: "):
        sample_logprobs(policy(), [replace(plain[0], turns=(turn,))])


COUNT, WIDTH, VOCABULARY = 23, 16, 330


def choices(dtype: torch.dtype):
    """Hidden states, weights and chosen tokens; logits are between -10 and 10."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (COUNT,), generator=draw)


def temperatures() -> list[Adjustment | None]:
    """Of the model's own distributions, and of hotter and colder ones."""
    changed = Sampling(temperature=0.5), Sampling(temperature=1.7, max_tokens=3)
    return [None, *map(Adjustment, changed)] * 8


def gradient(head: Head, hidden, weight, targets, shapes):
    """Values, and the gradient of a sum of them that weighs each otherwise."""
    made = selective_logprobs(head, hidden, targets, shapes, VOCABULARY)
    weights = torch.linspace(-1, 2, made.numel()).view(made.shape)
    return made, *torch.autograd.grad((made * weights).sum(), (hidden, weight))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("held", [1 << 27, 5 * VOCABULARY * 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_short_way_gives_the_same(monkeypatch, dtype, held, warm):
    monkeypatch.setattr("etude.learner.head._HELD", held)
    monkeypatch.setattr("etude.learner.head._IN_CACHE", 3 * VOCABULARY)
    hidden, weight, targets = choices(dtype)
    shapes = temperatures()[:COUNT] if warm else [None] * COUNT
    short = Head(lambda hidden: hidden @ weight.t(), weight)
    made = gradient(short, hidden, weight, targets, shapes)
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    plain = Head(lambda hidden: hidden @ exact[1].t())
    wanted = gradient(plain, exact[0], exact[1], targets, shapes)
    for one, other in zip(made, wanted, strict=True):
        error = float((one - other).detach().abs().max() / other.detach().abs().max())
        assert error < (1e-5 if dtype == torch.float32 else 4e-2)


def test_only_heads_that_are_a_plain_product_go_the_short_way():
    of = fresh_policy()
    module = of.model.get_output_embeddings()
    assert Head.find(of.model).weight_VD is module.weight
    module.register_forward_hook(lambda *_: None)
    assert Head.find(of.model).weight_VD is None
    for name in ("CohereConfig", "GraniteConfig", "Gemma2Config"):
        changes = {"logits_scaling": 2.0} if name == "GraniteConfig" else {}
        assert Head.find(family(name, **changes).model).weight_VD is None, name
