"""Public names whose work is done by the library's consumers, imported when they are called."""

from __future__ import annotations


def register_attention(name: str = "piecewise", implementation: str = "auto") -> None:
    """Register the paged attention op with transformers, under `attn_implementation=name`.

    Such a model takes the tokens of all requests in one row (`input_ids` and `position_ids` `[1,
    num_tokens]`, `use_cache=False`); whose they are, and where their K and V lie, comes from
    `pg.forward_context(attention=AttentionBatch(...))`.

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
