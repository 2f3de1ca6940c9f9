"""Linear kernels with rings: which blocks they have, the machine's code, and numbers on a Hopper GPU."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hopper import RESERVED, SHARED, assert_skips_the_first_wait, compiled, sass
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED
from linear_operands import DEVICE, DTYPES, EXAMPLES, operands
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.linear import KernelConfig, linear_few
from piecewise_graph.kernels.linear.kernel_configs import (
    PLAIN,
    RING_TOKENS,
    candidates,
    is_config,
    ring_rows,
    rings_of,
    usual_config,
)
from piecewise_graph.kernels.linear.linear_launch import (
    GLUON,
    Norm,
    added_few,
    has_rings,
    linears_few,
    swiglu_few,
)

HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability(DEVICE)[0] == 9


def triton_compiles_them() -> bool:
    triton = pytest.importorskip("triton")
    return bool(triton.__version__.startswith(GLUON))


compiled_ones = pytest.mark.skipif(
    INTERPRETED or find_spec("triton") is None or not triton_compiles_them(), reason="compiled kernels only"
)
on_hopper = pytest.mark.skipif(not HOPPER or not triton_compiles_them(), reason="needs a Hopper GPU")

# Rows of x, gated or not, rows of the weights, columns, multiprocessors, and blocks: each rule has a case.
RULES = [
    (8, False, (256, 256), 528, 16, "32 64 1 4 5 4 4 0 1"),
    (9, False, (256, 256), 528, 16, "16 128 1 4 3 4 4 0 1"),
    (17, False, (256, 256), 528, 16, "16 64 1 4 4 4 4 0 1"),
    (8, False, (512,), 4096, 32, "16 64 1 4 10 4 4 0 1"),
    (32, False, (512,), 4096, 32, "16 128 1 4 4 4 4 0 1"),
    (8, False, (512,), 4080, 32, "32 128 1 4 5 4 4 0 1"),
    (16, False, (528,), 4096, 32, "32 128 1 4 4 4 4 0 1"),
    (17, True, (256, 256), 528, 16, "32 64 1 4 7 4 4 0 1"),
    (8, False, (256, 256), 496, 16, "64 128 1 4 6 1 4 0 1"),
    (32, True, (512, 512), 4096, 16, "32 64 1 4 3 4 4 0 1"),
    (2, False, (512,), 528, 15, "32 64 1 4 5 4 4 0 1"),
    (32, True, (512, 512), 528, 16, "32 64 1 4 3 4 4 0 1"),
    (8, True, (512, 512), 4096, 15, "16 64 1 4 6 4 4 0 1"),
    (8, True, (512, 512), 4080, 15, "64 128 1 4 6 1 4 0 1"),
    (16, True, (512, 512), 4096, 15, "64 128 1 4 5 1 4 0 1"),
    (32, False, (1024,), 528, 15, "64 128 1 4 4 1 4 0 1"),
]  # fmt: skip


@pytest.mark.parametrize("tokens, gated, rows, columns, processors, blocks", RULES)
def test_blocks_of_every_rule(
    tokens: int, gated: bool, rows: tuple[int, ...], columns: int, processors: int, blocks: str
) -> None:
    config = usual_config(tokens, rows, columns, gated=gated, processors=processors, rings=True)
    assert config is not None and config.name == blocks and config in rings_of(tokens)
    if HOPPER and has_rings(DEVICE):
        assert_right(config, tokens, rows, columns, DTYPES[1], gated=gated)


@given(
    st.integers(1, 130), st.lists(st.integers(1, 4096), min_size=1, max_size=4), st.integers(1, 9000),
    st.booleans(),
)  # fmt: skip
def test_rings_are_for_a_few_rows_of_aligned_columns(
    tokens: int, rows: list[int], columns: int, gated: bool
) -> None:
    for wide in (columns, 16 * columns):
        plain = usual_config(tokens, rows, wide, gated=gated)
        config = usual_config(tokens, rows, wide, gated=gated, rings=True)
        if config is None or not config.ring:
            assert config == plain and (not 1 < tokens <= RING_TOKENS or plain is None)
        else:
            assert wide % 16 == 0 and 1 < tokens <= RING_TOKENS and is_config(config.name)
        known = candidates(tokens, sum(rows), wide, rings=True)
        rings = [each for each in known if each.ring]
        assert [each for each in known if not each.ring] == candidates(tokens, sum(rows), wide)
        assert not rings or (wide % 16 == 0 and 1 < tokens <= RING_TOKENS)


def test_there_are_some_on_hopper_only() -> None:
    assert not has_rings(torch.device("cpu"))
    if DEVICE.type == "cuda":
        assert has_rings(DEVICE) == (HOPPER and triton_compiles_them())


def code_of(config: KernelConfig, tokens: int, *, even: bool, gated: bool, counted: int, bias: bool) -> Any:
    pytest.importorskip("triton")
    from piecewise_graph.kernels.linear.ring_kernels import few_rows_by_ring

    types = ["*bf16"] * 10 + ["*fp32" if counted else "*bf16"] + ["i32"] * 7 + ["fp32"]
    constants = (*blocks_of(config, tokens), even, bias, gated, counted)
    return compiled(few_rows_by_ring, types, constants, num_warps=config.warps)


def code_before_a_norm(config: KernelConfig, tokens: int, *, even: bool, bias: bool) -> Any:
    pytest.importorskip("triton")
    from piecewise_graph.kernels.linear.ring_kernels import few_rows_added_by_ring

    constants = (*blocks_of(config, tokens), even, bias)
    types = ["*bf16"] * 7 + ["*fp32"] + ["i32"] * 4
    return compiled(few_rows_added_by_ring, types, constants, num_warps=config.warps)


def blocks_of(config: KernelConfig, tokens: int) -> tuple[int, ...]:
    return config.block_n, config.block_k, config.parts, config.stages, ring_rows(tokens)


@compiled_ones
@pytest.mark.parametrize("tokens, config", [(t, c) for t in (8, 16, 32) for c in rings_of(t)[t // 16 :: 5]])
def test_the_weight_comes_before_the_wait_and_x_after_it(tokens: int, config: KernelConfig) -> None:
    """In the machine's own code: 16 bytes at a time, nothing else before, and no register is spilled."""
    gated, even = config.block_n > 16, config.stages % 2 == 0
    for made in (
        code_of(config, tokens, even=even, gated=gated, counted=128, bias=not even),
        code_before_a_norm(config, tokens, even=even, bias=not even),
    ):
        code = sass(made)
        before, ahead, after = code.split("ACQBULK")
        assert "PREEXIT" in before and "LDG" not in before
        assert all(".128" in line for line in code.splitlines() if "LDGSTS" in line)
        copies = config.parts * config.block_k * config.block_n // (8 * 128)  # by each of 128 threads
        assert ahead.count("LDGSTS") == config.stages * copies
        assert "LDG.E" not in ahead and "STG" not in ahead and "STG" in after
        assert "STL" not in code and "LDL" not in code
        assert_waits_first_unless_early(made)


def assert_waits_first_unless_early(made: Any) -> None:
    """And a barrier follows each wait for copies: all warps read and fill slots."""
    code = assert_skips_the_first_wait(made)
    waits = re.findall(r"cp\.async\.wait_group.*\n(.*)", code)
    assert waits and all(line.startswith("bar.sync") for line in waits)


@compiled_ones
@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_as_many_fit_a_multiprocessor_as_there_is_room_for(tokens: int) -> None:
    """Also with what sums of parts, gates and norms take of it."""
    rooms = {(227 << 10): 1, (113 << 10): 2, (75 << 10): 3}
    for config in rings_of(tokens)[::4]:
        stage = (config.block_n + ring_rows(tokens)) * config.block_k * config.parts * 2
        programs = max(n for room, n in rooms.items() if config.stages * stage <= room)
        for made in (
            code_of(config, tokens, even=True, gated=True, counted=256, bias=True),
            code_before_a_norm(config, tokens, even=True, bias=True),
        ):
            assert programs * (made.metadata.shared + RESERVED) <= SHARED, config


def assert_right(
    config: KernelConfig, tokens: int, rows: tuple[int, ...], columns: int, dtype: torch.dtype, *, gated: bool
) -> None:
    """Against float64, with biases and norms."""
    made = [operands(tokens, n, columns, dtype, seed) for seed, n in enumerate(rows)]
    x, weights, biases = made[0][0], [weight for _, weight, _ in made], [bias for *_, bias in made]
    squares = torch.rand(37, tokens, device=DEVICE) * columns
    scale = torch.rsqrt(squares.double().sum(0) / columns + 1e-5)[:, None]
    for norm, factor in ((None, torch.ones_like(scale)), (Norm(squares, 1e-5), scale)):
        wide = [
            factor * (x.double() @ w.double().T) + b.double() for w, b in zip(weights, biases, strict=True)
        ]
        if gated:
            found = [swiglu_few(x, weights, biases, config, norm)]
            wide = [functional.silu(wide[0]) * wide[1]]
        else:
            found = linears_few(x, weights, biases, config, norm)
        for got, expected in zip(found, wide, strict=True):
            near(got, expected, dtype)


def near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.bfloat16: 1.2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=3 * tolerance)


@pytest.mark.gpu
@on_hopper
class TestOnHopper:
    @EXAMPLES
    @given(
        st.data(), st.integers(2, RING_TOKENS), st.sampled_from([16, 144, 1168, 2048, 4096]), st.booleans()
    )
    def test_linears(self, data: st.DataObject, tokens: int, columns: int, gated: bool) -> None:
        config = data.draw(st.sampled_from(rings_of(tokens)))
        rows = st.integers(1, 300)
        drawn = (data.draw(rows),) * 2 if gated else tuple(data.draw(st.lists(rows, min_size=1, max_size=4)))
        assert_right(config, tokens, drawn, columns, data.draw(st.sampled_from(DTYPES)), gated=gated)

    @settings(EXAMPLES, max_examples=30)
    @given(st.data(), st.integers(2, RING_TOKENS), st.integers(1, 300), st.sampled_from([16, 1168, 2048]))
    def test_a_residual_and_what_a_norm_is_made_of(
        self, data: st.DataObject, tokens: int, rows: int, columns: int
    ) -> None:
        config = data.draw(st.sampled_from(rings_of(tokens)))
        x, weight, bias = operands(tokens, rows, columns, torch.bfloat16)
        residual, gain = torch.randn_like(x[:, :1].expand(tokens, rows)), torch.rand_like(bias)
        for b in (None, bias):
            hidden, scaled, squares = added_few(x, weight, b, residual, gain, config)
            linear = x.double() @ weight.double().T + (0 if b is None else b.double())
            near(hidden, residual.double() + linear, torch.bfloat16)
            near(scaled, hidden.double() * gain.double(), torch.bfloat16)
            exact = hidden.double().square().sum(1)
            torch.testing.assert_close(squares.double().sum(0), exact, rtol=1.3e-6, atol=1e-6)

    @pytest.mark.parametrize("columns, first", [(512, 1), (500, 0), (520, 0)])
    def test_rows_that_are_not_aligned_have_other_blocks(self, columns: int, first: int) -> None:
        config = rings_of(4)[0]
        x, weight, bias = operands(4, 64, columns, torch.bfloat16)
        odd = torch.cat([weight.flatten()[:first], weight.flatten()])[first:].view_as(weight)
        assert columns % 16 or odd.data_ptr() % 16
        found = linear_few(x, odd, bias, list(config))
        torch.testing.assert_close(found, linear_few(x, weight, bias, list(PLAIN)), rtol=0, atol=0)

    def test_a_weight_that_the_graph_writes_is_read_after_that(self) -> None:
        """Nothing is said of the weight, so the kernel waits for the one before, which writes it."""
        weight = torch.empty(4096, 8192, dtype=torch.bfloat16, device=DEVICE)
        x, source = operands(4, 1, 8192, torch.bfloat16)[0], torch.zeros_like(weight)
        graph = torch.cuda.CUDAGraph()
        linears_few(x, [weight], [None], rings_of(4)[1])
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            first = linears_few(x, [source], [None], rings_of(4)[1])[0]
            weight.copy_(source + first.sum())
            found = linears_few(x, [weight], [None], rings_of(4)[1])[0]
        for value in range(1, 8):
            source.fill_(value / 64)
            graph.replay()
            torch.testing.assert_close(found, x @ weight.T, rtol=2e-2, atol=2e-1)

    def test_replays_read_what_was_written_last(self) -> None:
        """The tiles of x come after the wait: a chain of linears is the same in a graph, time after time."""
        from piecewise_graph.kernels.early_reads import unwritten

        config = rings_of(4)[1]
        weights = [operands(4, 2048, 2048, torch.bfloat16, seed)[1] * 2048**-0.5 for seed in range(8)]
        x = operands(4, 1, 2048, torch.bfloat16)[0]

        def chain() -> Tensor:
            h = x
            for weight in weights:
                h = linears_few(h, [weight], [None], config)[0]
            return h

        expected, graph = chain(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph), unwritten(weights):
            found = chain()
        for _ in range(50):
            found.zero_()
            graph.replay()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
