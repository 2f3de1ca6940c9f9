"""The models of the benchmarks: Llamas of known shapes with random weights."""

from __future__ import annotations

from piecewise_graph.eagle.head.random_models import (
    MODEL_SHAPES as SHAPES,
    ModelShape as Shape,
    random_draft,
    random_model,
    sharded,
)

__all__ = ["SHAPES", "Shape", "random_draft", "random_model", "sharded"]
