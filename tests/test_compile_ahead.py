"""Kernels that are compiled in other threads before they are asked for are the ones that are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attention_cases import CPU, Shape, make_case
from eagle_engine_cases import PLAIN, make
from hypothesis import given, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from linear_graphs import linears_after_a_norm, linears_of_one_input
from linear_operands import DEVICE, DTYPES, EXAMPLES, note_larger_sizes, operands
from metadata_cases import random_batch
from test_attention import shapes
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import piecewise_graph as pg
from piecewise_graph.compiler.choosing_linears import compile_kernels_ahead
from piecewise_graph.compiler.deferred_norms import compile_norms_ahead
from piecewise_graph.custom_ops import metadata as md
from piecewise_graph.custom_ops.attention import BatchBuffers, compile_ahead
from piecewise_graph.custom_ops.attention.attention_op import compile_call_ahead
from piecewise_graph.custom_ops.attention.implementations import serve
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable
from piecewise_graph.custom_ops.token_choice import argmax, compile_argmax_ahead
from piecewise_graph.kernels import launch
from piecewise_graph.kernels.launch import Launcher
from piecewise_graph.kernels.linear import linear_op

MORE = st.integers(131, 700)  # rows that no graph of a case has


@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


class Kernel:
    """What a Launcher sees of a Triton kernel."""

    cache_key = "hash"

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.begun = threading.Event()
        self.fails = False

    def warmup(self, *args: Any, **options: Any) -> str:
        self.threads.append(threading.current_thread())
        self.begun.set()
        if self.fails:
            raise RuntimeError("no such instruction")
        return f"variant of {args[-1]}"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_enqueue", lambda variant, device: variant)
    return Kernel()


def test_a_variant_is_compiled_once_and_in_another_thread(kernel: Kernel) -> None:
    launcher, x = Launcher(kernel), torch.zeros(4)
    for _ in range(2):
        launcher.ahead([x], 1)
    assert kernel.begun.wait(60)  # what was not begun would be compiled here
    assert launcher.variant([torch.ones(4)], 1) == "variant of 1"
    launcher.ahead([x], 1)
    assert launcher.variant([x], 2) == "variant of 2"
    here = threading.current_thread()
    assert [thread is here for thread in kernel.threads] == [False, True]


def test_a_variant_that_does_not_compile_raises_where_it_is_asked_for(kernel: Kernel) -> None:
    launcher, x = Launcher(kernel), torch.zeros(4)
    kernel.fails = True
    launcher.ahead([x], 1)
    for _ in range(2):  # it is compiled here, each time
        with pytest.raises(RuntimeError, match="no such instruction"):
            launcher.variant([x], 1)
    kernel.fails = False
    assert launcher.variant([x], 1) == "variant of 1"
    assert sum(thread is threading.current_thread() for thread in kernel.threads) == 3


class Asked:
    """Which variants were compiled ahead, and which were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead, self.used = set[Any](), set[Any]()
        variant = Launcher.variant

        def key(launcher: Launcher, args: Any, constants: Any) -> Any:
            return launcher._kernel.__name__, tuple(launcher._options.items()), launch._key(args, constants)

        def noted(launcher: Launcher, args: Any, *constants: Any) -> Any:
            self.used.add(key(launcher, args, constants))
            compiled = variant(launcher, args, *constants)
            # What an interpreted kernel would compute takes long, and nothing here looks at it.
            return (lambda grid, arguments: None) if INTERPRETED else compiled

        def ahead(launcher: Launcher, args: Any, *constants: Any) -> None:
            self.ahead.add(key(launcher, args, constants))

        monkeypatch.setattr(Launcher, "variant", noted)
        monkeypatch.setattr(Launcher, "ahead", ahead)


class TestKernels:
    pytestmark = needs_kernels

    @EXAMPLES
    @given(
        st.sets(st.integers(0, 70) | st.integers(65, 130), min_size=1, max_size=4),
        st.lists(st.sampled_from([1, 17, 64, 520]), min_size=1, max_size=4),
        st.sampled_from([24, 128, 512, 1152]),
        st.booleans(),
        st.sampled_from([*DTYPES, torch.float32]),
        st.booleans(),
        st.booleans(),
        MORE,
    )
    def test_linears_of_a_segment(
        self, sizes: set[int], rows: list[int], columns: int, bias: bool, dtype: torch.dtype, gated: bool,
        one_order: bool, more: int,
    ) -> None:  # fmt: skip
        with pytest.MonkeyPatch.context() as monkeypatch, deterministic(one_order):
            asked, larger = Asked(monkeypatch), note_larger_sizes(monkeypatch)
            gm, tensors = linears_of_one_input(rows[:1] * 2 if gated else rows, columns, bias, dtype, gated)
            compile_kernels_ahead(gm, sorted(sizes))
            for size in sizes | larger | {more}:
                gm(operands(size, 1, columns, dtype)[0], *tensors)
            assert asked.used == asked.ahead

    @EXAMPLES
    @given(
        st.sets(st.sampled_from([0, 1, 2, 17, 33, 70, 128]), min_size=1, max_size=2),
        st.sampled_from([[512], [512, 17, 17, 17]]),
        st.sampled_from([64, 528]),
        st.sampled_from([64, 512]),
        st.booleans(),
        st.sampled_from(DTYPES),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        MORE,
    )
    def test_norms_of_a_segment(
        self, sizes: set[int], after: list[int], columns: int, rows: int, bias: bool, dtype: torch.dtype,
        gated: bool, one_order: bool, hopper: bool, more: int,
    ) -> None:  # fmt: skip
        """Between linears of few rows there is no kernel for them, between others there is."""
        with pytest.MonkeyPatch.context() as monkeypatch, deterministic(one_order):
            asked, larger = Asked(monkeypatch), note_larger_sizes(monkeypatch)
            gm, tensors = linears_after_a_norm(
                after[:1] * 2 if gated else after, columns, rows, bias, dtype, gated
            )
            if not hopper:
                monkeypatch.setattr(linear_op, "serves", lambda x: False)
            compile_norms_ahead(gm, sorted(sizes))
            for size in sizes | larger | {more}:
                x, residual = (operands(size, 1, wide, dtype)[0] for wide in (columns, rows))
                gm(x, residual, *tensors)
            assert asked.used == asked.ahead

    @EXAMPLES
    @given(shapes(), st.sampled_from(DTYPES), st.booleans())
    def test_attention_of_a_batch(self, shape: Shape, dtype: torch.dtype, announced_first: bool) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = Asked(monkeypatch)
            case = make_case(shape, dtype=dtype, device=DEVICE, implementation="triton")
            if announced_first:
                compile_ahead(case.batch)
                assert not asked.ahead  # it is not known yet which attention there is
            serve(case.batch, case.call, False)
            compile_ahead(case.batch)
            assert asked.ahead == {key for key in asked.used if key[0] == "attend_kernel"}

    @EXAMPLES
    @given(shapes(), st.booleans())
    def test_attention_that_a_trace_will_call(self, shape: Shape, announced: bool) -> None:
        """The op sees fake tensors, of a number of rows that is not known."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = Asked(monkeypatch)
            case = make_case(shape, dtype=torch.float16, device=DEVICE, implementation="triton")
            call = case.call
            if announced:
                compile_ahead(case.batch)
            rows = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
            mode = FakeTensorMode(shape_env=ShapeEnv())
            q, k, v = (mode.from_tensor(x, symbolic_context=rows) for x in (call.q, call.k, call.v))
            with pg.forward_context(attention=case.batch):
                compile_call_ahead(q, k, v, q, 0, 1.0, call.window, call.softcap, "triton")
            assert asked.ahead and not asked.used
            serve(case.batch, case.call, False)
            assert asked.ahead == {key for key in asked.used if key[0] == "attend_kernel"}

    @EXAMPLES
    @given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 3))
    def test_a_batch_of_prompts(self, rows: list[int], room: int) -> None:
        """One variant serves batches of other sizes as well."""
        pages: dict[str, Any] = {"num_pages": 1 + 3 * len(rows), "page_size": 16, "device": DEVICE}
        cache = PagedKVCache(num_layers=1, kv_heads=1, head_dim=8, dtype=torch.float16, **pages)
        table = RequestTable(max_requests=len(rows), max_seq_len=48, **pages)
        slots = [table.open() for _ in rows]
        table.reserve(dict(zip(slots, rows, strict=True)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = Asked(monkeypatch)
            BatchBuffers(cache, table, num_requests=1, num_tokens=7, max_query_len=7).compile_ahead()
            assert not asked.used
            BatchBuffers(
                cache, table, num_requests=len(rows) + room, num_tokens=sum(rows) + room, max_query_len=40
            ).fill(slots, rows, rows)
            assert asked.used <= asked.ahead

    @EXAMPLES
    @given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5000), st.sampled_from(DTYPES))
    def test_a_round_beside_its_models(
        self, size: int, nodes: int, vocabulary: int, dtype: torch.dtype
    ) -> None:
        """Drafts are prepared and laid out, tokens chosen from logits, and drafts accepted."""
        batch = random_batch(nodes, size, 16, room=0, device=DEVICE)
        tree = md.Tree.allocate(batch, nodes=nodes)
        accepted = md.Accepted.allocate(batch, nodes=nodes, steps=nodes - 1)
        drafts = torch.zeros(size, nodes - 1, dtype=torch.int32, device=DEVICE)
        logits = torch.zeros(size * nodes, vocabulary, dtype=dtype, device=DEVICE)
        steps = md.DraftSteps.allocate(batch, steps=max(nodes - 1, 1), topk=1)
        state = md.RequestState.zeros(DEVICE, R=len(batch.table))
        inputs = md.Gathered.zeros(DEVICE, B=size, P=batch.table.shape[1])
        result = batch.ints(size, nodes + 1)
        calls: dict[md.MetadataOp, tuple] = {
            md.gather_requests: (batch.requests, batch.table, state, inputs),
            md.draft_steps: (batch, steps),
            md.build_tree: (batch, inputs.root_tokens, drafts, tree),
            md.accept_greedy: (batch, tree.tokens, tree.tokens, accepted),
            md.scatter_accepted: (batch.requests, accepted, result, state),
        }
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = Asked(monkeypatch)
            compile_argmax_ahead(logits[:1])
            for op, given_to in calls.items():
                op.compile_ahead(*given_to)
            assert not asked.used
            assert argmax(logits).dtype == tree.tokens.dtype
            for op, given_to in calls.items():
                op.kernel(op.flatten(*given_to))()
            assert asked.used == asked.ahead and len(asked.used) == 6 + (nodes > 2)


@pytest.mark.gpu
def test_a_speculator_compiles_ahead_what_its_phases_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    make(shapes=[PLAIN], graphs="full", batch_sizes=[4]).prepare()
    laid_out = {"gather_requests_kernel", "build_tree_kernel"}
    chosen = {"argmax_of_parts_kernel", "argmax_of_row_kernel"}
    beside = {*laid_out, *chosen, "accept_greedy_kernel", "scatter_accepted_kernel"}
    used = {key for key in asked.used if key[0] in beside}
    assert {key[0] for key in used} == beside and used <= asked.ahead


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Products of cuBLAS, which torch may refuse then, only warn."""
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", [(8, 4, 16), (8, 5, 16), (8, 1, 4, 16)])
@pytest.mark.parametrize("varies", ["heads", "window", "nothing"])
def test_a_trace_of_calls_that_cannot_be_foreseen(shape: tuple[int, ...], varies: str) -> None:
    """Nothing is compiled ahead, and a call that cannot be served raises when it is made."""
    case = make_case(Shape(((8, 8),), head_dim=16), dtype=torch.float32, device=CPU, implementation="torch")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = [DimDynamic.DYNAMIC if varies == "heads" else DimDynamic.STATIC for _ in shape]
    q, k = (
        mode.from_tensor(torch.zeros(size), symbolic_context=StatelessSymbolicContext(list(kinds)))
        for size, kinds in ((shape, dynamic), ((8, 2, 16), [DimDynamic.STATIC] * 3))
    )
    size = mode.from_tensor(torch.zeros(9), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]))
    window: Any = size.shape[0] if varies == "window" else None
    for batch in (case.batch, object()):
        with pg.forward_context(attention=batch):
            compile_call_ahead(q, k, k, q, 0, 1.0, window)
    assert ("expected" in case.batch.kv_cache.memo) == (varies == "nothing" and len(shape) == 3)
    serve(case.batch, case.call, False)
