"""Sampling on a device that is not the CPU: nothing mixes the two, and little is waited for.

Run by `tests/test_devices.py`, in a process of its own.
"""

import pytest

from etude.core.call import Sampling
from etude.engines.embedded import make_decoder
from etude.engines.sampler import LiveRow, uniforms
from tests.models.tiny_models import family
from tests.pretended import move_to_device, pretending

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3}),
    "recomputed": ("Lfm2Config", {"full_attn_idxs": [1]}),
}


def make_rows(sampling=Sampling):
    prompts = [range(10, 10 + length) for length in (5, 70, 3)]
    return [
        LiveRow(
            f"talk {key}",
            list(prompt),
            sampling(temperature=0.7, top_p=0.9, max_tokens=8),
            uniforms(key),
            top=2,
        )
        for key, prompt in enumerate(prompts)
    ]


def sample(policy, *, deterministic=False):
    """Tokens and logprobs of rows, joined by another turn and another conversation half-way."""
    decoder, rows = make_decoder(policy, slots=4, deterministic=deterministic), make_rows()

    def grow(tokens):
        while growing := [row for row in rows if len(row.logprobs) < tokens]:
            decoder.step(growing)

    grow(5)
    decoder.release(rows[0])
    again = LiveRow("talk 0", [*rows[0].ids, 7, 8], Sampling(temperature=0.0), uniforms(9))
    rows = [*rows[1:], again, LiveRow("new", [*rows[1].ids[:70], 9], Sampling(), uniforms(8))]
    grow(11)
    return [(row.ids, row.logprobs) for row in rows]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_samples_what_the_cpu_does(name, deterministic):
    config, changes = FAMILIES[name]
    wanted = sample(family(config, **changes), deterministic=deterministic)
    with pretending():
        found = sample(move_to_device(family(config, **changes)), deterministic=deterministic)
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=1e-4)


def test_a_token_is_waited_for_a_few_times_however_many_there_are():
    def count_waits(rows):
        with pretending() as waits:
            decoder = make_decoder(move_to_device(family("LlamaConfig")), slots=4, deterministic=False)
            made = [LiveRow(str(key), [key + 1] * 9, Sampling(), uniforms(key)) for key in range(rows)]
            for _ in range(4):
                decoder.step(made)
            before = waits.total()
            decoder.step(made)
            return waits.total() - before

    assert count_waits(1) == count_waits(9) <= 2
