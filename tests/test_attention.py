"""`piecewise::attention` over a paged cache: every implementation against attention as a loop over tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Shape, check, check_without_slots, make_case
from hypothesis import given, settings, strategies as st

MIXED = ((5, 1), (0, 7), (0, 0), (33, 3), (0, 1), (16, 1))
DECODE = ((5, 1), (0, 1), (0, 0), (33, 1), (100, 1))
SHAPES = {
    "mixed": Shape(MIXED),
    "mixed page 1": Shape(MIXED, page_size=1),
    "mixed page 64": Shape(MIXED, page_size=64),
    "decode": Shape(DECODE, uniform=True),
    "decode page 1": Shape(DECODE, page_size=1, uniform=True),
    "window": Shape(MIXED, window=6),
    "window decode": Shape(DECODE, window=6, uniform=True),
    "soft cap": Shape(MIXED, softcap=3.0),
    "one KV head each": Shape(MIXED, heads=4, kv_heads=4),
    "groups of 8": Shape(MIXED, heads=8, kv_heads=1),
    "verify": Shape(((20, 5), (0, 5), (0, 0), (64, 5)), uniform=True),
    "tree": Shape(((20, 6), (3, 6), (0, 0), (64, 6)), tree=True),
    "tree page 1": Shape(((20, 6), (3, 6), (0, 0), (64, 6)), page_size=1, tree=True),
    "tree in a window": Shape(((20, 6), (3, 6), (0, 0), (64, 6)), tree=True, window=16),
    "tree with ancestors in the cache": Shape(
        ((20, 4), (3, 4), (0, 0), (64, 4)), page_size=1, tree=True, tree_width=9
    ),
    "wide tree in a window": Shape(((20, 4), (3, 4), (0, 0), (64, 4)), tree=True, tree_width=9, window=16),
    "longer bound": Shape(DECODE, uniform=True, max_seq_len=4096),
    "as vLLM has it": Shape(MIXED, as_vllm=True),
    "decode as vLLM has it": Shape(DECODE, page_size=32, uniform=True, as_vllm=True),
    "window as vLLM has it": Shape(DECODE, page_size=1, uniform=True, as_vllm=True, window=6),
    **{f"head_dim {dim}": Shape(MIXED, head_dim=dim) for dim in (80, 96, 128, 256)},
}


@pytest.mark.parametrize("name", SHAPES)
def test_torch_reference_equals_the_loop(name: str, device: torch.device) -> None:
    case = make_case(SHAPES[name], dtype=torch.float64, device=device, implementation="torch")
    check(case, 1e-9)


@pytest.mark.parametrize("name", ["mixed", "decode as vLLM has it"])
def test_rows_without_slots_write_nothing(name: str, device: torch.device) -> None:
    shape = dataclasses.replace(SHAPES[name], as_vllm=True)
    check_without_slots(make_case(shape, dtype=torch.float64, device=device, implementation="torch"))


def lengths(uniform: bool) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    one = st.tuples(st.integers(0, 70), st.integers(1, 1 if uniform else 9)) | st.just((0, 0))
    return (
        st.lists(one, min_size=1, max_size=5).map(tuple).filter(lambda pairs: any(rows for _, rows in pairs))
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    uniform = draw(st.booleans())
    kv_heads = draw(st.sampled_from([1, 2]))
    shape = Shape(
        draw(lengths(uniform)),
        heads=kv_heads * draw(st.sampled_from([1, 4, 8])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 80])),
        page_size=draw(st.sampled_from([1, 16, 64])),
        window=draw(st.none() | st.integers(1, 40)),
        softcap=draw(st.none() | st.just(5.0)),
        uniform=uniform,
        as_vllm=draw(st.booleans()),
    )
    if draw(st.booleans()):
        rows = draw(st.integers(1, 8))
        trees = tuple((before, rows if count else 0) for before, count in shape.lengths)
        width = rows + draw(st.integers(0, 5))
        window = None if shape.window is None else shape.window + width
        shape = dataclasses.replace(shape, lengths=trees, tree=True, tree_width=width, window=window)
    return shape


@settings(max_examples=40)
@given(shape=shapes(), seed=st.integers(0, 99))
def test_torch_reference_equals_the_loop_on_random_batches(shape: Shape, seed: int) -> None:
    case = make_case(
        shape, dtype=torch.float64, device=torch.device("cpu"), implementation="torch", seed=seed
    )
    check(case, 1e-9)
