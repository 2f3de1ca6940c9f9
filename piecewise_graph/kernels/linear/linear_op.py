"""Linear layers of a few rows as ops: by a chosen kernel, or by what usually is the fastest one.

`piecewise::linear_few` is for code of exact sizes. `piecewise::linears` and `piecewise::swiglu` are for code
of all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.launch import (
    dependent_launches,
    interpreted,
    kernels_serve,
    multiprocessors,
    shared_memory,
)
from piecewise_graph.kernels.linear import linear_launch
from piecewise_graph.kernels.linear.kernel_configs import (
    INVARIANT,
    SHARED_MEMORY,
    KernelConfig,
    larger_sizes,
    usual_config,
)
from piecewise_graph.kernels.linear.library_products import are_plain, by_library, time_pairs

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("linear_few(Tensor x, Tensor weight, Tensor? bias, int[] config) -> Tensor")
_library.define("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
_library.define("swiglu(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor")
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
    block = splits * KernelConfig(*config).parts * KernelConfig(*config).block_k
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
    return linear_launch.linears_few(x, [weight], [bias], KernelConfig(*config))[0]


_library.impl("linear_few", _linear_few, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::linear_few", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, config: list[int]) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    if not config or KernelConfig(*config).splits == 1:
        return x.new_empty(shape)
    return x.new_empty([KernelConfig(*config).splits, *shape], dtype=torch.float32)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`torch.nn.functional.linear` of one input and each weight, by our kernels where they are faster.

    That is so up to 64 rows, on Hopper and its like, and up to 128 where one launch serves several weights:
    cuBLAS launches a kernel per weight, and starts it when the kernel before has ended. It is so for more
    rows where all programs of that launch run at once. Under
    `torch.use_deterministic_algorithms` one of ours serves any number of rows (`INVARIANT`).

    Args:
        x: `[..., columns]`.
        weights: each `[rows, columns]`, dtype of x.
        biases: one per weight, `[rows]` or None.

    Returns:
        `[..., rows]` for each weight, contiguous, in x's dtype. No two share memory.
    """
    return torch.ops.piecewise.linears(x, list(weights), list(biases))


def _linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    config = config_for(x, weights, biases)
    if config is None:
        return by_library(x, weights, biases)
    return linear_launch.linears_few(x, weights, biases, config)


def config_for(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False
) -> KernelConfig | None:
    """Blocks for operands that our kernels read. Whatever else there is, torch computes or refuses it."""
    columns = x.shape[-1] if x.dim() else 0
    if not serves(x) or not columns or not x.numel() or not are_plain(x, weights, biases):
        return None
    rows = [len(weight) for weight in weights]
    return chosen(x, x.numel() // columns, rows, columns, gated)


def chosen(like: Tensor, tokens: int, rows: Sequence[int], columns: int, gated: bool) -> KernelConfig | None:
    """Blocks of our kernel for so many tokens of `like`'s kind; None = the library serves them."""
    if not serves(like):
        return None
    if torch.are_deterministic_algorithms_enabled():
        return INVARIANT
    device = like.device
    rings, processors = linear_launch.has_rings(device), multiprocessors(device)
    return usual_config(tokens, rows, columns, gated=gated, processors=processors, rings=rings)


def compile_ahead(
    like: Tensor, sizes: Iterable[int], rows: Sequence[int], columns: int, *, has_bias: bool, gated: bool
) -> None:
    """Have the kernels compiled in other threads that `linears`, or `swiglu`, will use for some sizes.

    What any larger number of rows takes is always among them: prompts without a graph may have so many.
    Meanwhile products of the library are timed here (Note [One launch or two] in library_products.py).

    Args:
        like: a tensor of the dtype, and on the device, of all operands.
        sizes: rows of x.
        rows: of each weight. columns: of all.
    """
    asked = set(filter(None, sizes))
    for tokens in asked.union(larger_sizes(rows, gated=gated, processors=multiprocessors(like.device))):
        config = chosen(like, tokens, rows, columns, gated)
        if config is not None:
            linear_launch.compile_ahead(config, like, tokens, columns, has_bias, gated)
            continue
        if gated:
            linear_launch.compile_silu_times_ahead(like)
        if tokens in asked:
            time_pairs(like, tokens, rows, columns)


def serves(x: Tensor) -> bool:
    """The kernels read its dtype and run on its device."""
    return x.dtype in DTYPES and (_holds_blocks(x.device) or interpreted())


def _holds_blocks(device: torch.device) -> bool:
    """The device launches dependents and has the shared memory that blocks without rings take."""
    return dependent_launches(device) and shared_memory(device) >= SHARED_MEMORY


_library.impl("linears", _linears, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::linears", lib=_library)
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [x.new_empty([*x.shape[:-1], weight.shape[0]]) for weight in weights]


def swiglu(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """`silu(linear(x, gate)) * linear(x, up)`, by one kernel where `linears` has ours.

    That one keeps both linears in float32 until they are multiplied. (SwiGLU: Shazeer, arXiv 2002.05202.)

    Args:
        x: `[..., columns]`.
        weights: gate and up, each `[rows, columns]`, dtype of x.
        biases: of gate and up, `[rows]` or None.

    Returns:
        `[..., rows]`, contiguous, in x's dtype.
    """
    return torch.ops.piecewise.swiglu(x, list(weights), list(biases))


def _swiglu(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    gate, up = weights
    config = config_for(x, weights, biases, gated=True) if gate.shape == up.shape else None
    if config is not None:
        return linear_launch.swiglu_few(x, weights, biases, config)
    gate, up = by_library(x, weights, biases)
    served = kernels_serve(gate) and gate.dtype in DTYPES and gate.numel() < 2**31
    if gate.shape != up.shape or not served:
        return functional.silu(gate) * up
    return linear_launch.silu_times(gate.contiguous(), up.contiguous())


_library.impl("swiglu", _swiglu, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::swiglu", lib=_library)
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    return x.new_empty([*x.shape[:-1], weights[0].shape[0]])
