"""`piecewise::linear_few`: a linear layer of a few rows by a chosen kernel. Schema, fake and reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.kernels.linear.kernel_configs import KernelConfig

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("linear_few(Tensor x, Tensor weight, Tensor? bias, int[] config) -> Tensor")


def linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, config: Sequence[int]) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, by the kernel that `config` describes.

    Args:
        x: `[..., columns]`, at most 64 rows in all.
        weight: `[rows, columns]`, contiguous, dtype of x (bfloat16 or float16 on a GPU).
        bias: `[rows]` or None.
        config: fields of `KernelConfig`; empty = the library's kernel, which Inductor then leaves alone.

    Returns:
        `[..., rows]` in x's dtype; with several splits float32 `[splits, ..., rows]`, to be summed.
    """
    return torch.ops.piecewise.linear_few(x, weight, bias, list(config))


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, config: Sequence[int]) -> Tensor:
    """The same in torch."""
    splits = KernelConfig(*config).splits if config else 1
    if splits == 1:
        return functional.linear(x, weight, bias)
    block = splits * KernelConfig(*config).block_k
    part = -(-x.shape[-1] // block) * block // splits
    parts = [
        functional.linear(x[..., start : start + part].float(), weight[:, start : start + part].float())
        for start in range(0, splits * part, part)
    ]
    if bias is not None:
        parts[0] = parts[0] + bias.float()
    return torch.stack(parts)


def _linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, config: list[int]) -> Tensor:
    if not config or not kernels_serve(x):
        return reference(x, weight, bias, config)
    from piecewise_graph.kernels.linear import linear_launch

    return linear_launch.linear_few(x, weight, bias, KernelConfig(*config))


_library.impl("linear_few", _linear_few, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::linear_few", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, config: list[int]) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if not config or KernelConfig(*config).splits == 1:
        return x.new_empty(shape)
    return x.new_empty([KernelConfig(*config).splits, *shape], dtype=torch.float32)
