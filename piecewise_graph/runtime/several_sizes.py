"""How calls of a trace of several sizes are served: by batch sizes with buckets, else by exact sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from piecewise_graph.compiler.batched_sizes import batched_sizes
from piecewise_graph.compiler.other_forms import has_exact_sizes
from piecewise_graph.compiler.program import Program
from piecewise_graph.runtime.batches import Batches, MakeRuntime
from piecewise_graph.runtime.bound_addresses import BoundAddresses
from piecewise_graph.runtime.exact_sizes import ExactSizes
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.side_channel import Purpose
from piecewise_graph.sizes import Sizes


class SeveralSizes:
    """Runtimes of one size, or of none, for a trace of several.

    Args:
        program: of the trace.
        state: of the model.
        addresses: of the tensors that it binds; its runtimes bind the same ones.
        weights: see ExactSizes.

    Attributes:
        batches: None where nothing tells the batch from the tokens.
    """

    def __init__(
        self, program: Program, state: ModelState, addresses: BoundAddresses, weights: Hashable
    ) -> None:
        self._state, self._addresses, batched = state, addresses, batched_sizes(program)
        self._exact = ExactSizes(program, state, weights)
        self.batches = None if batched is None else Batches(program, state, batched)

    @classmethod
    def of(
        cls, program: Program, state: ModelState, addresses: BoundAddresses, weights: Hashable
    ) -> SeveralSizes | None:
        """None for a trace that has buckets, or that no graph can hold."""
        return cls(program, state, addresses, weights) if has_exact_sizes(program) else None

    @property
    def runtimes(self) -> list[Any]:
        """Those that live, of batch sizes and of combinations."""
        return [*self._exact.runtimes, *(self.batches.runtimes if self.batches is not None else ())]

    def run(self, sizes: Sizes, args: Sequence[Any], make: MakeRuntime) -> list[Any] | None:
        """A call's outputs; None where it has to run without graphs.

        Args:
            make: a form of the program and a call's arguments -> its runtime. Not kept: nothing that a
                runtime owns refers to it (per_model.py).

        Raises:
            AddressMovedError, Replaced: see `BoundAddresses.check`.
        """
        if self._state.config.cuda_graphs == "off" or self._state.channel.purpose is Purpose.WARM_UP:
            return None
        if self._addresses.compared:
            self._addresses.settle(args)
        outputs = self.batches.run(sizes, args, make) if self.batches is not None else None
        return self._exact.run(sizes, args, make) if outputs is None else outputs
