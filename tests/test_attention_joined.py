"""Decoding requests and prompts in one batch: one launch for all of them, or one for each kind."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_cases import WRONG, Case, Shape, check, expected, make_case
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from torch.nn import functional

from piecewise_graph.custom_ops.attention import AttentionBatch, joined
from piecewise_graph.custom_ops.attention.implementations import serve
from piecewise_graph.kernels.launch import multiprocessors

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
PROMPTS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4)


@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def joined_case(
    shape: Shape, decoding: int, longest: int, dtype: torch.dtype, implementation: str, seed: int
) -> Case:
    """The first `decoding` requests, of equally many rows, and the others, joined."""
    case = make_case(shape, dtype=dtype, device=DEVICE, implementation=implementation, seed=seed)
    batch, rows = case.batch, shape.lengths[0][1]
    bound = {"max_seq_len": batch.max_seq_len}
    first = AttentionBatch(
        batch.kv_cache, batch.block_table[:decoding], batch.seq_lens[:decoding],
        batch.qo_indptr[: decoding + 1], batch.slot_mapping[: decoding * rows],
        max_query_len=rows, query_len=rows, **bound,
    )  # fmt: skip
    second = AttentionBatch(
        batch.kv_cache, batch.block_table[decoding:], batch.seq_lens[decoding:],
        batch.qo_indptr[decoding:] - decoding * rows, batch.slot_mapping[decoding * rows :],
        max_query_len=batch.max_query_len, **bound,
    )  # fmt: skip
    return replace(case, batch=joined(first, second, longest))


def padded(case: Case, rows: int) -> Case:
    """The call of a larger forward, whose last rows are padding."""
    call, rest = case.call, (0, 0, 0, 0, 0, rows)
    q, k, v = (functional.pad(tensor, rest) for tensor in (call.q, call.k, call.v))
    out = functional.pad(call.out, rest, value=WRONG)
    return replace(case, call=replace(call, q=q, k=k, v=v, out=out, live=len(call.q)))


def mixed(
    lengths: list[int], rows: int, prompts: list[tuple[int, int]], group: int, kv_heads: int, dim: int
) -> Shape:
    return Shape(tuple((n, rows) for n in lengths) + tuple(prompts), group * kv_heads, kv_heads, dim)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(1, 4), PROMPTS,
    st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([64, 80]),
    st.sampled_from([2048, 2049]), st.integers(0, 3), st.integers(0, 99),
)  # fmt: skip
def test_joined_batches_equal_the_loop(
    lengths: list[int], rows: int, prompts: list[tuple[int, int]], group: int, kv_heads: int, dim: int,
    longest: int, extra: int, seed: int,
) -> None:  # fmt: skip
    """Requests that are long, or a program or more for every multiprocessor, are served alone.

    `extra`: rows of padding.
    """
    shape = mixed(lengths, rows, prompts, group, kv_heads, dim)
    case = joined_case(shape, len(lengths), longest, torch.float64, "torch", seed)
    many = dim > 64 and len(lengths) * kv_heads >= multiprocessors(DEVICE)
    apart = group > 1 and (many or longest > 2048)
    wanted, tokens = expected(case), len(case.call.q)
    case = padded(case, extra) if extra else case
    for _ in range(2):
        serve(case.batch, case.call, captured=False)
        found = case.call.out.cpu()
        assert (found[:tokens] - wanted).norm() < 1e-9 * wanted.norm()
        assert bool((found[tokens:] == WRONG).all())
        case.call.out.fill_(WRONG)
    assert [bool(part.served_by) for part in case.batch.parts] == [apart, apart]


class TestKernels:
    pytestmark = needs_kernels

    @settings(max_examples=10)
    @given(
        st.lists(st.integers(0, 200), min_size=8, max_size=10), st.integers(1, 3), PROMPTS,
        st.sampled_from([64, 80, 128]), st.integers(0, 99),
    )  # fmt: skip
    def test_joined_batches_equal_the_loop(
        self, lengths: list[int], rows: int, prompts: list[tuple[int, int]], dim: int, seed: int
    ) -> None:
        """They are many for the interpreter's multiprocessors, and for those of a GPU in larger numbers."""
        lengths = lengths * (1 if INTERPRETED else 18)
        shape = mixed(lengths, rows, prompts, 2, 1, dim)
        case = joined_case(shape, len(lengths), 0, torch.float16, "triton", seed)
        check(case, 2e-3)
        assert bool(case.batch.parts[0].served_by) == (dim > 64)
