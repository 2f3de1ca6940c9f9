"""Whether two runs of the same computation agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Relative to the largest live value: how far two runs may differ by rounding (another tile shape,
# another order of expert tokens). A leak of NaN, or of the size, is far above.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_PART = 1 << 20  # elements that are compared at once


def agree(want: Tensor, got: Tensor) -> bool:
    """Equal within rounding; what is not finite must be so in both.

    Few kinds of kernels serve finite values: to load one takes longer than to run it, and most are needed
    for trials alone.
    """
    if want.shape != got.shape or want.dtype not in TOLERANCE:
        return torch.equal(want, got)
    largest = worst = 0.0
    # Part by part: logits of the largest bucket, in float64 all at once, would be the peak of a start-up.
    for one, other in zip(want.flatten().split(_PART), got.flatten().split(_PART), strict=True):
        apart = _largest(one - other)
        if not math.isfinite(apart):
            finite = one.isfinite()
            if not torch.equal(finite, other.isfinite()):
                return False
            one, other = (torch.where(finite, part.double(), 0.0) for part in (one, other))
            apart = _largest(one - other)
        largest, worst = max(largest, _largest(one)), max(worst, apart)
    return worst <= TOLERANCE[got.dtype] * max(largest, 1e-6)


def _largest(values: Tensor) -> float:
    """The largest absolute value; NaN if there is one among them."""
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0
