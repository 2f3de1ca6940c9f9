"""Several tensors copied in one launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter

import piecewise_graph as pg
from piecewise_graph.kernels.copies import SLOTS, bind_copy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16]


@starts_the_interpreter
def test_kernel_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


class TestKernel:
    pytestmark = needs_kernels

    @settings(max_examples=15 if INTERPRETED else 40)
    @given(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.integers(1, 1500), st.integers(0, 3)),
            min_size=1,
            max_size=SLOTS,
        )
    )
    def test_copies_and_touches_nothing_else(self, kinds: list[tuple[torch.dtype, int, int]]) -> None:
        """Destinations and sources begin at odd offsets of larger buffers."""
        buffers = [torch.full((size + 8,), 7, dtype=dtype, device=DEVICE) for dtype, size, _ in kinds]
        destinations = [b[at : at + size] for b, (_, size, at) in zip(buffers, kinds, strict=True)]
        copy = bind_copy(destinations)
        assert copy is not None
        for _ in range(2):
            sources = [
                torch.randint(-9, 9, (size + 1,), device=DEVICE).to(dtype)[1:] for dtype, size, _ in kinds
            ]
            assert copy(sources)
            for buffer, source, (_, size, at) in zip(buffers, sources, kinds, strict=True):
                assert torch.equal(buffer[at : at + size], source)
                assert (buffer[:at] == 7).all() and (buffer[at + size :] == 7).all()

    def test_other_strides_are_left_to_others(self) -> None:
        to = torch.zeros(4, 4, device=DEVICE)
        copy = bind_copy([to])
        assert copy is not None and not copy([torch.ones(4, 4, device=DEVICE).t()[:, :]])
        assert not to.any()

    def test_what_it_cannot_serve(self) -> None:
        assert bind_copy([]) is None
        assert bind_copy([torch.zeros(0, device=DEVICE)]) is None
        assert bind_copy([torch.zeros(4, device=DEVICE)] * (SLOTS + 1)) is None
        assert bind_copy([torch.zeros(4, dtype=torch.bool, device=DEVICE)]) is None
        assert bind_copy([torch.zeros(4, 4, device=DEVICE).t()[:, :2]]) is None


@pytest.mark.gpu
def test_frozen_calls_copy_with_it_whatever_the_strides() -> None:
    from toys import Blocks, assert_same, compiled, rows

    with torch.no_grad():
        model = Blocks(2).to(DEVICE)
        call = pg.freeze(compiled(model, outputs="static"), rows(3, DEVICE))
        for count in (4, 3, 8, 4, 2):
            x = rows(count, DEVICE)
            for given_x in (x, x.t().contiguous().t(), x.clone()):
                assert_same(call(given_x), model(x))
