"""FlashInfer and flash-attn 4 behind `piecewise::attention`, where their packages and a GPU are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Case, Shape, check, check_cache, expected, make_case
from test_attention import DECODE, MIXED, SHAPES
from torch import Tensor

from piecewise_graph.custom_ops.attention.implementations import load, serve, use
from piecewise_graph.custom_ops.attention.modes import Mode
from piecewise_graph.custom_ops.errors import AttentionError

pytestmark = pytest.mark.gpu

NAMES = ("flashinfer", "flash_attn")
TOLERANCE = 1e-2
LONG = ((3000, 1), (0, 1), (0, 0), (777, 1))
VERIFY = ((20, 40), (0, 40), (0, 0), (500, 40))
MORE = {
    "long decode": Shape(LONG, uniform=True),
    "long window": Shape(LONG, uniform=True, window=600),
    "long mixed": Shape(((3000, 3), (0, 300), (0, 0), (777, 1))),
    "long verify": Shape(((3000, 5), (0, 5), (0, 0), (777, 5)), uniform=True),
    "verify of 40": Shape(VERIFY, uniform=True),
    "tree of 40": Shape(VERIFY, tree=True),
    "mixed page 32": Shape(MIXED, page_size=32),
    "mixed page 128": Shape(MIXED, page_size=128),
    **{f"decode page {size}": Shape(DECODE, page_size=size, uniform=True) for size in (32, 64, 128)},
    **{f"decode head_dim {dim}": Shape(DECODE, head_dim=dim, uniform=True) for dim in (80, 96, 128, 256)},
    "decode groups of 8": Shape(DECODE, heads=16, kv_heads=2, head_dim=128, uniform=True),
    "decode groups of 16": Shape(DECODE, heads=16, kv_heads=1, head_dim=128, uniform=True),
    "mostly padded": Shape(((0, 0), (0, 0), (0, 1), (0, 0)), uniform=True),
}
ALL = {**SHAPES, **MORE}
UNABLE = {
    "flashinfer": {"head_dim 80", "head_dim 96", "head_dim 256", "decode head_dim 256"}
    | {name for name, shape in ALL.items() if shape.as_vllm},
    "flash_attn": {name for name, shape in ALL.items() if shape.tree},
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    missing = load(request.param).missing
    if missing is not None:
        pytest.skip(f"{request.param}: {missing}")
    return request.param


def use_always(mode: Mode, case: Case) -> None:
    """Have the case served by this mode, whatever would be chosen."""
    for captured in (False, True):
        use(mode, case.batch, case.call, captured)


def capturable(name: str) -> Mode:
    return next(mode for mode in load(name).modes if mode.capturable)


def assert_rows(case: Case) -> None:
    """Like `check`, of a call that ran already."""
    live = int(case.batch.qo_indptr[-1])
    found, wanted = case.call.out[:live].double().cpu(), expected(case)[:live]
    assert found.isfinite().all()
    error = (found - wanted).norm() / wanted.norm()
    assert error < TOLERANCE, f"relative error {error:.2e}"
    check_cache(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_equals_the_loop_or_names_one_that_can(
    shape: str, dtype: torch.dtype, name: str, device: torch.device
) -> None:
    case = make_case(SHAPES[shape], dtype=dtype, device=device, implementation=name)
    if shape in UNABLE[name]:
        with pytest.raises(AttentionError, match=r"use .*torch\."):
            serve(case.batch, case.call, captured=False)
    else:
        check(case, TOLERANCE)


@pytest.mark.parametrize("shape", ALL)
def test_every_mode_equals_the_loop(shape: str, name: str, device: torch.device) -> None:
    served = 0
    for mode in load(name).modes:
        case = make_case(ALL[shape], dtype=torch.bfloat16, device=device, implementation=name)
        if mode.reason(case.call, case.batch, False) is None:
            use_always(mode, case)
            check(case, TOLERANCE)
            served += 1
    assert (served == 0) == (shape in UNABLE[name])


def poisoned(case: Case) -> tuple[Case, Tensor]:
    """The case with NaN in the rows of padding, and three more such rows; and which rows those are."""
    batch, call = case.batch, case.call
    more = torch.full((3, *call.q.shape[1:]), float("nan"), dtype=call.q.dtype, device=call.q.device)
    ragged = batch.query_len is None
    slots = torch.cat([batch.slot_mapping, batch.slot_mapping.new_zeros(3)]) if ragged else batch.slot_mapping
    padded = slots == 0
    batch = dataclasses.replace(batch, slot_mapping=slots)
    q, k, v = (
        torch.cat([x, more[:, : x.shape[1]]]) if ragged else x.clone() for x in (call.q, call.k, call.v)
    )
    for x in (q, k, v):
        x[padded] = float("nan")
    call = dataclasses.replace(call, q=q, k=k, v=v, out=torch.full_like(q, float("nan")))
    return dataclasses.replace(case, batch=batch, call=call), padded


@pytest.mark.parametrize("shape", ["mixed", "decode", "verify", "tree", "decode page 1"])
def test_padding_becomes_zeros_and_is_read_by_nobody(shape: str, name: str, device: torch.device) -> None:
    for mode in load(name).modes:
        case = make_case(SHAPES[shape], dtype=torch.bfloat16, device=device, implementation=name)
        case, padded = poisoned(case)
        if mode.reason(case.call, case.batch, False) is None:
            use_always(mode, case)
            serve(case.batch, case.call, captured=False)
            found, wanted = case.call.out.double().cpu(), expected(case)
            assert bool((found[padded.cpu()] == 0).all())
            live = ~padded.cpu()
            assert (found[live] - wanted[live]).norm() / wanted[live].norm() < TOLERANCE
            check_cache(case)


@pytest.mark.parametrize("layout", ["rows apart", "heads first"])
def test_tensors_need_not_be_contiguous(layout: str, name: str, device: torch.device) -> None:
    for mode in load(name).modes:
        case = make_case(SHAPES["decode"], dtype=torch.bfloat16, device=device, implementation=name)
        call = case.call

        def spread(x: Tensor) -> Tensor:
            if layout == "heads first":
                return x.transpose(0, 1).contiguous().transpose(0, 1)
            return torch.stack([x, x], 1).flatten(1, 2)[:, : x.shape[1]]

        q, k, v, out = (spread(x) for x in (call.q, call.k, call.v, call.out))
        case = dataclasses.replace(case, call=dataclasses.replace(call, q=q, k=k, v=v, out=out))
        use_always(mode, case)
        check(case, TOLERANCE)


@pytest.mark.parametrize("shape", ["mixed", "decode", "window decode", "verify", "tree", "longer bound"])
def test_a_captured_call_reads_what_its_batch_says_at_replay(
    shape: str, name: str, device: torch.device
) -> None:
    mode = capturable(name)
    first, then = (
        make_case(dataclasses.replace(SHAPES[shape], lengths=lengths), dtype=torch.bfloat16, device=device,
                  implementation=name, seed=seed)
        for seed, lengths in ((1, SHAPES[shape].lengths), (2, SHAPES[shape].lengths[::-1]))
    )  # fmt: skip
    if mode.reason(first.call, first.batch, True) is not None:
        pytest.skip(mode.reason(first.call, first.batch, True))
    serve(first.batch, first.call, captured=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        serve(first.batch, first.call, captured=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        serve(first.batch, first.call, captured=True)
    for field in ("block_table", "seq_lens", "qo_indptr", "slot_mapping", "tree_mask"):
        if getattr(first.batch, field) is not None:
            getattr(first.batch, field).copy_(getattr(then.batch, field))
    for field in ("q", "k", "v"):
        getattr(first.call, field).copy_(getattr(then.call, field))
    for mine, its in zip(
        (*first.batch.kv_cache.k, *first.batch.kv_cache.v),
        (*then.batch.kv_cache.k, *then.batch.kv_cache.v),
        strict=True,
    ):
        mine.copy_(its)
    graph.replay()
    assert_rows(dataclasses.replace(then, batch=first.batch, call=first.call))


def test_planned_batches_of_one_cache_may_take_turns(device: torch.device) -> None:
    if load("flashinfer").missing is not None:
        pytest.skip(f"flashinfer: {load('flashinfer').missing}")
    planned = next(mode for mode in load("flashinfer").modes if mode.host_lengths)
    shapes = (SHAPES["mixed"], dataclasses.replace(SHAPES["mixed"], lengths=MIXED[::-1]))
    one, other = (
        make_case(shape, dtype=torch.bfloat16, device=device, implementation="flashinfer", seed=seed)
        for seed, shape in enumerate(shapes)
    )
    cache = one.batch.kv_cache
    layers = (*cache.k, *cache.v)
    contents = [
        [x.clone() for x in (*case.batch.kv_cache.k, *case.batch.kv_cache.v)] for case in (one, other)
    ]
    other = dataclasses.replace(other, batch=dataclasses.replace(other.batch, kv_cache=cache))
    for case in (one, other):
        use_always(planned, case)
    for turn in (0, 1, 0):
        for layer, content in zip(layers, contents[turn], strict=True):
            layer.copy_(content)
        check((one, other)[turn], TOLERANCE)
