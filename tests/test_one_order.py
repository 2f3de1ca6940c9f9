"""Under `torch.use_deterministic_algorithms` a row's sums have one order, whatever batch the row is in."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, make_case
from hypothesis import given, strategies as st
from interpreter import assert_passes_interpreted, needs_kernels, starts_the_interpreter
from linear_operands import DEVICE, DTYPES, EXAMPLES, TOLERANCE, operands
from torch import Tensor
from torch.nn import functional
from toys import ops

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import AttentionBatch, make_batch
from piecewise_graph.custom_ops.attention.call import AttentionCall, Traits
from piecewise_graph.custom_ops.attention.implementations import serve
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable
from piecewise_graph.eagle.head.random_models import ModelShape, random_model
from piecewise_graph.kernels.linear import linears, swiglu

SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
}  # fmt: skip


@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


@pytest.fixture(autouse=True, scope="module")
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class TestKernels:
    pytestmark = needs_kernels

    @EXAMPLES
    @given(
        st.lists(st.integers(1, 70), min_size=1, max_size=3),
        st.lists(st.sampled_from([1, 17, 512, 600]), min_size=1, max_size=4),
        st.sampled_from([24, 136, 528]),
        st.booleans(),
        st.sampled_from(DTYPES),
        st.booleans(),
    )
    def test_rows_of_linears(
        self, parts: list[int], rows: list[int], columns: int, bias: bool, dtype: torch.dtype, gated: bool
    ) -> None:
        parts = [1, *parts]  # a row alone has a kernel of its own otherwise
        x = operands(sum(parts), 1, columns, dtype)[0]
        rows = [rows[0]] * 2 if gated else rows
        weights, biases = zip(*(operands(1, n, columns, dtype, seed=n)[1:] for n in rows), strict=True)
        given = biases if bias else [None] * len(rows)

        def run(x: Tensor) -> Tensor:
            return swiglu(x, weights, given) if gated else torch.cat(linears(x, weights, given), -1)

        whole = run(x)
        assert torch.equal(whole, torch.cat([run(part) for part in x.split(parts)]))
        exact = [
            functional.linear(x.double(), w.double(), None if b is None else b.double())
            for w, b in zip(weights, given, strict=True)
        ]
        wanted = functional.silu(exact[0]) * exact[1] if gated else torch.cat(exact, -1)
        error = (whole.double() - wanted).norm() / wanted.norm()
        assert error < TOLERANCE[dtype]

    @EXAMPLES
    @given(
        st.lists(st.tuples(st.integers(0, 150), st.integers(1, 12)), min_size=1, max_size=3),
        st.sampled_from([1, 4, 8]),
        st.none() | st.integers(1, 40),
        st.none() | st.just(5.0),
        st.sampled_from(DTYPES),
    )
    def test_rows_of_attention(
        self, lengths: list[tuple[int, int]], group: int, window: int | None, softcap: float | None,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Each row alone, as a decode step has it, is what it was among the rows of several prompts."""
        shape = Shape(tuple(lengths), heads=2 * group, window=window, softcap=softcap)
        case = make_case(shape, dtype=dtype, device=DEVICE, implementation="auto")
        serve(case.batch, case.call, False)
        starts = case.batch.qo_indptr.tolist()
        for request, (before, rows) in enumerate(lengths):
            for i in range(rows):
                row = starts[request] + i
                assert torch.equal(alone(case, request, row, before + i + 1), case.call.out[row : row + 1])


def alone(case: Case, request: int, row: int, length: int) -> Tensor:
    """Attention of one row of a request of so many tokens; the cache has those before."""
    batch, call = case.batch, case.call
    decode = AttentionBatch(
        batch.kv_cache,
        block_table=batch.block_table[request : request + 1],
        seq_lens=torch.tensor([length], dtype=torch.int32, device=DEVICE),
        qo_indptr=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        slot_mapping=batch.slot_mapping[row : row + 1],
        max_query_len=1,
        max_seq_len=4096,
        query_len=1,
    )
    q, k, v = (x[row : row + 1] for x in (call.q, call.k, call.v))
    mine = AttentionCall(q, k, v, torch.empty_like(q), call.layer, call.scale, call.window, call.softcap)
    serve(decode, mine, False)
    return mine.out


@given(
    st.integers(1, 40), st.integers(1, 600), st.integers(0, 5000), st.sampled_from([1, 4, 7, 64]),
    st.sampled_from([*DTYPES, torch.float32]), st.sampled_from([8, 132]),
)  # fmt: skip
def test_every_batch_has_the_tiles_of_a_row_alone(
    requests: int, rows: int, before: int, group: int, dtype: torch.dtype, processors: int
) -> None:
    pytest.importorskip("triton")
    from piecewise_graph.custom_ops.attention.tiling import tile_batch

    traits = Traits("auto", "cuda", dtype, 8 * group, 8, 128, None, None, True)
    batch = tile_batch(traits, requests, requests * rows, rows, before + rows, processors)
    assert batch.tiling == tile_batch(traits, 1, 1, 1, 1, processors).tiling


def test_code_for_exact_sizes_is_not_made(device: torch.device) -> None:
    """It would sum in an order of its own."""

    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + 1

    fast = pg.compile(model, token_dim={"x": 0}, capture_sizes=[4], specialize=[4])
    with pg.counters.expect(specialized=0, not_specialized=0), torch.no_grad():
        x = torch.randn(4, 8, device=device)
        torch.testing.assert_close(fast(x), model(x))


def test_a_batch_serves_calls_of_both_modes_apart() -> None:
    case = make_case(Shape(((200, 1),)), dtype=torch.float32, device=DEVICE, implementation="torch")
    serve(case.batch, case.call, False)
    torch.use_deterministic_algorithms(False)
    try:
        serve(case.batch, dataclasses.replace(case.call), False)
    finally:
        torch.use_deterministic_algorithms(True)
    assert [traits.deterministic for traits, _ in case.batch.served_by] == [True, False]


class Served:
    """A model with graphs, and requests of which it has computed some tokens."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        model = random_model(ModelShape("small", SMALL), DEVICE, "piecewise")
        self.prompts, self.model = prompts, pg.compile(model, capture_sizes=[1, 2, 4, 8, 64, 128])
        sizes: dict[str, Any] = {"num_pages": 100, "page_size": 16, "device": DEVICE}
        self.cache = PagedKVCache(num_layers=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, **sizes)
        self.table = RequestTable(max_requests=len(prompts), max_seq_len=256, **sizes)
        self.slots = [self.table.open() for _ in prompts]
        self.table.reserve({slot: len(p) for slot, p in zip(self.slots, prompts, strict=True)})

    def logits(self, parts: dict[int, range]) -> list[Tensor]:
        """Of these tokens of some prompts, computed together; those before are in the cache."""
        rows, ends = [len(part) for part in parts.values()], [part.stop for part in parts.values()]
        slots = [self.slots[index] for index in parts]
        batch, positions = make_batch(self.cache, self.table, slots, rows, ends)
        tokens = [self.prompts[index][at] for index, part in parts.items() for at in part]
        ids = torch.tensor([tokens], device=DEVICE)
        with pg.forward_context(attention=batch), torch.no_grad():
            found = self.model(input_ids=ids, position_ids=positions[None], use_cache=False).logits[0]
        return list(found.clone().split(rows))


@pytest.mark.gpu
def test_logits_are_the_same_bits_in_every_bucket_and_chunk() -> None:
    pg.register_attention()
    lengths, numbers = (5, 17, 70, 1, 40), itertools.count(7, 31)
    served = Served([[next(numbers) % 1000 for _ in range(length)] for length in lengths])
    together = served.logits({index: range(length) for index, length in enumerate(lengths)})
    for index, length in enumerate(lengths):
        (lone,) = served.logits({index: range(length)})
        assert torch.equal(lone, together[index])
        for start in range(0, length, 3):
            part = range(start, min(start + 3, length))
            (chunk,) = served.logits({index: part})
            assert torch.equal(chunk, together[index][part.start : part.stop])
    for count in range(1, len(lengths) + 1):
        last = served.logits({index: range(lengths[index] - 1, lengths[index]) for index in range(count)})
        assert all(torch.equal(found, whole[-1:]) for found, whole in zip(last, together, strict=False))
    replays = pg.counters.snapshot()["replays"]
    assert replays > sum(lengths) // 3
