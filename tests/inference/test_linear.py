"""A packed linear layer says what `functional.linear` says, whatever its size."""

from __future__ import annotations

import weakref

import numpy
import pytest
import torch
from torch.nn import functional

from etude.inference.linear import EightBitLinear, LowRank, PackedLinear


@pytest.mark.parametrize("out", [3, 64, 1000])
@pytest.mark.parametrize("rows", [1, 8, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_plain_product(out, rows, biased):
    generator = torch.Generator().manual_seed(out + rows)
    weight, x = (torch.randn(count, 256, generator=generator) for count in (out, rows))
    bias = torch.randn(out, generator=generator) if biased else None
    written, added_to = torch.empty(rows, out), torch.ones(rows, out)
    with torch.inference_mode():
        layer, expected = PackedLinear(weight, bias), functional.linear(x, weight, bias)
        found = layer(x)
        layer(x, out=written)
        layer.add_to(added_to, x)
    for one in (found, written, added_to - 1):
        torch.testing.assert_close(one, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 8, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_of_eight_bits_it_is_the_product_with_the_rounded_weights(rows, biased):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(100, 256, generator=generator) * torch.logspace(-3, 1, 100)[:, None]
    x = torch.randn(rows, 256, generator=generator)
    x[0, :2] = torch.tensor([300.0, 0.0])  # An outlier takes nothing from the rest of its row.
    weight[3], x[-1] = 0.0, x[-1] * 1e-20
    bias = torch.randn(100, generator=generator) if biased else None
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    rounded = torch.where(step > 0, (weight / step).round() * step, 0.0)
    low = LowRank(torch.randn(4, 256, generator=generator), torch.randn(100, 4, generator=generator))
    expected = functional.linear(x, rounded, bias) + x @ low.down.T @ low.up.T
    written, added_to = torch.empty(rows, 100), torch.ones(rows, 100)
    with torch.inference_mode():
        layer = EightBitLinear(weight, bias, low)
        found = layer(x)
        layer(x, out=written)
        layer.add_to(added_to, x)
        alone = layer(x[:1])
    # Of what the numbers of a row and of a weight are at most: that is what is rounded.
    size = x.abs().amax(dim=1, keepdim=True) * weight.abs().amax(dim=1) * 256**0.5
    for one in (found, written, added_to - 1):
        assert ((one - expected).abs() <= 1e-4 * size + 1e-6 * expected.abs() + 1e-6).all()
    torch.testing.assert_close(alone, found[:1], atol=1e-3, rtol=1e-5)


def test_where_it_is_packed_nothing_else_holds_the_weight():
    numbers = numpy.ones((1024, 256), numpy.float32)
    memory = weakref.ref(numbers)  # It lives as long as any tensor that looks at it.
    layer = PackedLinear(torch.from_numpy(numbers), None)
    del numbers
    assert layer(torch.ones(1, 256)).tolist() == [[256.0] * 1024]
    assert memory() is None
