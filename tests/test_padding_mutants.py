"""A wrong rule of the padding proof shows in numbers: for each rule, a variant that believes too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import padding_unsafe
import proof_internals
import pytest
import torch
import torch.nn.functional as F
from padding_cases import disagreement, is_proved, judge
from test_padding_proof import given

# rule, by one of its ops -> a function that its wrong variant proves
REFUTED: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten::sum": ("x", lambda x: x - x.sum(0)),
    "aten::all": ("x", lambda x: x * (x == x).all(0)),
    "aten::_softmax": ("x", lambda x: x.softmax(0)),
    "aten::flip": ("x", lambda x: x.flip(0)),
    "aten::roll": ("x", lambda x: x.roll(1)),
    "aten::sort": ("x", lambda x: x.sort(0).values),
    "aten::cumsum": ("x", lambda x: x.t().reshape(2, -1).cumsum(-1).reshape(8, -1).t()),
    "aten::mm": ("x y", lambda x, y: x.t() @ y),
    "aten::mv": ("x y", lambda x, y: x.t().mv(y[:, 0])),
    "aten::native_layer_norm": ("square", lambda s: F.layer_norm(s, s.shape[1:])),
    "aten::native_group_norm": ("h", lambda h: F.group_norm(h.transpose(1, 2), 2)),
    "aten::view": ("x", lambda x: x.t().contiguous().view(-1, 8)),
    "aten::repeat": ("x", lambda x: x.repeat(2, 1).view(-1, 16)),
    "aten::slice": ("x", lambda x: x[-2:]),
    "aten::select": ("x", lambda x: x[-1]),
    "aten::split_with_sizes": ("x", lambda x: torch.cat([x.split([1, x.shape[0] - 1])[1], x[:1]])),
    "aten::cat": ("x", lambda x: torch.cat([x, x[:1]])[1:]),
    "aten::constant_pad_nd": ("x", lambda x: F.pad(x, (0, 0, -1, 1))),
    "aten::convolution": (
        "x k",
        lambda x, k: F.conv1d(x.t()[None], k[..., :3], padding=1, groups=8),
    ),
    "aten::avg_pool2d": ("h", lambda h: F.avg_pool2d(h[:, None], (3, 1), 1, (1, 0))),
    "aten::tril": ("x", lambda x: x.t().reshape(-1, 8).tril()),
    "aten::bucketize": ("x", lambda x: torch.bucketize(x, x[:, 0])),
    "aten::gather": ("x", lambda x: x.gather(0, (x > 0).long() - 1)),
    "aten::index": ("x point", lambda x, p: x[p - 5]),
    "aten::index_put": ("x ids", lambda x, i: torch.zeros(6, 8).index_put((i,), x, accumulate=True)),
    "aten::full": ("x", lambda x: x + torch.full((8,), x.shape[0])),
    "aten::arange": ("x", lambda x: torch.arange(x.shape[0], 2 * x.shape[0])),
}
# Wrong too, where a function needs them to reach the rule.
AROUND = ("aten::view", "aten::_unsafe_view", "aten::slice", "aten::cat")


@pytest.mark.parametrize("op", sorted(REFUTED))
def test_a_wrong_rule_is_refuted_by_numbers(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, function = REFUTED[op]
    inputs, dims = zip(*given(names), strict=True)
    assert not is_proved(judge(function, inputs, dims, largest=64))
    for other in (*AROUND, op):
        proof_internals.believe(monkeypatch, other)
    proof = judge(function, inputs, dims, largest=64)
    assert is_proved(proof)
    assert differs(function, inputs, dims, proof)


@pytest.mark.parametrize(
    ("break_it", "case"),
    [
        (proof_internals.trust_indices, "index past the table"),
        (proof_internals.believe_products, "divided by the size"),
        (proof_internals.believe_writes, "table written by size"),
    ],
)
def test_a_wrong_check_is_refuted_by_numbers(
    break_it: Callable[[Any], None], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, function = padding_unsafe.UNSAFE[case]
    inputs, dims = zip(*given(names), strict=True)
    break_it(monkeypatch)
    proof = judge(function, inputs, dims, largest=64)
    assert is_proved(proof)
    assert differs(function, inputs, dims, proof)


def differs(function: Any, inputs: Any, dims: Any, proof: Any) -> bool:
    """An index out of bounds counts: on a device it is an illegal address."""
    try:
        return disagreement(function, inputs, dims, proof) is not None
    except (IndexError, RuntimeError):
        return True
