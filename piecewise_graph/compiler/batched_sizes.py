"""Two sizes that vary, a batch and its tokens: which is which, and whether both may be padded.

Note [A batch and its tokens are proved at once]
Of a call of [B, T] that a replay pads to [b, t], one proof knows both symbols: it holds for all batches and
lengths. A splitting op runs on live tokens of all b rows, so only ops that are known to compute each row of
a batch by itself are let through. What was compiled for both symbols then serves every batch size, with a
number for its batch. Where the tokens of a trace are not shown to bear padding (attention that is not cut
out, in a region of its own), each batch size is compiled for itself, and a call whose length is a bucket's
may still have rows appended: then its tokens are taken for a number, and the proof knows the batch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.build_program import contract_of
from piecewise_graph.compiler.fixed_sizes import Fixed, with_fixed_sizes
from piecewise_graph.compiler.judge import ProvedGraph
from piecewise_graph.compiler.other_forms import of_proof
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.prove_padding import prove_padding
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.sizes import ShapeContract, TensorSpec
from piecewise_graph.splitter.split_graph import OpCall, Ref, Size, SplitGraph, is_torch_attention, references
from piecewise_graph.splitter.splitting_ops import bind_arguments


@dataclass(frozen=True)
class BatchedSizes:
    """The sizes of a trace of [batch, tokens].

    Attributes:
        batch: one symbol, or several that a call gives one value: of the tokens, and of a mask that the model
            broadcasts, for instance.
        tokens: of each request.
    """

    batch: tuple[sympy.Symbol, ...]
    tokens: sympy.Symbol

    def at_batch(self, size: int) -> dict[sympy.Symbol, int]:
        return dict.fromkeys(self.batch, size)

    @property
    def one_batch(self) -> dict[sympy.Symbol, int | sympy.Symbol]:
        """One symbol of the batch is left."""
        return dict.fromkeys(self.batch[1:], self.batch[0])

    def at_tokens(self, count: int) -> dict[sympy.Symbol, int | sympy.Symbol]:
        return {**self.one_batch, self.tokens: count}

    def batch_dims(self, spec: TensorSpec) -> list[int]:
        return [dim for symbol in self.batch for dim in spec.token_dims(symbol)]


def batched_sizes(program: Program) -> BatchedSizes | None:
    """Which symbols count requests, and which tokens; None where the tensors of a call do not tell.

    They do where all that have two sizes that vary have the tokens behind the batch.
    """
    pairs: dict[sympy.Expr, sympy.Expr] = {}
    for _, spec in program.split.activations:
        places = tuple(dict.fromkeys(size for size in spec.shape if size.free_symbols))
        if len(places) > 2 or not all(size.is_Symbol for size in places):
            return None
        if len(places) == 2:
            pairs[places[0]] = places[1]
    counts = set(pairs.values())
    if len(counts) != 1 or {*pairs, *counts} != set(program.contract.symbols) or counts & set(pairs):
        return None
    return BatchedSizes(tuple(pairs), counts.pop())


def cuts_to_rows(program: Program, sizes: BatchedSizes) -> bool:
    """A call's arguments can be grown in their batch dimension, and its results cut back to views."""
    results = [slot for slot in references(program.split.outputs) if slot >= len(program.split.inputs)]
    made = [program.split.spec(slot) for slot in results]
    given = [spec for _, spec in program.split.activations]
    derived = any(spec.is_derived(symbol) for spec in (*given, *made) for symbol in sizes.batch)
    varying = any(spec.strides_vary(symbol) for spec in made for symbol in sizes.batch)
    return not derived and not varying and all(sizes.batch_dims(spec) in ([], [0]) for spec in made)


@dataclass(frozen=True)
class Padded:
    """A trace that is proved to bear padding of its tokens.

    Attributes:
        program: of the trace, with one symbol for its batch.
        of_batch: the contract of the sizes for which rows may be appended too; None where they may not.
    """

    program: Program
    of_batch: ShapeContract | None


def padded_in_both(
    program: Program,
    sizes: BatchedSizes,
    args: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Padded | None:
    """The trace for all batches and lengths, compiled once; None where padding of its tokens is not proved.

    Args:
        args, config, compiled: see `build_program`.
    """
    with _proof(program, sizes.one_batch, args, config) as (traced, proved):
        if not _is_proved(proved, sizes.batch[0]):
            return None
        made = of_proof(program, traced, proved, config, compiled)
    return Padded(made, made.contract if _is_row_wise(made.split, sizes.batch[0]) else None)


def padding_of_batch(
    program: Program, sizes: BatchedSizes, tokens: int, args: Sequence[Any], config: PiecewiseConfig
) -> ShapeContract | None:
    """For which batches of `tokens` tokens rows may be appended; None where that is not proved.

    Args:
        args, config: see `build_program`.
    """
    with _proof(program, sizes.at_tokens(tokens), args, config) as (traced, proved):
        batch = sizes.batch[0]
        is_proved = _is_proved(proved, batch) and _is_row_wise(proved.split, batch)
        return contract_of(traced, proved.split, is_whole=True) if is_proved else None


@contextmanager
def _proof(
    program: Program, fixed: Fixed, args: Sequence[Any], config: PiecewiseConfig
) -> Iterator[tuple[GraphModule, ProvedGraph]]:
    """The trace with the symbols of `fixed` taken for what they map to, proved.

    What the body assumes of sizes is forgotten at its end: the contract that it makes holds it.
    """
    largest = max(*config.batches, *config.sizes)
    env = _torch.shape_env_of(program.traced)
    with _torch.conditions_undone(env), _torch.as_while_tracing():
        traced = with_fixed_sizes(program.traced, fixed) if fixed else program.traced
        yield (
            traced,
            prove_padding(
                traced,
                args,
                config.compiler,
                largest,
                unproved="exact",
                uncapturable=program.uncapturable,
                most_symbols=2,
            ),
        )


def _is_proved(proved: ProvedGraph, batch: sympy.Symbol) -> bool:
    random = any(facts.random for facts in proved.facts.values())
    known = batch in proved.split.symbols
    return known and proved.unpaddable is None and not proved.unproved and not random


def _is_row_wise(graph: SplitGraph, batch: sympy.Symbol) -> bool:
    """Every splitting op is known to compute each row of a batch from that row alone."""
    return all(_computes_rows(call, graph, batch) for call in graph.op_calls)


def _computes_rows(call: OpCall, graph: SplitGraph, batch: sympy.Symbol) -> bool:
    given = dict(bind_arguments(call.target, call.args, call.kwargs))
    counted = any(isinstance(x, Size) and batch in x.expr.free_symbols for x in given.values())
    if counted or not is_torch_attention(call):
        return False
    rows = [graph.spec(x.slot) for name in ("query", "key", "value") if isinstance(x := given.get(name), Ref)]
    mask = given.get("attn_mask")
    if isinstance(mask, Ref) and any(batch in size.free_symbols for size in graph.spec(mask.slot).shape):
        rows.append(graph.spec(mask.slot))
    return (
        len(rows) > 2 and len({len(spec.shape) for spec in rows}) == 1 and all(_leads(x, batch) for x in rows)
    )


def _leads(spec: TensorSpec, batch: sympy.Symbol) -> bool:
    return spec.token_dims(batch) == (0,) and not spec.is_derived(batch) and len(spec.shape) > 2
