"""StandIn: what takes the place of a captured graph on a CPU.

A caller that keeps an output, reads an output too late or moves an input sees on the CPU what it would see
on a GPU. So tests on a CPU find the hazards of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.sizes import overwrite


class StandIn:
    """The same call again, into the same outputs.

    Attributes:
        owned_bytes: bytes of the outputs' storages, inputs apart.
    """

    __slots__ = ("__weakref__", "_inputs", "_outputs", "_run", "owned_bytes")

    def __init__(
        self, run: Callable[..., Sequence[Tensor]], inputs: Sequence[object], outputs: Sequence[Tensor]
    ) -> None:
        self._run, self._inputs, self._outputs = run, inputs, outputs
        given = {_torch.storage_id(value) for value in inputs if isinstance(value, Tensor)}
        owned = {_torch.storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
        self.owned_bytes = sum(size for storage, size in owned.items() if storage not in given)

    def __call__(self) -> None:
        made = self._run(*self._inputs)
        with torch.inference_mode():  # only there may outputs be written that were made there
            for output, value in zip(self._outputs, made, strict=True):
                overwrite(output, value)
