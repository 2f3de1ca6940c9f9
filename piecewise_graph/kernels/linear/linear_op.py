"""Linear layers of a few rows as ops: by a chosen kernel, or by what usually is the fastest one.

`piecewise::linear_few` is for code of exact sizes, `piecewise::linear` for code of all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.launch import dependent_launches, interpreted, kernels_serve
from piecewise_graph.kernels.linear.kernel_configs import KernelConfig, usual_config

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("linear_few(Tensor x, Tensor weight, Tensor? bias, int[] config) -> Tensor")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
DTYPES = (torch.bfloat16, torch.float16)  # of x and weight alike, that the kernels take


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)`, by one of our kernels where that is faster.

    That is so for one row, on Hopper: cuBLAS has tiles made for more rows, and starts when the kernel before
    has ended.

    Args:
        x: `[..., columns]`.
        weight: `[rows, columns]`, dtype of x.
        bias: `[rows]` or None.

    Returns:
        `[..., rows]`, contiguous, in x's dtype.
    """
    return torch.ops.piecewise.linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    config = usual_config(*weight.shape) if _is_one_row(x, weight, bias) else None
    if config is None:
        return functional.linear(x, weight, bias)
    from piecewise_graph.kernels.linear import linear_launch

    return linear_launch.linear_few(x, weight, bias, config)


def _is_one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """And of what the kernel reads. Whatever else there is, torch computes or refuses it."""
    if not (dependent_launches(x.device) or interpreted()):
        return False
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    fits = x.shape[-1] == weight.shape[1] == x.numel() > 0 and weight.is_contiguous()
    return fits and same and x.dtype in DTYPES and (bias is None or bias.shape == weight.shape[:1])


_library.impl("linear", _linear, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::linear", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])
