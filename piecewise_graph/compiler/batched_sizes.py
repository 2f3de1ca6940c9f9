"""Two sizes that vary, a batch and its tokens: which is which, and whether both may be padded.

Note [A batch and its tokens are proved at once]
Of a call of [B, T] that a replay pads to [b, t], one proof knows both symbols: it holds for all batches and
lengths. A splitting op runs on live tokens of all b rows, so only ops that are known to compute each row of
a batch by itself are let through. Where the tokens of a trace are not shown to bear padding (attention that
is not cut out, in a region of its own), a call whose length is a bucket's may still have rows appended:
then its tokens are taken for a number, and the proof knows the batch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from piecewise_graph import _torch
from piecewise_graph.compiler.build_program import contract_of
from piecewise_graph.compiler.fixed_sizes import Fixed, with_fixed_sizes
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.prove_padding import prove_padding
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


def proof_of_padding(
    program: Program, fixed: Fixed, batch: sympy.Symbol, args: Sequence[Any], config: PiecewiseConfig
) -> ShapeContract | None:
    """For which sizes the trace is proved to bear padding of its batch, and of its tokens if they are left.

    Args:
        fixed: what its other symbols are taken for.
        batch: counts requests: every splitting op has to compute each row from that row alone.
        args: of a call; what its integer buffers hold bounds them as indices.

    Returns:
        None where it is not proved.
    """
    told, env = program.uncapturable, _torch.shape_env_of(program.traced)
    largest = max(*config.batches, *config.sizes)
    with _torch.conditions_undone(env), _torch.as_while_tracing():
        traced = with_fixed_sizes(program.traced, fixed) if fixed else program.traced
        proved = prove_padding(
            traced, args, config.compiler, largest, unproved="exact", uncapturable=told, most_symbols=2
        )
        contract = contract_of(traced, proved.split, is_whole=True)
    random = any(facts.random for facts in proved.facts.values())
    is_proved = batch in contract.symbols and proved.unpaddable is None and not proved.unproved
    row_wise = all(_is_row_wise(call, proved.split, batch) for call in proved.split.op_calls)
    return contract if is_proved and row_wise and not random else None


def _is_row_wise(call: OpCall, graph: SplitGraph, batch: sympy.Symbol) -> bool:
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
