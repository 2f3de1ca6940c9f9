"""Workspace: what one trace is rehearsed and recorded with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piecewise_graph.compiler.program import Program
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.recorder.static_buffers import FlatBuffers, StaticInputs


@dataclass(frozen=True)
class Workspace:
    """The memory that the tapes of one trace share, and what is known of its segments.

    Attributes:
        pool: where graphs are captured; other models may share it.
        proofs: of padding; the model's other traces share them.
        inputs: buffers that activations are copied to.
        bridges: buffers between a splitting op and the graph that reads its result.
    """

    program: Program
    pool: GraphPool
    proofs: PaddingProofs
    inputs: StaticInputs
    bridges: FlatBuffers

    @classmethod
    def empty(cls, program: Program, pool: GraphPool, proofs: PaddingProofs, largest: int) -> Workspace:
        """A workspace without memory; buffers are allocated when they are first used.

        Args:
            largest: the largest bucket, in tokens.
        """
        return cls(program, pool, proofs, StaticInputs(program, largest), FlatBuffers())

    def bytes(self) -> int:
        """Bytes of the buffers outside of the graph pool."""
        return self.inputs.bytes() + self.bridges.bytes()

    def input_values(self, args: Sequence[Any], bucket: int) -> dict[int, Any]:
        """What the graphs read for each argument: the weight itself, or our buffer for an activation."""
        split = self.program.split
        values: dict[int, Any] = {index: self.inputs.view(index, bucket) for index, _ in split.activations}
        for index, given in enumerate(split.inputs):
            if given.constant is not None:
                values[index] = given.constant
            elif given.opaque or given.merged:  # graphs alone hold what is merged, see merged_weights.py
                values[index] = args[index]
            elif given.bound and index in self.program.last_use:
                # detached: keeps the storage itself alive when the parameter's data is swapped
                values[index] = args[index].detach()
        return values

    def static_arguments(self, args: Sequence[Any], bucket: int) -> list[Any]:
        """A call's arguments with every activation replaced by its padded static buffer."""
        values, sizes = self.input_values(args, bucket), self.program.sizes_at(bucket)
        given = self.program.split.inputs[: len(args)]
        return [
            sizes[item.symbol] if item.symbol in sizes else values.get(index, args[index])
            for index, item in enumerate(given)
        ]
