"""A linear, a residual, the norm of their sum and linears of it as one op, for few rows and for many."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from linear_operands import DEVICE, DTYPES, EPSILON, EXAMPLES, TOLERANCE, norm, operands
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional
from traced import trace

import piecewise_graph as pg
from piecewise_graph.compiler.choosing_linears import choosing_linears
from piecewise_graph.compiler.deferred_norms import compile_norms_ahead, with_deferred_norms
from piecewise_graph.eagle.head.random_models import ModelShape, random_model
from piecewise_graph.kernels.linear import linear_launch, norm_op

OP = torch.ops.piecewise.linear_norm_linears.default


@pytest.mark.slow
@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


class Layer:
    """Random operands of the op, and what it is to compute."""

    def __init__(
        self,
        tokens: int,
        columns: int,
        rows: int,
        after: list[int],
        dtype: torch.dtype,
        bias: bool,
        seed: int = 0,
    ) -> None:
        self.x, self.weight, self.bias = operands(tokens, rows, columns, dtype, seed)
        self.residual = operands(tokens, 1, rows, dtype, seed + 1)[0]
        self.gain = operands(1, rows, 1, dtype, seed + 2)[2]
        self.weights, biases = zip(*(operands(1, n, rows, dtype, 3 + n)[1:] for n in after), strict=True)
        self.bias = self.bias if bias else None
        self.biases = list(biases) if bias else [None] * len(after)

    def found(self, gated: bool) -> list[Tensor]:
        operands = self.x, self.weight, self.bias, self.residual, self.gain, EPSILON
        return OP(*operands, list(self.weights), self.biases, gated)

    def unfused(self, gated: bool, dtype: torch.dtype) -> list[Tensor]:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

        hidden = self.residual.to(dtype) + linear(self.x.to(dtype), self.weight, self.bias)
        wide = hidden.double() if dtype == torch.float64 else hidden.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        normed = self.gain.to(dtype) * unit.to(dtype)
        made = [linear(normed, w, b) for w, b in zip(self.weights, self.biases, strict=True)]
        return [hidden, functional.silu(made[0]) * made[1]] if gated else [hidden, *made]

    def check(self, gated: bool) -> None:
        dtype = self.x.dtype
        for got, wanted in zip(self.found(gated), self.unfused(gated, torch.float64), strict=True):
            assert got.dtype == dtype and got.is_contiguous() and got.shape == wanted.shape
            scale = max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
            atol = 3 * TOLERANCE[dtype] * scale
            torch.testing.assert_close(got.double(), wanted, rtol=2 * TOLERANCE[dtype], atol=atol)


class TestOp:
    pytestmark = needs_kernels

    @pytest.fixture
    def deferred(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Rows of each call that has no norm of its own."""
        calls, launch = list[int](), linear_launch.added_few

        def noted(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(x.numel() // x.shape[-1])
            return launch(x, *rest)

        monkeypatch.setattr(linear_launch, "added_few", noted)
        return calls

    @EXAMPLES
    @given(
        st.integers(0, 70) | st.integers(65, 130),
        st.sampled_from([24, 128, 528, 1152]),
        st.sampled_from([64, 512, 528, 640]),
        st.lists(st.sampled_from([1, 17, 520]), min_size=1, max_size=4),
        st.booleans(),
        st.booleans(),
        st.sampled_from([*DTYPES, torch.float32]),
        st.sampled_from([2, 132]),
    )
    def test_it_is_what_it_stands_for(
        self, tokens: int, columns: int, rows: int, after: list[int], gated: bool, bias: bool,
        dtype: torch.dtype, processors: int,
    ) -> None:  # fmt: skip
        layer = Layer(tokens, columns, rows, after[:1] * 2 if gated else after, dtype, bias)
        with patch.object(norm_op.linear_op, "multiprocessors", lambda device: processors):
            layer.check(gated)

    @pytest.mark.parametrize("tokens, outlier, channel", [(1, 1e4, 511), (17, 1e4, 0), (17, 3e-3, 300)])
    def test_outliers(self, tokens: int, outlier: float, channel: int) -> None:
        layer = Layer(tokens, 128 if tokens > 1 else 512, 512, [512], torch.bfloat16, False)
        layer.residual[:, channel] *= outlier
        layer.check(False)

    @pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16 off")
    @pytest.mark.parametrize("tokens", [1, 20])
    @pytest.mark.parametrize("outlier", [1.0, 1e4])
    def test_it_is_as_exact_as_what_it_stands_for(self, outlier: float, tokens: int) -> None:
        """Against float64, over 400 rows: the error of an outlier is one for all of a row's results."""
        errors = torch.zeros(2, 2, dtype=torch.float64)
        for seed in range(0, 1200 // tokens, 3):
            layer = Layer(tokens, 512, 512, [512], torch.bfloat16, False, seed)
            layer.residual[:, 7] *= outlier
            exact = layer.unfused(False, torch.float64)
            for way, results in enumerate((layer.found(False), layer.unfused(False, torch.bfloat16))):
                for index, (got, wanted) in enumerate(zip(results, exact, strict=True)):
                    errors[way, index] += (got.double() - wanted).square().sum().cpu()
        ours, theirs = errors
        assert (ours <= 1.05 * theirs).all(), errors

    def test_which_calls_have_no_norm_of_their_own(self, deferred: list[int]) -> None:
        """Those of few rows in bfloat16: float16 could overflow. Nor where one order of sums is asked for."""
        for tokens, dtype in (
            (1, torch.bfloat16),
            (64, torch.bfloat16),
            (65, torch.bfloat16),
            (1, DTYPES[1]),
        ):
            Layer(tokens, 512, 512, [512], dtype, False).check(False)
        assert deferred == [1, 64]
        torch.use_deterministic_algorithms(True)
        try:
            Layer(1, 512, 512, [512], torch.bfloat16, False).check(False)
        finally:
            torch.use_deterministic_algorithms(False)
        assert deferred == [1, 64]

    def test_a_norm_of_too_many_blocks_is_its_own(self, deferred: list[int]) -> None:
        layer = Layer(17, 512, 512, [512], torch.bfloat16, False)
        with patch.object(norm_op, "_SQUARES", 255):
            layer.check(False)
        layer.check(False)
        assert deferred == [17]

    @pytest.mark.parametrize("tokens", [1, 17])
    def test_a_row_of_zeros_and_one_as_small_as_epsilon(self, tokens: int) -> None:
        for size in (0.0, 3e-3):
            layer = Layer(tokens, 512, 512, [512], torch.bfloat16, False)
            layer.x, layer.residual = layer.x * size, layer.residual * size
            found, wanted = layer.found(False)[1].double(), layer.unfused(False, torch.float64)[1]
            assert (found - wanted).norm() <= 0.02 * wanted.norm()

    @pytest.mark.parametrize(
        "case", ["one gate row", "three gated", "residual of one row", "gain of one", "no columns"]
    )
    def test_other_shapes_are_torchs(self, case: str, deferred: list[int]) -> None:
        """It spreads them, or refuses them; nothing is read past its end."""
        layer = Layer(3, 512, 512, [512, 512, 512], torch.bfloat16, False)
        weights = list(layer.weights)
        layer.weights = tuple([weights[0][:1], weights[1]] if case == "one gate row" else weights)
        if case == "residual of one row":
            layer.residual = layer.residual[:1]
        if case == "gain of one":
            layer.gain = layer.gain[:1]
        if case == "no columns":
            layer.x, layer.weight = layer.x[:, :0], layer.weight[:, :0]
        gated = "gate" in case
        layer.biases = [None] * len(layer.weights)
        if case == "three gated":
            with pytest.raises(ValueError, match="unpack"):
                layer.found(gated)
        else:
            layer.check(gated)
        assert not deferred

    def test_a_linear_whose_halves_are_gated(self, deferred: list[int]) -> None:
        """Gate and up in one weight: its halves are no weights of the model's own."""
        x, weight, _ = operands(2, 512, 128, DTYPES[0])
        residual, both, _ = operands(2, 512, 512, DTYPES[0], 1)
        gain = operands(1, 512, 1, DTYPES[0], 2)[2]

        def model(x: Tensor, residual: Tensor, weight: Tensor, both: Tensor, gain: Tensor) -> Tensor:
            hidden = residual + functional.linear(x, weight)
            y = functional.linear(norm(hidden, gain), both)
            return functional.silu(y[..., :256]) * y[..., 256:] + hidden[:, :256]

        def code(gm: GraphModule) -> GraphModule:
            made = with_deferred_norms(choosing_linears(gm))
            compile_norms_ahead(made, [1, 2])
            return made

        args = x, residual, weight, both, gain
        traced = trace(model, *args, look=code)
        (found,) = traced.seen[0](*traced.inputs[0])
        torch.testing.assert_close(found, model(*args), rtol=3e-2, atol=0.2)
        assert deferred == [2]

    def test_more_dimensions_and_other_strides(self, deferred: list[int]) -> None:
        layer = Layer(6, 512, 512, [512], torch.bfloat16, True)
        flat = layer.found(False)
        layer.x, layer.residual = (
            y.view(2, 3, 512).transpose(0, 1).contiguous().transpose(0, 1) for y in (layer.x, layer.residual)
        )
        for found, wanted in zip(layer.found(False), flat, strict=True):
            assert found.is_contiguous() and torch.equal(found, wanted.view(2, 3, -1))
        assert deferred == [6, 6]

    def test_a_model_has_no_norms_between_its_linears(self, deferred: list[int]) -> None:
        """Two of a layer, but for the last one of all, which is sliced before the head."""
        config = {
            "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 64,
        }  # fmt: skip
        torch.manual_seed(0)
        model = random_model(ModelShape("small", config), DEVICE, "sdpa")
        compiled = pg.compile(model, cuda_graphs="off", max_tokens=130)
        with torch.no_grad():
            for tokens in (130, 2):
                ids = torch.arange(tokens, device=DEVICE)[None] * 7 % 64
                found = compiled(input_ids=ids, use_cache=False).logits.double()
                assert deferred == ([2, 2, 2] if tokens == 2 else [])
                wanted = model(input_ids=ids, use_cache=False).logits.double()
                assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_opcheck() -> None:
    layer = Layer(3, 64, 32, [16, 16], torch.bfloat16, True)
    rest = layer.residual, layer.gain, EPSILON, list(layer.weights)
    for gated in (False, True):
        for bias, biases in ((layer.bias, layer.biases), (None, [None, None])):
            torch.library.opcheck(OP, (layer.x, layer.weight, bias, *rest, biases, gated))


def test_it_is_torchs_without_kernels() -> None:
    for gated in (False, True):
        Layer(3, 64, 32, [16, 16], torch.float32, True).check(gated)
