"""Linears of one input and SwiGLU as ops that choose their kernels, which code for all sizes calls."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hopper import compiled
from hypothesis import given, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from linear_operands import DTYPES, EXAMPLES, TOLERANCE, operands
from torch import Tensor
from torch.nn import functional

import piecewise_graph as pg
from piecewise_graph.kernels.linear import MAX_TOKENS, linear_op, linears, swiglu
from piecewise_graph.kernels.linear.kernel_configs import larger_sizes, usual_config


@pytest.mark.slow
@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def in_form(form: int, x: Tensor) -> Tensor:
    """As it is, with one dimension more, or with other strides."""
    return (x, x[None], torch.stack([x, x], 1)[:, 0])[form]


TOKENS = st.integers(0, MAX_TOKENS) | st.integers(MAX_TOKENS + 1, 130)  # rows of x

# Rows of x, gated or not, rows of the weights, columns, multiprocessors, and blocks: each rule has a case.
RULES = [
    (1, False, (64,), 1008, 5, "4 1024 1 4 1 1 4 0"), (1, True, (32, 32), 2064, 5, "2 2048 1 4 1 1 4 0"),
    (1, True, (32, 32), 2064, 3, "2 2048 1 4 1 1 4 0"), (1, True, (32, 32), 2064, 1, "4 1024 1 4 1 1 4 0"),
    (1, False, (64,), 4096, 3, "2 2048 1 4 1 1 4 0"), (1, False, (64,), 4112, 3, "4 2048 1 4 1 1 4 0"),
    (1, False, (65,), 2064, 1, "2 1024 1 4 1 1 4 0"), (1, False, (65,), 1040, 1, "4 2048 1 4 1 1 4 0"),
    (1, False, (32, 33), 2064, 2, "4 1024 1 4 1 1 4 0"), (1, False, (32, 32), 2064, 2, "4 2048 1 4 1 1 4 0"),
    (4, False, (512,), 528, 15, "64 128 1 4 7 1 4 0"),
    (4, False, (512,), 528, 16, "32 128 1 4 7 2 16 0"), (4, False, (512,), 528, 22, "16 128 1 4 4 4 16 0"),
    (16, False, (512,), 528, 32, "16 128 1 4 5 4 16 0"), (17, False, (512,), 528, 32, "16 128 1 4 4 4 16 0"),
    (17, False, (512,), 528, 22, "64 128 1 4 7 1 4 0"), (4, False, (256, 256), 528, 31, "64 128 1 4 7 1 4 0"),
    (4, True, (256, 256), 528, 16, "128 64 1 4 7 1 4 0"), (4, True, (256, 256), 528, 3, "64 128 1 4 7 1 4 0"),
    (4, True, (256, 256), 528, 17, "64 128 1 4 7 1 4 0"), (4, False, (512,), 496, 32, "64 128 1 4 7 1 4 0"),
    (17, True, (512, 512), 256, 7, "128 64 1 4 4 1 4 0"),
    (17, True, (256, 256), 4096, 7, "64 128 1 4 7 1 4 0"),
    (33, True, (256, 256), 528, 7, "128 64 1 4 5 1 4 0"),
    (33, True, (512, 512), 528, 7, "128 64 1 4 4 1 4 0"),
    (33, False, (512,), 528, 7, "64 128 1 4 5 1 4 0"), (33, False, (256, 256), 528, 40, "64 128 1 4 5 1 4 0"),
    (65, False, (256, 200, 56), 528, 8, "64 64 1 4 6 1 4 0"),
    (65, False, (256, 200, 57), 528, 8, "128 64 1 4 5 1 4 0"),
    (128, True, (256, 256), 528, 5, "128 64 1 4 5 1 4 0"),
    (128, True, (256, 256), 528, 3, "128 64 1 4 3 1 4 0"),
    (129, False, (256, 200, 57), 528, 15, "128 64 1 4 5 1 4 64"),
]  # fmt: skip


class TestChoosing:
    pytestmark = needs_kernels

    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Rows and weights of each call of kernels of ours."""
        from piecewise_graph.kernels.linear import linear_launch

        calls, launch = list[tuple[int, int]](), linear_launch.linears_few

        def noted(x: Tensor, weights: list[Tensor], *rest: Any) -> list[Tensor]:
            calls.append((x.shape[-2], len(weights)))
            return launch(x, weights, *rest)

        monkeypatch.setattr(linear_launch, "linears_few", noted)
        monkeypatch.setattr(linear_op, "multiprocessors", lambda device: 132)
        return calls

    @EXAMPLES
    @given(
        TOKENS,
        st.lists(st.sampled_from([1, 17, 64, 520]), min_size=1, max_size=4),
        st.sampled_from([24, 128, 512, 1152]),
        st.booleans(),
        st.sampled_from([*DTYPES, torch.float32]),
        st.integers(0, 2),
        st.sampled_from([8, 132]),
    )
    def test_they_are_linears(
        self, tokens: int, rows: list[int], columns: int, bias: bool, dtype: torch.dtype, form: int,
        processors: int,
    ) -> None:  # fmt: skip
        """On devices with few multiprocessors and with many: blocks are cut such that they fill them."""
        x = in_form(form, operands(tokens, 1, columns, dtype)[0])
        weights, biases = zip(
            *(operands(1, n, columns, dtype, seed)[1:] for seed, n in enumerate(rows)), strict=True
        )
        with patch.object(linear_op, "multiprocessors", lambda device: processors):
            found = linears(x, weights, biases if bias else [None] * len(rows))
        for got, weight, b in zip(found, weights, biases, strict=True):
            expected = functional.linear(x.double(), weight.double(), b.double() if bias else None)
            assert got.dtype == dtype and got.is_contiguous() and got.shape == expected.shape
            torch.testing.assert_close(
                got.double(), expected, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype]
            )

    @pytest.mark.parametrize("tokens, gated, rows, columns, processors, blocks", RULES)
    def test_blocks_of_every_rule(
        self, tokens: int, gated: bool, rows: tuple[int, ...], columns: int, processors: int, blocks: str
    ) -> None:
        config = usual_config(tokens, rows, columns, gated=gated, processors=processors)
        assert config is not None and config.name == f"{blocks} 0"  # no ring
        made = [operands(tokens, n, columns, DTYPES[1], seed) for seed, n in enumerate(rows)]
        x, weights, biases = made[0][0], [w for _, w, _ in made], [bias for *_, bias in made]
        pairs = zip(weights, biases, strict=True)
        wide = [functional.linear(x.double(), w.double(), bias.double()) for w, bias in pairs]
        with patch.object(linear_op, "multiprocessors", lambda device: processors):
            if gated:
                found = [swiglu(x, weights, biases)]
                wide = [functional.silu(wide[0]) * wide[1]]
            else:
                found = linears(x, weights, biases)
        for got, expected in zip(found, wide, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=4e-3, atol=1.2e-2)

    def test_what_is_left_to_the_library(self) -> None:
        """Columns that are not aligned; at many rows of x, few rows of a weight that are long; one weight."""
        given = ((4, [4096], 1000), (1, [4096], 4104), (4, [4096], 112), (4, [496], 512), (33, [2048], 4096))
        given += ((65, [4096], 512), (65, [8192, 8768], 512), (129, [4096], 512), (65, [1024, 256], 8192))
        given += ((129, [1024, 256], 8192),)
        assert all(usual_config(tokens, rows, columns) is None for tokens, rows, columns in given)
        assert usual_config(129, [256, 256], 528) and not usual_config(129, [256, 256], 528, gated=True)
        assert usual_config(33, [2048], 4080) and usual_config(32, [2048], 4096)
        assert usual_config(65, [8192, 8704], 512)

    @pytest.mark.parametrize("wide, stages", [(8192, 5), (8960, 3), (13440, 3), (13568, 5), (16896, 5)])
    def test_blocks_of_a_swiglu_of_many_rows_share_processors_where_rounds_are_not_full(
        self, wide: int, stages: int
    ) -> None:
        config = usual_config(128, [wide, wide], 4096, gated=True)
        assert config is not None and (config.block_n, config.stages) == (128, stages)
        assert usual_config(128, [16960, 16960], 4096, gated=True) is None

    @given(
        st.lists(st.integers(0, 9000), min_size=1, max_size=3).filter(lambda rows: sum(rows) >= 512),
        st.sampled_from([512, 4096, 4112]),
        st.booleans(),
        st.integers(1, 200),
        st.integers(129, 9000),
    )
    def test_more_rows_are_ours_while_all_programs_run_at_once(
        self, rows: list[int], columns: int, gated: bool, processors: int, tokens: int
    ) -> None:
        """One size stands for each of the choices that there are, so that all kernels are compiled ahead."""
        rows = [rows[0] + 256] * 2 if gated else rows
        given = {"gated": gated, "processors": processors}
        config = usual_config(tokens, rows, columns, **given)
        assert config in [usual_config(size, rows, columns, **given) for size in larger_sizes(rows, **given)]
        programs = sum(-(-count // 128) for count in rows) * -(-tokens // 64)
        few = columns > 4096 and 2 * programs < processors
        ours = len(rows) > 1 and not gated and programs <= processors and not few
        assert (config.tile if config else None) == (64 if ours else None)

    @EXAMPLES
    @given(
        TOKENS,
        st.sampled_from([1, 2, 17, 260]),
        st.sampled_from([24, 128, 512, 1152]),
        st.booleans(),
        st.sampled_from([*DTYPES, torch.float32]),
        st.integers(0, 2),
    )
    def test_swiglu(
        self, tokens: int, rows: int, columns: int, bias: bool, dtype: torch.dtype, form: int
    ) -> None:
        """As exact as the unfused one at least, against float64."""

        def results(seed: int) -> tuple[Tensor, Tensor, Tensor]:
            """Ours, the unfused one in its dtype and in float64."""
            x, gate, b0 = operands(tokens, rows, columns, dtype, seed)
            x = in_form(form, x)
            _, up, b1 = operands(1, rows, columns, dtype, seed + 1)
            biases = [b0, b1] if bias else [None, None]

            def unfused(dtype: torch.dtype) -> Tensor:
                g, u = (
                    functional.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
                    for w, b in zip((gate, up), biases, strict=True)
                )
                return functional.silu(g) * u

            return swiglu(x, [gate, up], biases), unfused(dtype), unfused(torch.float64)

        found, _, expected = results(0)
        assert found.dtype == dtype and found.is_contiguous() and found.shape == expected.shape
        rounds = dtype == torch.float16 or not INTERPRETED  # the interpreter cuts bfloat16 off
        if expected.numel() > 1000 and dtype != torch.float32 and rounds:
            # Of a thousand results the largest few decide: there have to be four thousand in all.
            several = [results(2 * seed) for seed in range(-(-4000 // expected.numel()))]
            error, theirs = (
                sum((each[way].double() - each[-1]).square().sum() for each in several) for way in (0, 1)
            )
            assert error <= 1.1 * theirs
        torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=6e-2)

    def test_a_swiglu_of_other_shapes_is_torchs(self) -> None:
        x, gate, _ = operands(3, 512, 512, DTYPES[0])
        with pytest.raises(RuntimeError):
            swiglu(x, [gate, gate[:64]], [None, None])
        assert swiglu(x, [gate, gate[:1]], [None, None]).shape == (3, 512)

    @pytest.mark.parametrize("bias", [(), (1,), (1, 512)])
    def test_a_bias_of_another_shape_is_spread(self, bias: tuple[int, ...]) -> None:
        x, weight, _ = operands(1, 512, 512, DTYPES[0])
        b = torch.full(bias, 0.5, dtype=x.dtype, device=x.device)
        expected = functional.linear(x.float(), weight.float(), b.float())
        torch.testing.assert_close(linears(x, [weight], [b])[0].float(), expected, rtol=2e-2, atol=6e-2)

    def test_a_weight_without_rows_is_served(self) -> None:
        _, weight, _ = operands(1, 64, 64, DTYPES[0])

        def model(x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = functional.linear(x, weight).relu()
            return hidden * 2, functional.linear(hidden, weight[:0])

        fast = pg.compile(model, capture_sizes=[1, 4], token_dim={"x": 0})
        with torch.no_grad():
            assert [each.shape for each in fast(operands(3, 1, 64, DTYPES[0])[0])] == [(3, 64), (3, 0)]

    def test_what_torch_refuses_is_refused(self) -> None:
        x, weight, _ = operands(1, 512, 512, DTYPES[0])
        for others in ((x.view(4, 128), weight), (x, weight.float())):
            with pytest.raises(RuntimeError):
                linears(others[0], [others[1]], [None])
        none = weight[:, :0].contiguous()
        assert linears(x[:, :0].expand(3, 0), [none], [None])[0].eq(0).all()

    def test_few_rows_have_kernels_of_ours(self, served: list[tuple[int, int]]) -> None:
        for tokens in (2200, 300, 128, MAX_TOKENS + 1, MAX_TOKENS, 2, 1, 0):
            x, weight, bias = operands(tokens, 512, 128, DTYPES[0])
            linears(x, [weight, weight], [None, None])
            if tokens > MAX_TOKENS:
                linears(x, [weight], [None])
            linears(x, [weight, weight], [None, bias])  # one launch adds all biases or none
            linears(x, [weight.t().contiguous().t()], [None])  # strided weights are the library's
        assert served == [(tokens, 2) for tokens in (300, 128, MAX_TOKENS + 1, MAX_TOKENS, 2, 1)]

    def test_compiled_code_of_all_sizes_asks_at_each_call(self, served: list[tuple[int, int]]) -> None:
        _, weight, bias = operands(1, 512, 128, DTYPES[0])
        left, right = (operands(1, 256, 128, DTYPES[0], seed)[1] for seed in (1, 2))

        def model(x: Tensor) -> Tensor:
            hidden = functional.linear(x, weight, bias).relu()[..., :128].contiguous()
            return functional.linear(hidden, left) * functional.linear(hidden, right)

        with torch.no_grad():
            fast = pg.compile(model, capture_sizes=[1, 4], token_dim={"x": 0})
            for tokens in (4, 1, 3, 130):
                x = operands(tokens, 1, 128, DTYPES[0])[0]
                torch.testing.assert_close(fast(x), model(x), rtol=2e-2, atol=6e-2)
        assert {tokens for tokens, _ in served} >= {1, 4}
        assert {members for tokens, members in served if tokens > 128} == {2}
        assert {members for _, members in served} == {1, 2}

    @pytest.mark.parametrize("case", ["rows", "columns", "halves"])
    def test_weights_whose_sizes_vary_are_the_librarys(self, case: str) -> None:
        """Activations that play a weight: attention by hand."""
        w1, w2 = (operands(1, 64, 64, DTYPES[0], seed)[1] for seed in (1, 2))

        def model(x: Tensor) -> Tensor:
            q, k = functional.linear(x, w1), functional.linear(x, w2)
            scores = functional.linear(q, k)
            if case == "halves":
                middle = scores.shape[-1] // 2
                return functional.silu(scores[..., :middle]) * scores[..., middle:]
            scores = scores.softmax(-1)
            return functional.linear(scores, k.t().contiguous()) if case == "columns" else scores

        fast = pg.compile(model, capture_sizes=[4, 8], token_dim={"x": 0})
        with torch.no_grad():
            for tokens in (4, 6, 8):
                x = operands(tokens, 1, 64, DTYPES[0])[0]
                torch.testing.assert_close(fast(x), model(x), rtol=2e-2, atol=6e-2)

    def test_a_device_without_the_shared_memory_has_the_librarys(
        self, served: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from piecewise_graph.kernels.linear import linear_op

        monkeypatch.setattr(linear_op, "_holds_blocks", lambda device: False)
        monkeypatch.setattr(linear_op, "interpreted", lambda: False)
        x, weight, _ = operands(1, 512, 512, DTYPES[0])
        linears(x, [weight], [None])
        assert not served


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
def test_a_swiglu_of_many_rows_reads_16_bytes_at_a_time() -> None:
    """In code for Hopper. The last elements, of a program that has not its full number, come one by one."""
    pytest.importorskip("triton")
    from piecewise_graph.kernels.linear.linear_kernels import silu_times

    code = compiled(silu_times, ["*bf16"] * 3 + ["i32"], (1024, True), num_warps=4).asm["ptx"]
    assert code.count("ld.global.v4.b32") == 2 and code.count("st.global.v4.b32") == 1
    assert code.count("ld.global.b16") == 2 * code.count("st.global.b16") == 16
