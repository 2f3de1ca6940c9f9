"""Linears of one input that the library computes: two small ones of one shape are one launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from interpreter import assert_passes_interpreted, needs_kernels, starts_the_interpreter
from linear_operands import DTYPES, EXAMPLES, TOLERANCE
from torch import Tensor
from torch.nn import functional
from torch.profiler import profile

from piecewise_graph.kernels.launch import multiprocessors
from piecewise_graph.kernels.linear import compile_ahead, library_products, linear_op, linears, swiglu
from piecewise_graph.kernels.linear.kernel_configs import MANY_TOKENS, larger_sizes

COLUMNS, TILE = 64, 128  # too few columns for a kernel of ours


@pytest.mark.slow
@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def weight(rows: int, like: Tensor) -> Tensor:
    return torch.randn(rows, like.shape[-1], device=like.device).to(like.dtype) / 8


def most_rows(tokens: int, device: torch.device) -> int:
    """Of a weight whose product with so many tokens has a tile for each multiprocessor at most."""
    return multiprocessors(device) // -(-tokens // TILE) * TILE


def expected(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x.double(), w.double(), None if bias is None else bias.double())


def launches(x: Tensor, weights: list[Tensor], biases: list[Tensor | None] | None = None) -> tuple[int, int]:
    """Products of one weight, and of two; the results are right."""
    biases = [None] * len(weights) if biases is None else biases
    with profile() as taken:
        found = linears(x, weights, biases)
    for each, w, bias in zip(found, weights, biases, strict=True):
        wanted = expected(x, w, bias)
        assert (each.double() - wanted).norm() <= TOLERANCE[x.dtype] * wanted.norm()
        assert each.is_contiguous() and each.shape == wanted.shape
    counts = {event.key: event.count for event in taken.key_averages()}
    return counts.get("aten::linear", 0), counts.get("aten::baddbmm_", 0)


class TestPairs:
    pytestmark = needs_kernels

    @pytest.fixture
    def timing(self, monkeypatch: pytest.MonkeyPatch) -> list[float | Exception]:
        """What timings are going to find: the time of one launch, where two take 1.0."""
        found: list[float | Exception] = []

        def seconds(works: object, device: torch.device) -> list[float]:
            gain = found.pop(0)
            if isinstance(gain, Exception):
                raise gain
            return [gain, 1.0]

        monkeypatch.setattr(library_products, "_timed", {})
        monkeypatch.setattr(library_products, "_seconds", seconds)
        return found

    @EXAMPLES
    @given(st.integers(1, 2), st.integers(1, 80), st.sampled_from(DTYPES), st.permutations(range(3)))
    def test_two_of_one_shape_are_one_launch_wherever_they_lie(
        self, device: torch.device, leading: int, tokens: int, dtype: torch.dtype, order: list[int]
    ) -> None:
        x = torch.randn(leading, tokens, COLUMNS, device=device).to(dtype)
        rows = most_rows(leading * tokens, device)
        made = [weight(rows, x) for _ in range(3)]  # at three addresses
        first, second, _ = (made[index] for index in order)
        assert launches(x, [weight(rows + 1, x), first, second]) == (1, 1)
        few = TILE if leading * tokens <= TILE else 0
        vectors = [weight(1, x.new_empty(1, few))[0] for _ in range(2)]
        assert launches(x, [first[:few], second[:few]], [*vectors]) == ((0, 1) if few else (2, 0))

    def test_more_weights_are_paired_in_turn(self, device: torch.device) -> None:
        x = torch.randn(5, COLUMNS, device=device).to(DTYPES[0])
        weights = [weight(rows, x) for rows in (32, 32, 32, 48, 48, 32)]
        assert launches(x, weights) == (2, 2)
        assert launches(x, [weights[0], weights[0]]) == (0, 1)  # both lie at one address

    def test_what_is_not_paired(self, device: torch.device) -> None:
        x = torch.randn(5, COLUMNS, device=device).to(DTYPES[0])
        some, bias, rows = [weight(32, x) for _ in range(2)], weight(1, x)[0, :32], most_rows(5, device)
        assert launches(x, some, [bias[:1], bias[:1]]) == (2, 0)
        assert launches(x, some, [None, bias]) == (2, 0)
        more = [weight(TILE + multiprocessors(device) // 5 * TILE, x) for _ in range(2)]
        assert launches(x, more, [weight(1, more[0].T)[0]] * 2) == (2, 0) and launches(x, more) == (0, 1)
        assert launches(x, [some[0], weight(33, x)]) == (2, 0)
        assert launches(x, [some[0], weight(32, x.repeat(1, 2))[:, ::2]]) == (2, 0)
        assert launches(x, [weight(rows + 1, x) for _ in range(2)]) == (2, 0)  # each alone is enough work
        assert launches(x[:0], some) == (2, 0)

    def test_gate_and_up_are_one_launch(self, device: torch.device) -> None:
        x = torch.randn(7, COLUMNS, device=device).to(DTYPES[0])
        gate, up = weight(48, x), weight(48, x)
        with profile() as taken:
            found = swiglu(x, [gate, up], [None, None])
        assert sum(event.count for event in taken.key_averages() if event.key == "aten::baddbmm_") == 1
        wanted = functional.silu(expected(x, gate)) * expected(x, up)
        assert (found.double() - wanted).norm() <= TOLERANCE[x.dtype] * wanted.norm()

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("gain, pairs", [(0.97, 1), (0.98, 0), (None, 0)])
    def test_larger_ones_are_one_launch_where_that_was_faster(
        self, device: torch.device, timing: list[float | Exception], gain: float | None, pairs: int,
        gated: bool,
    ) -> None:  # fmt: skip
        tokens = 3 * TILE
        x = torch.randn(2, tokens // 2, COLUMNS, device=device).to(DTYPES[0])
        rows = most_rows(tokens, device) + 1
        if gain is not None:  # timed once, whatever asks for it again
            timing.append(gain)
            drawn = torch.random.get_rng_state()
            for _ in range(2):
                before = [] if gated else [rows + 1]
                compile_ahead(x, [tokens, 5], [*before, rows, rows], COLUMNS, has_bias=False, gated=gated)
            assert torch.equal(drawn, torch.random.get_rng_state())
        made = [weight(rows, x) for _ in range(2)]
        assert not timing and launches(x, made) == (2 - 2 * pairs, pairs)
        assert launches(x[:, :-1], made) == (2, 0)  # of another number of rows

    @pytest.mark.parametrize("why", ["memory", "deterministic", "no NumPy"])
    def test_why_two_launches_stay(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch, timing: list[float | Exception], why: str
    ) -> None:
        x = torch.randn(3 * TILE, COLUMNS, device=device).to(DTYPES[0])
        rows = most_rows(len(x), device) + 1
        monkeypatch.setattr(linear_op, "serves", lambda like: False)  # as on a GPU before Hopper
        timing.append(torch.OutOfMemoryError() if why == "memory" else 0.5)
        compile_ahead(x, [len(x)], [rows, rows], COLUMNS, has_bias=False, gated=False)
        made = [weight(rows, x) for _ in range(2)]
        if why == "deterministic":
            assert launches(x, made) == (0, 1)
            torch.use_deterministic_algorithms(True)
        elif why == "no NumPy":
            monkeypatch.setattr(library_products, "_has_numpy", lambda: False)
        try:
            assert launches(x, made) == (2, 0)
            if why != "memory":  # nothing is timed
                compile_ahead(x, [len(x) + 1], [rows, rows], COLUMNS, has_bias=False, gated=False)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_nothing_but_sizes_of_graphs_is_timed(
        self, device: torch.device, timing: list[float | Exception]
    ) -> None:
        x, rows = weight(1, torch.empty(1, COLUMNS, dtype=DTYPES[0], device=device)), most_rows(1, device)
        compile_ahead(x, [0, 5, TILE], [rows, rows], COLUMNS, has_bias=False, gated=True)  # small ones
        assert MANY_TOKENS + 1 in larger_sizes([rows, rows], gated=True)  # which would not be small

    def test_a_choice_by_the_clock_is_right(self, device: torch.device) -> None:
        x = torch.randn(2 * TILE + 1, COLUMNS, device=device).to(DTYPES[0])
        rows = most_rows(len(x), device) + TILE
        compile_ahead(x, [len(x)], [rows, rows], COLUMNS, has_bias=False, gated=True)
        assert sum(launches(x, [weight(rows, x) for _ in range(2)])) in (1, 2)

    def test_operands_that_do_not_fit_are_refused_as_by_torch(self, device: torch.device) -> None:
        x = torch.randn(5, COLUMNS, device=device).to(DTYPES[0])
        wrong = weight(32, x.repeat(1, 2))
        with pytest.raises(RuntimeError, match="shapes"):
            linears(x, [wrong, wrong], [None, None])
        fits, bias = weight(32, x), torch.zeros(32, device=device)
        with pytest.raises(RuntimeError, match="dtype"):
            linears(x, [fits, fits], [bias, bias])
        with pytest.raises(ValueError, match="zip"):
            linears(x, [fits, fits], [None])
        with pytest.raises(RuntimeError):
            linears(x[0, 0], [fits[:, 0].contiguous()] * 2, [None, None])


@pytest.mark.gpu
def test_a_captured_pair_reads_what_lies_there_at_replay() -> None:
    x = torch.randn(200, COLUMNS, device="cuda", dtype=torch.bfloat16)
    weights = [weight(rows, x) for rows in (512, 128, 128)]
    linears(x, weights, [None] * 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linears(x, weights, [None] * 3)
    for each in (x, *weights):
        each.copy_(torch.randn_like(each) / 8)
    with profile() as taken:
        graph.replay()
        torch.cuda.synchronize()
    for each, w in zip(found, weights, strict=True):
        torch.testing.assert_close(each.double(), expected(x, w), rtol=2e-2, atol=2e-2)
    kernels = [event for event in taken.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2, [event.name for event in kernels]
