"""What can be wrong with a call of a metadata op: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecewise_graph.errors import PiecewiseError


class MetadataError(PiecewiseError, ValueError):
    """Tensors of a metadata op that do not fit together; nothing was written."""

    @classmethod
    def wrong_shape(cls, op: str, name: str, got: Sequence[int], expected: Sequence[int]) -> MetadataError:
        return cls(
            f"{op}: {name} has shape {tuple(got)}, the other arguments ask for {tuple(expected)}.",
            "make it with the same batch size, draft tokens, steps and top-k as the rest; "
            "the allocate() of the buffer classes does.",
        )

    @classmethod
    def wrong_dtype(
        cls, op: str, name: str, got: torch.dtype, expected: Sequence[torch.dtype]
    ) -> MetadataError:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        return cls(
            f"{op}: {name} is {str(got).removeprefix('torch.')}, not {names}.",
            f"convert it once, outside of the loop, or allocate it as {names}.",
        )

    @classmethod
    def wrong_device(cls, op: str, name: str, got: torch.device, expected: torch.device) -> MetadataError:
        return cls(
            f"{op}: {name} is on {got}, but requests is on {expected}.",
            "keep everything that a batch needs on one device.",
        )

    @classmethod
    def not_contiguous(cls, op: str, name: str, strides: Sequence[int]) -> MetadataError:
        return cls(
            f"{op}: {name} is not contiguous, its strides are {tuple(strides)}.",
            "pass a contiguous tensor: kernels address it by row, and a view of some columns has gaps.",
        )

    @classmethod
    def tree_needs_small_pages(cls, op: str, page_size: int) -> MetadataError:
        return cls(
            f"{op}: a tree and a page size of {page_size}: the accepted path does not fill whole pages.",
            "use a page size of 1 for trees, where a commit permutes slots, or a chain (top-k 1, mask=None).",
        )

    @classmethod
    def bad_sizes(cls, op: str, what: str, remedy: str) -> MetadataError:
        return cls(f"{op}: {what}.", remedy)
