"""Floats that Dynamo leaves open are taken for constants, as torch's own CUDA graphs take them.

With `dynamic=True` each float of a module (an `eps`, a scale) is an argument of its trace, held in a tensor
on the host. The trace reads it back, which no graph can hold. A float that keeps changing stays open, and its
trace runs without graphs: a trace for each value would cost more.
"""

from __future__ import annotations

from types import CodeType
from weakref import WeakKeyDictionary

from torch.fx import GraphModule

from piecewise_graph import _torch

_MOST_VALUES = 4  # of one float that have traces of their own

Values = dict[str, set[float]]  # of each float, by its source
_known: WeakKeyDictionary[CodeType, Values] = WeakKeyDictionary()


def take_floats_for_constants(gm: GraphModule, code: CodeType | None) -> None:
    """Have Dynamo trace anew where `gm` has open floats that did not change often; it guards their values.

    Args:
        code: whose trace `gm` is.

    Raises:
        Dynamo's exception for that.
    """
    values: Values = _known.setdefault(code, {}) if code is not None else {}
    steady = []
    for each in _torch.open_floats(gm):
        seen = values.setdefault(each.source, set())
        if each.value in seen or len(seen) < _MOST_VALUES:
            seen.add(each.value)
            steady.append(each)
    if steady:
        _torch.trace_with_constants(steady)
    _torch.end_constants()
