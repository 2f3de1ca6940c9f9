"""What is asked of Dynamo: which sizes are dynamic, which guards stay, how long traces are kept."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piecewise_graph._torch.graphs import current_root_code


def maybe_mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask Dynamo to trace `tensor.size(dim)` as a symbol, if the model allows. Cheap for a marked tensor."""
    marked = getattr(tensor, "_dynamo_weak_dynamic_indices", None)
    if marked is None or dim not in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def no_graph_breaks() -> AbstractContextManager[Any]:
    """What Dynamo cannot trace whole raises inside the block, before any of it runs."""
    return torch._dynamo.error_on_graph_break(True)


def is_behind_a_break() -> bool:
    """Dynamo is tracing the rest of a frame, whose beginning runs in Python."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

    code = current_root_code()
    return code is not None and code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def traces_a_part(entry: str) -> bool:
    """Asked by a backend: Dynamo is tracing a part of the compiled function, and another part runs already.

    Behind a graph break it traces a resumed frame. Where it has skipped a frame, that one runs around it.

    Args:
        entry: the file that calls the compiled function.
    """
    from torch._dynamo import convert_frame

    if is_behind_a_break():
        return True
    torchs, frame = str(Path(torch.__file__).parent), inspect.currentframe()
    around: list[str] | None = None  # files of the frames around Dynamo's own
    while frame is not None:
        file = frame.f_code.co_filename
        if file == convert_frame.__file__:
            around = []
        elif around is not None and file == entry:
            return not all(other.startswith(torchs) for other in around)
        elif around is not None:
            around.append(file)
        frame = frame.f_back
    return False


def drop_shape_guards(guards: Sequence[Any]) -> list[bool]:
    """A `guard_filter_fn` that keeps everything but SHAPE_ENV (the Notes in frontend/compile.py say why)."""
    return [guard.guard_type != "SHAPE_ENV" for guard in guards]


def forget_guarded_tensors(guards: Sequence[Any]) -> None:
    """For a `guard_filter_fn`: Dynamo builds the kept guards anew, and compares what they guard by `==`.

    A NumPy array is another tensor each time, and such a comparison has no truth value.
    """
    for guard in guards:
        if guard.guard_type == "TENSOR_MATCH":
            guard.orig_guard.obj_weakref = None


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
