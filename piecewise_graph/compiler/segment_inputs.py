"""Segments away from a call: run by themselves, on the real weights and made-up activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.sizes import Sizes, TensorSpec, evaluate, overwrite
from piecewise_graph.splitter.split_graph import SegmentStep, Size


def same_in_every_call(program: Program, args: Sequence[Any]) -> dict[int, Any]:
    """Everything that is the same in every call, by slot: what segments read by address, and objects."""
    constants = ((slot, given.constant) for slot, given in enumerate(program.split.inputs))
    weights = dict(program.bound_arguments(program.with_merged(args)))
    objects = {slot: args[slot] for slot in program.split.opaque}
    return weights | objects | {slot: value for slot, value in constants if value is not None}


def segment_inputs(
    program: Program, step: SegmentStep, segment: CompiledSegment, bound: Mapping[int, Any], size: int
) -> list[Any]:
    """What the segment gets at `size`: real weights, the same random activations every time, sizes.

    What it writes is a copy.
    """
    sizes = program.sizes_at(size)
    found: list[Any] = []
    generators: dict[torch.device, torch.Generator] = {}
    for index, item in enumerate(step.inputs):
        if isinstance(item, Size):
            found.append(evaluate(item.expr, sizes))
        elif item.slot in bound:
            given = bound[item.slot]
            found.append(given.clone() if index in segment.facts.written else given)
        else:
            spec = program.split.spec(item.slot)
            generator = generators.setdefault(spec.device, torch.Generator(spec.device).manual_seed(0))
            # An integer, or a float that the segment casts, may be an index: 0 is a legal one.
            is_free = spec.dtype.is_floating_point and not segment.facts.floats_become_integers
            found.append(_random(spec, sizes, generator) if is_free else spec.empty(sizes).zero_())
    return found


def run_segments_alone(program: Program, args: Sequence[Any], size: int) -> None:
    """Run each distinct segment once at `size`, so that a capture finds its kernels loaded.

    Args:
        args: of a call; only objects and what graphs read by address are used.
    """
    bound = same_in_every_call(program, args)
    for step in {program.compiled[step.index].key: step for step in program.split.segments}.values():
        segment = program.compiled[step.index]
        if segment.facts.computes:
            segment.at(size)(*segment_inputs(program, step, segment, bound, size))


def _random(spec: TensorSpec, sizes: Sizes, generator: torch.Generator) -> Tensor:
    made = spec.empty(sizes)
    noise = torch.randn(made.shape, generator=generator, device=spec.device)
    overwrite(made, noise.to(spec.dtype))
    return made
