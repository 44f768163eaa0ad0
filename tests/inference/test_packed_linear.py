"""A packed linear layer says what `functional.linear` says, whatever its size."""

from __future__ import annotations

import weakref

import numpy
import pytest
import torch
from torch.nn import functional

from etude.inference.fused_weights import PackedLinear


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


def test_where_it_is_packed_nothing_else_holds_the_weight():
    numbers = numpy.ones((1024, 256), numpy.float32)
    memory = weakref.ref(numbers)  # It lives as long as any tensor that looks at it.
    layer = PackedLinear(torch.from_numpy(numbers), None)
    del numbers
    assert layer(torch.ones(1, 256)).tolist() == [[256.0] * 1024]
    assert memory() is None
