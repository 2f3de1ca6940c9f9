"""Piecewise CUDA graphs as a torch.compile backend.

    torch.compile(model, backend="piecewise")

A trace goes one way through the package, a package per stage:

    backend     what Dynamo calls: composition of the stages
    splitter    FX graph -> steps, cut at registered splitting ops; merge_linears, an option
    compiler    steps -> Program, one compiled function per distinct segment structure; specialize, an option
    recorder    Program x bucket -> ReplayTape: rehearse, prove padding harmless, capture
    runtime     one dispatch per forward, then the tape

`frontend` is pg.compile, pg.capture, pg.capture_in_place, pg.plan and pg.freeze; `inspection` is pg.explain
and pg.bisect. `graph_pool` owns the memory of graphs; `kernels` are launched by the core itself. Consumers
stand above: custom_ops, eagle, bench, cli.
"""

import sys
from importlib import import_module, util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from piecewise_graph import errors
from piecewise_graph.analysis.padding_rules import register_padding_rule
from piecewise_graph.backend import reset
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.context import forward_context, get_forward_context
from piecewise_graph.frontend.capture import capture, plan
from piecewise_graph.frontend.compile import compile
from piecewise_graph.frontend.freeze import freeze
from piecewise_graph.frontend.in_place import capture_in_place
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.inspection.bisection import bisect
from piecewise_graph.inspection.explanation import explain
from piecewise_graph.ranks.exchange import Ranks, ranks_of
from piecewise_graph.splitter.splitting_ops import register_splitting_op
from piecewise_graph.telemetry import counters

__all__ = [
    "GraphPool",
    "PiecewiseConfig",
    "Ranks",
    "bisect",
    "capture",
    "capture_in_place",
    "compile",
    "continuous_batching",
    "counters",
    "errors",
    "explain",
    "forward_context",
    "freeze",
    "get_forward_context",
    "plan",
    "ranks_of",
    "register_attention",
    "register_padding_rule",
    "register_splitting_op",
    "reset",
]

# Names whose work is done above the core, by its consumers: the only imports that point upwards.
_LAZY = {
    "continuous_batching": "piecewise_graph.custom_ops.attention.continuous_batching",
    "register_attention": "piecewise_graph.custom_ops.attention.transformers_registry",
}


def __getattr__(name: str) -> Any:
    """Import what stands in `_LAZY` when it is first asked for; it needs transformers."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


# An installation has custom_ops inside this package. A checkout that is not installed has it beside.
_CUSTOM_OPS = Path(__file__).resolve().parents[1] / "custom_ops"


class _Beside:
    """Finds `custom_ops`, and nothing else of the checkout, as a part of this package."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != f"{__name__}.custom_ops":
            return None
        return util.spec_from_file_location(name, _CUSTOM_OPS / "__init__.py")


if util.find_spec(f"{__name__}.custom_ops") is None and (_CUSTOM_OPS / "kv_cache.py").is_file():
    sys.meta_path.append(_Beside)
