"""Public names whose work is done by the library's consumers, imported when they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def register_attention(name: str = "piecewise", implementation: str = "auto") -> None:
    """Register the paged attention op with transformers, under `attn_implementation=name`.

    Such a model takes the tokens of all requests in one row: `input_ids` and `position_ids` of shape `[1,
    num_tokens]`, and `use_cache=False`. Pass the last two always: left out, transformers counts positions
    from 0 and keeps a cache of its own. Whose the tokens are, and where their K and V lie, comes from
    `pg.forward_context(attention=batch)`; `custom_ops.attention.make_batch` makes a batch.

    Args:
        name: what models will ask for.
        implementation: "torch", "triton", "flashinfer", "flash_attn", or "auto": the fastest that can serve
            a call.

    Raises:
        AttentionError: no implementation has that name.
        ImportError: transformers is not installed (`pip install piecewise-graph[transformers]`).
    """
    from piecewise_graph.custom_ops.attention import transformers

    transformers.register(name, implementation)


def generate(options: Any) -> int:
    """See eagle/command.py; `options` are the command line's."""
    from piecewise_graph.eagle import command

    return command.run(options)


def bench(arguments: Sequence[str]) -> int:
    """See bench/command.py; `arguments` follow "bench" on the command line."""
    from piecewise_graph.bench import command

    return command.main(arguments)


def speculative_demo(path: str, prompt: Sequence[int], new_tokens: int, compiler: str, device: str) -> None:
    """See eagle/command.py."""
    from piecewise_graph.eagle import command

    command.demo(path, prompt, new_tokens, compiler, device)


def bind_copy(destinations: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], bool] | None:
    """See custom_ops/copies.py; None on a CPU, and without Triton."""
    if not all(tensor.is_cuda for tensor in destinations):
        return None
    try:
        from piecewise_graph.custom_ops import copies

        return copies.bind_copy(destinations)
    except ImportError:
        return None


def fastest_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, generated: Callable[[], Any] | None
) -> dict[str, float]:
    """See custom_ops/linear/tuning.py: way to compute a linear -> microseconds."""
    from piecewise_graph.custom_ops.linear import tuning

    return tuning.fastest(x, weight, bias, generated)


def graph_microseconds(call: Callable[[], Any]) -> float:
    """Device time of `call` in a captured graph."""
    from piecewise_graph.custom_ops.linear import tuning

    return tuning.graph_microseconds(call)


def linear_few() -> Any:
    """The op that takes a way to compute a linear as a list of integers."""
    import torch

    from piecewise_graph.custom_ops import linear  # noqa: F401  registers the op

    return torch.ops.piecewise.linear_few.default


def is_linear_plan(way: str) -> bool:
    """Whether `way` names one of our kernels' plans."""
    from piecewise_graph.custom_ops.linear import plans

    return plans.is_plan(way)


def linear_splits(plan: list[int]) -> int:
    """How many partial results the op returns for `plan`."""
    from piecewise_graph.custom_ops.linear import Plan

    return Plan(*plan).splits if plan else 1


def linear_max_tokens() -> int:
    """Above it no kernel of ours is meant to be faster."""
    from piecewise_graph.custom_ops.linear import MAX_TOKENS

    return MAX_TOKENS
