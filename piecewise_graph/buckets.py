"""The one place that maps a token count to a bucket. Pure Python, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# (up to, step): fine where a decode batch lives, coarse where padding is cheap against the work.
_STEPS = ((32, 8), (128, 16), (256, 32), (512, 128))


def default_capture_sizes(max_tokens: int) -> tuple[int, ...]:
    """Sizes 1, 2, 4, 8, 16, ... up to and including `max_tokens` (19 of them at 512).

    Above 512 each doubling has one size halfway, so that padding wastes at most a third.
    """
    sizes = {1, 2, 4, max_tokens}
    for limit, step in _STEPS:
        sizes.update(range(step, limit + 1, step))
    power = 512
    while power < max_tokens:
        sizes.update((power, power * 3 // 2))
        power *= 2
    return tuple(sorted(size for size in sizes if size <= max_tokens))


# Each doubles the batch: padding wastes less than half of it.
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32)


def bucket_for(num_tokens: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_tokens`, or None above the largest."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else None
