"""Decoding requests and prompts in one batch: one launch for all of them, or one for each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import WRONG, Case, Shape, check_cache, expected, make_case
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from torch.nn import functional

from piecewise_graph.custom_ops.attention import AttentionBatch, joined
from piecewise_graph.custom_ops.attention.implementations import serve
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.kernels.launch import multiprocessors

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
TOLERANCE = {torch.float64: 1e-9, torch.float16: 2e-3}
PROMPTS = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4)


@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def joined_case(
    shape: Shape, decoding: int, idle: int, longest: int, dtype: torch.dtype, implementation: str, seed: int
) -> tuple[Case, slice]:
    """The first `decoding` requests, of equally many rows, and the others, joined.

    The last `idle` of the former are padded: they have rows, but no tokens.

    Returns:
        case, rows that mean nothing.
    """
    case = make_case(shape, dtype=dtype, device=DEVICE, implementation=implementation, seed=seed)
    batch, rows, live = case.batch, shape.lengths[0][1], decoding - idle
    nothing = slice(live * rows, decoding * rows)
    batch.seq_lens[live:decoding] = 0
    batch.slot_mapping[nothing] = 0
    bound = {"max_seq_len": batch.max_seq_len}
    first = AttentionBatch(
        batch.kv_cache, batch.block_table[:decoding], batch.seq_lens[:decoding],
        batch.qo_indptr[: decoding + 1].clamp(max=live * rows),  # as BatchBuffers fills it
        batch.slot_mapping[: decoding * rows], max_query_len=rows, query_len=rows, **bound,
    )  # fmt: skip
    second = AttentionBatch(
        batch.kv_cache, batch.block_table[decoding:], batch.seq_lens[decoding:],
        batch.qo_indptr[decoding:] - decoding * rows, batch.slot_mapping[decoding * rows :],
        max_query_len=batch.max_query_len, **bound,
    )  # fmt: skip
    return replace(case, batch=joined(first, second, longest)), nothing


def check(case: Case, nothing: slice, extra: int) -> None:
    """The call twice, of a forward whose last `extra` rows are padding."""
    wanted, tokens, call, rest = expected(case), len(case.call.q), case.call, (0, 0, 0, 0, 0, extra)
    q, k, v, out = (functional.pad(each, rest, value=WRONG) for each in (call.q, call.k, call.v, call.out))
    padded = replace(call, q=q, k=k, v=v, out=out, live=tokens if extra else None)
    for _ in range(2):
        out.fill_(WRONG)
        serve(case.batch, padded, captured=False)
        found = out.cpu().double()
        found[nothing] = wanted[nothing] = 0
        assert (found[:tokens] - wanted).norm() <= TOLERANCE[q.dtype] * wanted.norm()
        assert bool((found[tokens:] == WRONG).all())
        check_cache(case)


@st.composite
def shapes(draw: st.DrawFn, dims: list[int]) -> tuple[Shape, int, int]:
    """A shape, how many of its requests decode, and how many of these are padded."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (4, 2), (1, 40)]))
    rows = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=9))
    prompts = draw(PROMPTS)
    window, softcap = draw(st.none() | st.integers(1, 40)), draw(st.none() | st.just(5.0))
    pairs = (*((length, rows) for length in lengths), *prompts)
    heads = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": draw(st.sampled_from(dims))}
    shape = Shape(pairs, **heads, window=window, softcap=softcap)
    return shape, len(lengths), draw(st.integers(0, len(lengths)))


LONGEST = st.sampled_from([1024, 1025])


@settings(max_examples=60)
@given(shapes([64, 80]), LONGEST, st.sampled_from(list(TOLERANCE)), st.integers(0, 3), st.integers(0, 99))
def test_joined_batches_equal_the_loop(
    drawn: tuple[Shape, int, int], longest: int, dtype: torch.dtype, extra: int, seed: int
) -> None:
    """Requests that are long, or a program or more for every multiprocessor, are served alone."""
    shape, decoding, idle = drawn
    case, nothing = joined_case(shape, decoding, idle, longest, dtype, "torch", seed)
    check(case, nothing, extra)
    group = shape.heads // shape.kv_heads
    large = shape.head_dim > 64 and group * case.batch.parts[1].max_query_len > 64
    many = large and decoding * shape.kv_heads >= multiprocessors(DEVICE)
    long = longest > 1024 and shape.window is None
    apart = dtype == torch.float16 and group > 1 and (many or long)
    assert [bool(part.served_by) for part in case.batch.parts] == [apart, apart]


def test_batches_that_cannot_be_joined_are_refused() -> None:
    tree, prompts, decode = (
        make_case(shape, dtype=torch.float32, device=DEVICE, implementation="torch").batch
        for shape in (
            Shape(((5, 3), (2, 3)), tree=True),
            Shape(((0, 4), (3, 2))),
            Shape(((5, 1),), uniform=True),
        )
    )
    for first, second in ((tree, prompts), (decode, tree), (prompts, decode)):
        with pytest.raises(AttentionError, match="joined") as info:
            joined(first, second, 8)
        assert "once for each" in info.value.remedy


def test_parts_follow_to_another_cache_and_end_with_a_changed_batch() -> None:
    case, _ = joined_case(Shape(((5, 2), (3, 2), (0, 7))), 2, 0, 9, torch.float32, "torch", 0)
    other = make_case(case.shape, dtype=torch.float32, device=DEVICE, implementation="torch").batch.kv_cache
    moved = case.batch.over(other)
    assert [part.kv_cache for part in moved.parts] == [other, other] and moved.longest == 9
    assert not replace(case.batch, slot_mapping=case.batch.slot_mapping.clone()).parts


class TestKernels:
    pytestmark = needs_kernels

    @settings(max_examples=12)
    @given(shapes([64, 80, 128]), LONGEST, st.integers(0, 3), st.integers(0, 99))
    def test_joined_batches_equal_the_loop(
        self, drawn: tuple[Shape, int, int], longest: int, extra: int, seed: int
    ) -> None:
        case, nothing = joined_case(*drawn, longest, torch.float16, "triton", seed)
        check(case, nothing, extra)
