"""Token count -> bucket."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from piecewise_graph.buckets import bucket_for, default_capture_sizes

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=40, unique=True).map(sorted)


@given(st.integers(0, 6000), SIZES)
def test_bucket_is_the_smallest_that_holds_the_tokens(tokens: int, sizes: list[int]) -> None:
    holding = [size for size in sizes if size >= tokens]
    assert bucket_for(tokens, sizes) == (min(holding) if holding else None)


def test_default_has_nineteen_sizes_to_512() -> None:
    sizes = default_capture_sizes(512)
    assert sizes[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert len(sizes) == 19
    assert sizes[-1] == 512


@given(st.integers(1, 20_000))
def test_default_sizes_ascend_from_one_to_max_tokens(max_tokens: int) -> None:
    sizes = default_capture_sizes(max_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_tokens


@pytest.mark.parametrize("max_tokens", [512, 700, 1024, 4096, 8191])
def test_padding_wastes_at_most_a_third_above_512(max_tokens: int) -> None:
    sizes = default_capture_sizes(max_tokens)
    for tokens in range(513, max_tokens + 1):
        bucket = bucket_for(tokens, sizes)
        assert bucket is not None
        assert (bucket - tokens) / bucket <= 1 / 3


def test_small_batches_get_a_bucket_each() -> None:
    assert [bucket_for(n, default_capture_sizes(512)) for n in (1, 2, 4, 8)] == [1, 2, 4, 8]
