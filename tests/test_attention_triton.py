"""The Triton implementation against attention as a loop: compiled, or in the interpreter without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from attention_cases import Case, Shape, check, check_without_slots, expected, make_case
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from test_attention import SHAPES, shapes

from piecewise_graph.custom_ops.attention import AttentionBatch
from piecewise_graph.custom_ops.attention.call import AttentionCall
from piecewise_graph.custom_ops.attention.implementations import serve
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.kernels import early_reads

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

LONG = ((300, 1), (0, 1), (0, 0), (517, 1))
WIDE = ((300, 5), (0, 5), (0, 0), (517, 5))
SPLIT = {
    "decode": Shape(LONG, uniform=True),
    "decode, groups of 8, page 1": Shape(LONG, heads=8, kv_heads=1, page_size=1),
    "decode, groups of 6, longer bound": Shape(LONG, heads=6, kv_heads=1, max_seq_len=8192),
    "decode in a window, soft cap": Shape(LONG, 2, 1, window=400, softcap=4.0, uniform=True, as_vllm=True),
    "verify, groups of 3": Shape(WIDE, heads=3, kv_heads=1, head_dim=80, uniform=True),
    "tree": Shape(WIDE, tree=True, tree_width=7),
    "tree in a window": Shape(WIDE, heads=2, kv_heads=1, tree=True, window=280),
    "64 packed rows": Shape(((100, 9), (300, 2)), heads=10, kv_heads=2, head_dim=16),
    "more splits than are combined at a time": Shape(((1100, 1), (5, 1)), heads=16, kv_heads=1, head_dim=256),
}
_NARROW = {"heads": 2, "kv_heads": 1, "head_dim": 16, "page_size": 64}
PREFILL = Shape(((0, 70), (100, 33), (0, 0), (60, 1)), **_NARROW)
# In half precision 64 packed rows and more have tiles that all rows see, which are not masked.
LARGE_TILES = {
    "the first row sees all but one token of a tile": Shape(((62, 70), (0, 0), (190, 1)), **_NARROW),
    "in a window": Shape(((62, 70), (200, 40)), **_NARROW, window=40),
    "tree": Shape(((62, 40), (130, 40)), **_NARROW, tree=True),
}


EIGHT = {"heads": 8, "kv_heads": 2, "head_dim": 128}
BIG = {
    "decode": Shape(((8191, 1), (127, 1), (0, 0), (2000, 1), (0, 1)), 32, 8, 128, uniform=True),
    "mixed": Shape(((8000, 1), (0, 300), (500, 64), (0, 0), (1023, 1)), **EIGHT),
    "verify": Shape(((8000, 8), (3, 8), (0, 0), (700, 8)), **EIGHT, uniform=True),
    "tree": Shape(((3000, 32), (3, 32), (0, 0)), **EIGHT, tree=True, tree_width=40),
    "window": Shape(((8000, 3), (0, 200), (40, 1)), **EIGHT, window=1000, softcap=20.0),
}


@starts_the_interpreter
def test_triton_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def case_of(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    return make_case(shape, dtype=dtype, device=DEVICE, implementation="triton", seed=seed)


def state_of(case: Case):
    from piecewise_graph.custom_ops.attention.triton_attention import State

    (attend,) = case.batch.served_by.values()
    (state,) = (value for value in attend.args if isinstance(value, State))
    return state


@pytest.mark.usefixtures("no_grad")
class TestKernels:
    pytestmark = needs_kernels

    @pytest.mark.parametrize("name", SHAPES)
    def test_equals_the_loop(self, name: str) -> None:
        check(case_of(SHAPES[name]), 1e-5)
        if SHAPES[name].as_vllm:
            check_without_slots(case_of(SHAPES[name]))

    @pytest.mark.parametrize("name", SPLIT)
    def test_splits_leave_the_counters_at_zero(self, name: str) -> None:
        case = case_of(SPLIT[name])
        check(case, 1e-5)
        counters = state_of(case).tensors[-1]
        assert not counters.any()
        case.call.out.fill_(777.0)
        check(case, 1e-5)

    def test_prefill(self) -> None:
        check(case_of(PREFILL), 1e-5)

    @pytest.mark.parametrize("name", LARGE_TILES)
    def test_tiles_that_all_rows_see(self, name: str) -> None:
        check(case_of(LARGE_TILES[name], torch.float16), TOLERANCE[torch.float16])

    @settings(max_examples=12 if INTERPRETED else 6)  # each may compile
    @given(shape=shapes(), seed=st.integers(0, 99))
    def test_random_batches(self, shape: Shape, seed: int) -> None:
        check(case_of(shape, seed=seed), 1e-5)

    def test_half_precision(self) -> None:
        check(case_of(SHAPES["mixed"], torch.float16), TOLERANCE[torch.float16])

    @pytest.mark.parametrize("layout", ["merged", "heads first", "odd"])
    def test_any_strides_of_rows_and_heads(self, layout: str) -> None:
        case = case_of(SHAPES["mixed"])
        strided = dataclasses.replace(case, call=with_layout(case.call, layout))
        check(strided, 1e-5)

    @pytest.mark.parametrize("behind", [3, 200])  # fewer and more than programs
    def test_rows_of_no_request_become_zeros_and_rows_beyond_the_batch_stay(self, behind: int) -> None:
        case = case_of(Shape(((5, 1), (0, 7), (33, 3))))
        padded = with_padding(case, behind, beyond=2)
        serve(padded.batch, padded.call, captured=False)
        found, tail = padded.call.out, slice(11, 11 + behind)
        assert torch.equal(found[tail], torch.zeros_like(found[tail]))
        assert bool((found[tail.stop :] == 777.0).all())
        wanted = expected(case)
        assert (found[:11].double().cpu() - wanted).norm() < 1e-5 * wanted.norm()

    def test_a_call_keeps_no_batch_alive(self) -> None:
        case = case_of(SHAPES["decode"])
        serve(case.batch, case.call, captured=False)
        batch, call = weakref.ref(case.batch), case.call
        del case
        gc.collect()
        assert call.memo and batch() is None

    def test_a_new_batch_finds_the_variant_and_the_workspace(self) -> None:
        case = case_of(Shape(((150, 1), (5, 1)), uniform=True))  # of two splits
        check(case, 1e-5)
        fields = [field.name for field in dataclasses.fields(AttentionBatch) if field.init]
        again = AttentionBatch(**{name: getattr(case.batch, name) for name in fields})
        first = state_of(case)
        second = dataclasses.replace(case, batch=again)
        check(second, 1e-5)
        assert len(case.call.memo) == 1
        assert state_of(second).tensors[-1] is first.tensors[-1]

    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize("rows", [1, 6])
    def test_a_graph_replays_with_other_lengths(self, rows: int, early: bool) -> None:
        """One batch object, written in place; in the interpreter the call itself stands in for a graph."""
        dtype, unit, kv_heads = (torch.float32, 1, 1) if INTERPRETED else (torch.bfloat16, 15, 2)
        lengths = [(267, 47, 2, 0), (6, 0, 200, 133), (1, 267, 0, 9)]  # up to three splits each, and more
        shapes = [
            Shape(
                tuple((unit * total, rows if total else 0) for total in each), heads=4 * kv_heads,
                kv_heads=kv_heads, head_dim=128, uniform=True, tree=rows > 1, max_seq_len=512 * unit,
            )
            for each in [(267,) * 4, *lengths]
        ]  # fmt: skip
        frame, *cases = (case_of(shape, dtype, seed) for seed, shape in enumerate(shapes))
        with early_reads.unwritten(frame.batch.unwritten_in_forward() if early else ()):
            replay = captured(frame)
        for case in (*cases, cases[0]):
            pour(case, frame)
            replay()
            found, wanted = frame.call.out.double().cpu(), expected(case)
            assert (found - wanted).norm() < TOLERANCE[dtype] * wanted.norm()

    @pytest.mark.parametrize("rows", [0, 3])
    def test_a_request_without_rows_leaves_zeros_and_the_cache_as_it_was(self, rows: int) -> None:
        case = with_padding(case_of(Shape(((0, 0),))), rows, beyond=1)
        before = case.batch.kv_cache.k[1].clone()
        serve(case.batch, case.call, captured=False)
        assert not case.call.out[:rows].any() and bool((case.call.out[rows:] == 777.0).all())
        assert torch.equal(case.batch.kv_cache.k[1], before)

    @pytest.mark.parametrize("left", [None, 0, 1, 2, 3])
    def test_metadata_is_read_early_where_nothing_writes_any_of_it(
        self, left: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from piecewise_graph.custom_ops.attention.triton_attention import attend

        case = case_of(SHAPES["decode"])
        check(case, 1e-5)
        told: list[int] = []
        state = state_of(case)
        case.call.memo[state.config] = (lambda grid, args: told.append(args[0]), ())
        monkeypatch.setattr(early_reads, "_is_capturing", lambda: True)
        named = [tensor for i, tensor in enumerate(case.batch.unwritten_in_forward()) if i != left]
        with early_reads.unwritten(named):
            attend(case.batch, state, case.call)
        attend(case.batch, state, case.call)
        assert told == [int(left is None), 0]

    def test_a_strided_table_is_refused(self) -> None:
        case = case_of(SHAPES["decode"])
        table = case.batch.block_table
        strided = dataclasses.replace(case.batch, block_table=table.t().contiguous().t())
        with pytest.raises(AttentionError, match="block_table"):
            serve(strided, case.call, captured=False)


def with_layout(call: AttentionCall, layout: str) -> AttentionCall:
    """The same call, its q, k and v in one merged tensor, heads before rows, or with rows of odd strides."""

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        if layout == "heads first":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        pad = 1 if layout == "odd" else 16
        wide = x.new_full((x.shape[0], x.shape[1] * x.shape[2] + pad), 777.0)
        view = wide[:, : wide.shape[1] - pad].view(x.shape)
        return view.copy_(x)

    return AttentionCall(
        laid_out(call.q), laid_out(call.k), laid_out(call.v), laid_out(call.out), call.layer, call.scale,
        call.window, call.softcap, call.implementation,
    )  # fmt: skip


def with_padding(case: Case, behind: int, beyond: int) -> Case:
    """The batch has `behind` rows of no request, and the call `beyond` more than the batch."""
    batch, call = case.batch, case.call

    def longer(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x.new_full((behind + beyond, *x.shape[1:]), 777.0)])

    slots = torch.cat([batch.slot_mapping, batch.slot_mapping.new_zeros(behind)])
    return dataclasses.replace(
        case,
        batch=dataclasses.replace(batch, slot_mapping=slots),
        call=AttentionCall(
            *map(longer, (call.q, call.k, call.v, call.out)),
            1,
            call.scale,
            None,
            None,
            "triton",
            live=batch.num_tokens + behind,
        ),
    )


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
class TestCompiled:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("name", BIG)
    def test_long_contexts(self, name: str, dtype: torch.dtype) -> None:
        check(case_of(BIG[name], dtype), TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
    @pytest.mark.parametrize("group", [1, 4, 8])
    def test_head_dims_and_groups(self, head_dim: int, group: int, dtype: torch.dtype) -> None:
        for page_size, lengths in ((1, LONG), (16, WIDE), (64, ((0, 90), (333, 70), (0, 0)))):
            shape = Shape(lengths, heads=2 * group, head_dim=head_dim, page_size=page_size)
            check(case_of(shape, dtype), TOLERANCE[dtype])

    @pytest.mark.parametrize("name", [name for name in SHAPES if "head_dim" not in name])
    def test_shapes_in_bfloat16(self, name: str) -> None:
        check(case_of(SHAPES[name], torch.bfloat16), TOLERANCE[torch.bfloat16])

    @pytest.mark.parametrize("rows", [1, 6])
    def test_a_chain_that_reads_early_answers_as_one_that_waits(
        self, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each starts while the kernel before runs, whose result is its q. Lengths change between replays."""
        from piecewise_graph.custom_ops.attention import triton_attention

        told: list[bool] = []
        ask = early_reads.may_read_early
        monkeypatch.setattr(
            triton_attention, "may_read_early", lambda read: told.append(ask(read)) or told[-1]
        )
        lengths = [(4000,) * 4, (128, 1, 0, 300), (4000, 0, 7, 2000), (1, 2, 3, 4)]
        shapes = [
            Shape(tuple((n, rows if n else 0) for n in each), 32, 8, 128, uniform=True, max_seq_len=4096)
            for each in lengths
        ]
        frame, *cases = (case_of(shape, torch.bfloat16, seed) for seed, shape in enumerate(shapes))
        chains = {early: chain_of(frame, 8) for early in (False, True)}
        replays = {}
        for early, calls in chains.items():
            with early_reads.unwritten(frame.batch.unwritten_in_forward() if early else ()):
                replays[early] = captured(frame, *calls)
            assert told[-len(calls) :] == [early] * len(calls)
        for case, wanted in [(case, expected(case)) for case in cases] * 10:
            pour(case, frame)
            for early, replay in replays.items():
                for call in chains[early]:
                    call.out.fill_(777.0)
                replay()
            assert torch.equal(chains[True][-1].out, chains[False][-1].out)
            found = chains[True][0].out.double().cpu()
            assert (found - wanted).norm() < TOLERANCE[torch.bfloat16] * wanted.norm()


def chain_of(case: Case, length: int) -> list[AttentionCall]:
    """Calls like that of `case`, each with the result of the one before as its q."""
    calls, q = list[AttentionCall](), case.call.q
    for _ in range(length):
        calls.append(dataclasses.replace(case.call, q=q, out=torch.empty_like(q)))
        q = calls[-1].out
    return calls


def captured(case: Case, *calls: AttentionCall) -> Callable[[], None]:
    """The call of a case, or other calls under its batch, as a graph, where there are graphs."""

    def run() -> None:
        for call in calls or [case.call]:
            serve(case.batch, call, captured=True)

    run()
    if INTERPRETED:
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def pour(source: Case, into: Case) -> None:
    """Make `into` describe the batch of `source`, in place."""
    old, new = source.batch, into.batch
    for name in ("seq_lens", "qo_indptr", "slot_mapping"):
        getattr(new, name).copy_(getattr(old, name))
    new.block_table[:, : old.block_table.shape[1]] = old.block_table
    if old.tree_mask is not None:
        new.tree_mask.copy_(old.tree_mask)
    for name in ("q", "k", "v"):
        getattr(into.call, name).copy_(getattr(source.call, name))
    into.call.out.fill_(777.0)
    for cached, fresh in zip((new.kv_cache.k[1], new.kv_cache.v[1]), source.before, strict=True):
        cached[: len(fresh)] = fresh
