"""What is asked of Dynamo: which sizes are dynamic, which guards stay, how long traces are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def maybe_mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask Dynamo to trace `tensor.size(dim)` as a symbol, if the model allows. Cheap for a marked tensor."""
    marked = getattr(tensor, "_dynamo_weak_dynamic_indices", None)
    if marked is None or dim not in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def drop_shape_guards(guards: Sequence[Any]) -> list[bool]:
    """A `guard_filter_fn` that keeps everything but SHAPE_ENV (the Notes in frontend/compile.py say why)."""
    return [guard.guard_type != "SHAPE_ENV" for guard in guards]


def raise_recompile_limit() -> None:
    """Dynamo counts traces per code object, which all models of a class share; 8 are few for a server.

    What is set is seen by the setting thread alone, from torch 2.13 on. Others have the default.
    """
    config, name, limit = torch._dynamo.config, "recompile_limit", 64
    config.recompile_limit = max(config.recompile_limit, limit)
    entry = config._config[name]  # type: ignore[attr-defined]
    entry.default = max(entry.default, limit)


def tell_of_reset(backend: Any) -> None:
    """Have the next torch._dynamo.reset() call `backend.reset()`.

    Dynamo itself remembers a backend from torch.compile to its first reset only, and not from trace to trace.
    """
    torch._dynamo.eval_frame.cached_backends.setdefault(id(backend), backend)


def floats_stay_constants() -> AbstractContextManager[Any]:
    """Trace a module's numbers (an attention's scale) as they are.

    Dynamo remembers per line of code what differed between two traces. A second model of a class with another
    scale would get the scale as a symbol, and symbolic floats cannot cross a cut.
    """
    return torch._dynamo.config.patch(specialize_float=True)


def guard_every_weight() -> None:
    """Have Dynamo check weights on every call, as torch 2.13 does by default.

    Torch 2.11 assumes that a module's tensors are unchanged if its dictionaries are. After `p.data = ...`
    with another dtype or shape, a call would reach the trace compiled for the old one. The setting is
    process-wide.
    """
    config = torch._dynamo.config
    for shortcut in ("use_recursive_dict_tags_for_guards", "skip_tensor_guards_with_matching_dict_tags"):
        if hasattr(config, shortcut):
            setattr(config, shortcut, False)
