"""`piecewise::linear_few`: a linear layer of a few rows by a chosen kernel. Schema, fake and reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.kernels.linear.plans import Plan

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("linear_few(Tensor x, Tensor weight, Tensor? bias, int[] plan) -> Tensor")


def linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Sequence[int]) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, by the kernel that `plan` describes.

    Args:
        x: `[..., columns]`, at most 64 rows in all.
        weight: `[rows, columns]`, contiguous, dtype of x (bfloat16 or float16 on a GPU).
        bias: `[rows]` or None.
        plan: fields of `Plan`; empty = the library's kernel, which Inductor then leaves alone.

    Returns:
        `[..., rows]` in x's dtype; with several splits float32 `[splits, ..., rows]`, to be summed.
    """
    return torch.ops.piecewise.linear_few(x, weight, bias, list(plan))


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Sequence[int]) -> Tensor:
    """The same in torch."""
    splits = Plan(*plan).splits if plan else 1
    if splits == 1:
        return functional.linear(x, weight, bias)
    block = splits * Plan(*plan).block_k
    part = -(-x.shape[-1] // block) * block // splits
    parts = [
        functional.linear(x[..., start : start + part].float(), weight[:, start : start + part].float())
        for start in range(0, splits * part, part)
    ]
    if bias is not None:
        parts[0] = parts[0] + bias.float()
    return torch.stack(parts)


def _linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, plan: list[int]) -> Tensor:
    if not plan or not kernels_serve(x):
        return reference(x, weight, bias, plan)
    from piecewise_graph.kernels.linear import linear_launch

    return linear_launch.linear_few(x, weight, bias, Plan(*plan))


_library.impl("linear_few", _linear_few, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::linear_few", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, plan: list[int]) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if not plan or Plan(*plan).splits == 1:
        return x.new_empty(shape)
    return x.new_empty([Plan(*plan).splits, *shape], dtype=torch.float32)
