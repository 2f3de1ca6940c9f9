"""Floats that Dynamo leaves open are taken for constants, as torch's own CUDA graphs take them.

With `dynamic=True` each float of a module (an `eps`, a scale) is an argument of its trace, held in a tensor
on the host. The trace reads it back, which no graph can hold. A float of many values stays open: a trace for
each would cost more than graphs save.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch.fx import GraphModule

from piecewise_graph import _torch

_MOST_VALUES = 4  # of one float of a model that has traces


def take_floats_for_constants(gm: GraphModule, values: MutableMapping[str, set[float]]) -> None:
    """Have Dynamo trace anew where `gm` has open floats of few values; it guards the values.

    Args:
        values: that each float had in earlier traces of the model, by its source; this one's are added.

    Raises:
        TensorifyScalarRestartAnalysis: to Dynamo, which traces anew.
    """
    steady = []
    for each in _torch.open_floats(gm):
        seen = values.setdefault(each.source, set())
        if each.value in seen or len(seen) < _MOST_VALUES:
            seen.add(each.value)
            steady.append(each)
    if steady:
        _torch.trace_with_constants(steady)
