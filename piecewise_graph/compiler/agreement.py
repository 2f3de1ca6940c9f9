"""Whether two runs of the same computation agree."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the largest live value: how far two runs may differ by rounding (another tile shape,
# another order of expert tokens). A leak of NaN, or of the size, is far above.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_PART = 1 << 20  # elements that are compared at once


def agree(want: Tensor, got: Tensor) -> bool:
    """Equal within rounding; what is not finite must be so in both."""
    if want.shape != got.shape or want.dtype not in TOLERANCE:
        return torch.equal(want, got)
    if not want.numel():
        return True
    largest = worst = torch.zeros((), dtype=torch.float64, device=want.device)
    # Part by part: logits of the largest bucket, in float64 all at once, would be the peak of a start-up.
    for one, other in zip(want.flatten().split(_PART), got.flatten().split(_PART), strict=True):
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return False
        exact = torch.where(finite, one, 0).double()
        difference = exact - torch.where(finite, other, 0).double()
        largest, worst = largest.maximum(exact.abs().max()), worst.maximum(difference.abs().max())
    return bool(worst <= TOLERANCE[got.dtype] * largest.clamp(min=1e-6))
