"""Up to how many tokens the RoPE of a model is the same in every call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rope_limit(config: Any) -> int | None:
    """Tokens of a request up to which the RoPE does not depend on the longest request of a call.

    transformers chooses the frequencies of "longrope" and "dynamic" by the longest position of a call. Beyond
    the limit one request changes all others, and keys that are cached are of other frequencies.

    Args:
        config: of a transformers model, that of its text where there are several.

    Returns:
        None where there is no such limit.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return None
    each = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]  # by the kind of layer
    positions = getattr(config, "max_position_embeddings", None)
    limits = []
    for part in each:
        kind = part.get("rope_type") or part.get("type") or ""
        if kind == "longrope":
            original = part.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or positions)
        elif "dynamic" in kind:
            limits.append(positions)
    return min((limit for limit in limits if limit), default=None)
