"""The models of the benchmarks: Llamas of known shapes with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from piecewise_graph.eagle.head.random_models import (
    MODEL_SHAPES as SHAPES,
    ModelShape as Shape,
    random_draft,
    random_model,
    sharded,
)

__all__ = ["SHAPES", "Shape", "model_of_rank", "random_draft", "random_model"]


def model_of_rank(shape: Shape, device: torch.device) -> Any:
    """On our attention; among several processes this one's part of it."""
    model = random_model(shape, device, "piecewise")
    return sharded(model) if distributed.is_initialized() else model
