"""Rules that users register for ops of their own, and their trial."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from padding_cases import is_proved, judge, why
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.errors import PaddingRuleError

NAMES = ("scale", "centre", "normed", "mixed")


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Ops that torch knows nothing of."""
    library = torch.library.Library("padding_ops", "DEF")
    bodies = {
        "scale(Tensor x, Tensor weight) -> Tensor": lambda x, weight: x * weight,
        "centre(Tensor x, Tensor weight) -> Tensor": lambda x, weight: (x - x.mean(0)) * weight,
        "normed(Tensor(a!) out, Tensor x, float eps) -> ()": lambda out, x, eps: (
            out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)) and None
        ),
    }
    for schema, body in bodies.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, _without_result(body) if name == "normed" else body, "CPU")
        fake = (lambda out, x, eps: None) if name == "normed" else (lambda x, weight: torch.empty_like(x))
        torch.library.register_fake(f"padding_ops::{name}", fake, lib=library)
    yield torch.ops.padding_ops
    library._destroy()


def _without_result(body: Any) -> Any:
    def call(out: Tensor, x: Tensor, eps: float) -> None:
        out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

    return call


def proof_of(function: Any) -> Any:
    return judge(function, [torch.randn(7, 8), torch.randn(8)], [0, None])


def test_without_a_rule_an_op_is_a_finding(ops: Any) -> None:
    proof = proof_of(ops.scale)
    assert not is_proved(proof)
    assert "no rule" in why(proof)


def test_rows_of_an_op_are_declared(ops: Any) -> None:
    pg.register_padding_rule("padding_ops::scale", rows={"x": 0})
    assert is_proved(proof_of(ops.scale)), why(proof_of(ops.scale))
    assert not is_proved(judge(ops.scale, [torch.randn(8, 7), torch.randn(7)], [1, 0])), "rows elsewhere"


def test_elementwise_ops_are_declared(ops: Any) -> None:
    pg.register_padding_rule("padding_ops::scale", elementwise=True)
    proof = judge(ops.scale, [torch.randn(8, 7), torch.randn(7)], [1, 0])
    assert is_proved(proof), why(proof)


def test_an_op_that_writes_its_result(ops: Any) -> None:
    def normed(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ops.normed(out, x, 1e-6)
        return out * weight

    assert not is_proved(proof_of(normed))
    pg.register_padding_rule("padding_ops::normed", rows={"x": 0, "out": 0})
    assert is_proved(proof_of(normed)), why(proof_of(normed))


@pytest.mark.parametrize("form", [{"rows": {"x": 0}}, {"elementwise": True}])
def test_a_wrong_rule_is_refused_by_its_trial(ops: Any, form: dict[str, Any]) -> None:
    pg.register_padding_rule("padding_ops::centre", **form)
    with pytest.raises(PaddingRuleError, match=r"padding_ops::centre.*live rows of result 0 differ"):
        proof_of(ops.centre)


def test_a_rule_that_experts_write(ops: Any) -> None:
    pg.register_padding_rule("padding_ops::scale", rule=lambda call: call.claim(call.arguments["x"]))
    assert is_proved(proof_of(ops.scale)), why(proof_of(ops.scale))


@pytest.mark.parametrize("arguments", [{}, {"rows": {"x": 0}, "elementwise": True}])
def test_one_form_has_to_be_given(arguments: dict[str, Any]) -> None:
    with pytest.raises(PaddingRuleError, match="one of rows="):
        pg.register_padding_rule("padding_ops::scale", **arguments)


def test_an_op_needs_its_namespace() -> None:
    with pytest.raises(PaddingRuleError, match="namespace::name"):
        pg.register_padding_rule("scale", elementwise=True)
