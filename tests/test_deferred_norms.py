"""Which norms between two linears become one op with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_operands import norm
from torch import Tensor
from torch.fx import GraphModule
from traced import placeholders, trace

from piecewise_graph._torch import example_value
from piecewise_graph.compiler.deferred_norms import with_deferred_norms

OP = torch.ops.piecewise.linear_norm_linears.default


# What stands between two calls of linears, and whether that is one op with them.


def call(x: Tensor, *weights: Tensor) -> list[Tensor]:
    found: list[Tensor] = torch.ops.piecewise.linears.default(x, weights, [None] * len(weights))
    return found


def gated(x: Tensor, *weights: Tensor) -> Tensor:
    found: Tensor = torch.ops.piecewise.swiglu.default(x, weights, [None, None])
    return found


def written(hidden: Tensor, gain: Tensor, a: Tensor) -> list[Tensor]:
    normed = norm(hidden, gain)
    a.mul_(2)
    return call(normed, a)


def picked(hidden: Tensor, a: Tensor) -> Tensor:
    """A fixed number of rows of a weight; which ones, the sum says."""
    return a[(hidden[0] > 0).to(torch.int64)]


def swapped(hidden: Tensor, gain: Tensor) -> Tensor:
    """The norm, with the factors of both products the other way round."""
    wide = hidden.to(torch.float32)
    return gain * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * wide).to(hidden.dtype)


# How many ops there are of it.
BETWEEN: dict[str, tuple[Callable[..., Any], int]] = {
    "linears": (lambda h, g, a, b: [*call(norm(h, g), a, b), h * 2], 1),
    "swapped factors": (lambda h, g, a, b: call(swapped(h, g), a), 1),
    "swiglu": (lambda h, g, a, b: [gated(norm(h, g), a, b), h * 2], 1),
    "parts of a weight": (lambda h, g, a, b: gated(norm(h, g), a[:4], a[4:]), 1),
    "nothing else reads the sum": (lambda h, g, a, b: call(norm(h, g), a), 1),
    "a second layer": (lambda h, g, a, b: call(norm(h + call(call(norm(h, g), a)[0], b)[0], g), a), 2),
    "the sum is read between": (lambda h, g, a, b: [h * 2, *call(norm(h, g), a)], 0),
    "the norm is read elsewhere": (lambda h, g, a, b: [n := norm(h, g), *call(n, a)], 0),
    "two calls read the norm": (lambda h, g, a, b: [*call(n := norm(h, g), a), *gated(n, a, b)], 0),
    "the norm is a weight": (lambda h, g, a, b: call(n := norm(h, g), n), 0),
    "a weight is computed": (lambda h, g, a, b: call(norm(h, g), a * 2), 0),
    "a weight is picked by the sum": (lambda h, g, a, b: call(norm(h, g), picked(h, a)), 0),
    "a weight is written": (lambda h, g, a, b: written(h, g, a), 0),
    "no norm": (lambda h, g, a, b: call(h * g, a), 0),
    "another norm": (lambda h, g, a, b: call(norm(h, g + 1), a), 0),
    "more between": (lambda h, g, a, b: call(norm(h, g) * 2, a), 0),
}
SIZE = 8


def passed(gm: GraphModule) -> tuple[int, Any, Any]:
    with warnings.catch_warnings(action="error"):  # the graph's own, of nodes that are erased twice
        made = with_deferred_norms(gm)
    made.graph.lint()
    args = [torch.randn(example_value(node).shape) for node in placeholders(gm)]
    count = sum(node.target is OP for node in made.graph.nodes)
    return count, gm(*map(torch.clone, args)), made(*map(torch.clone, args))


@pytest.mark.parametrize("before", ["", "two weights", "read elsewhere", "subtracted"])
@pytest.mark.parametrize("between", BETWEEN)
def test_which_norms_are_deferred(between: str, before: str) -> None:
    function, count = BETWEEN[between]

    def model(x: Tensor, w: Tensor, residual: Tensor, gain: Tensor, a: Tensor, b: Tensor) -> Any:
        y, *others = call(x, w, w) if before == "two weights" else call(x, w)
        hidden = residual - y if before == "subtracted" else residual + y
        return function(hidden, gain, a, b), others, [y] if before == "read elsewhere" else []

    rows, matrices = torch.randn(2, 3, SIZE), torch.randn(3, SIZE, SIZE)
    args = rows[0], matrices[0], rows[1], torch.randn(SIZE), matrices[1].clone(), matrices[2]
    ((found, expected, got),) = trace(model, *args, look=passed).seen
    assert found == max(count - bool(before), 0)  # without the first one, if that is no linear alone
    torch.testing.assert_close(got, expected)


def test_sums_that_do_not_lie_row_by_row_keep_their_layout() -> None:
    """What reads them may rely on it: a view of permuted dimensions."""

    def model(x: Tensor, w: Tensor, gain: Tensor, a: Tensor) -> Any:
        residual = x.transpose(0, 1)
        hidden = residual + call(residual.contiguous(), w)[0]
        return call(norm(hidden, gain), a), hidden.transpose(0, 1).view(-1)

    args = torch.randn(3, 2, 2, SIZE), torch.randn(SIZE, SIZE), torch.randn(SIZE), torch.randn(SIZE, SIZE)
    ((found, expected, got),) = trace(model, *args, look=passed).seen
    assert found == 0
    torch.testing.assert_close(got, expected)
