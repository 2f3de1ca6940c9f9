"""Rules of padding for ops that torch does not know: custom ops, user kernels.

A rule that was registered is checked by trial before it serves a proof: the op runs on small random tensors
of the dtypes and ranks seen, exact and padded with different tails, and the live rows must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecewise_graph.analysis.claims import (
    UNIFORM,
    Claim,
    Dim,
    Mark,
    Role,
    broadcast,
    is_constant,
    require,
)
from piecewise_graph.analysis.op_call import Call, State, without
from piecewise_graph.analysis.rule_trial import difference_in_trial
from piecewise_graph.analysis.rules import Rule
from piecewise_graph.errors import PaddingRuleError


@dataclass(frozen=True)
class PaddingRule:
    """A registered rule.

    Attributes:
        name: "namespace::name".
        judge: the claims of what the call writes, then of its results; or one for all.
        trial: check it before it serves a proof.
        tried: signatures of calls that it was checked with.
    """

    name: str
    judge: Rule
    trial: bool
    tried: set[Any] = field(default_factory=set, compare=False)

    def __call__(self, call: Call) -> Sequence[State]:
        found = self.judge(call)
        changed = (*call.written, *call.new)
        states = [found] * len(changed) if found is None or isinstance(found, (Claim, Mark)) else found
        signature = tuple((t.dtype, t.device, call.layout(t).dims) for t in call.tensors)
        if self.trial and signature not in self.tried:
            difference = difference_in_trial(call, changed, states)
            if difference is not None:
                raise PaddingRuleError.refuted(self.name, difference)
            self.tried.add(signature)
        return states


_registry: dict[str, PaddingRule] = {}


def register_padding_rule(
    name: str,
    *,
    rows: Mapping[str, int] | None = None,
    results: int | Sequence[int] = 0,
    elementwise: bool = False,
    rule: Rule | None = None,
    trial: bool = True,
) -> None:
    """Say how an op without a rule treats padded rows, so that segments with it can be padded.

    Give one of `rows`, `elementwise` and `rule`.

    Args:
        name: "namespace::name"; all its overloads.
        rows: argument -> the dimension of its rows. Row i of each result (and of each of these arguments that
            the op writes) is computed from row i of these arguments and from all of the others, in which no
            dimension counts tokens. A negative dimension counts from the end.
        results: the dimension of the rows in each result, or in all of them.
        elementwise: the op computes each element from the elements of the same place, broadcast as usual.
        rule: for experts: a function from the call (`analysis/op_call.py`) to the claims of its results
            (`analysis/claims.py`).
        trial: check the rule on small random tensors before it first serves a proof; turn it off for an op
            that fails on random arguments.

    Raises:
        PaddingRuleError: not exactly one form was given, or a bad name. While a model is compiled: the op did
            not do what the rule says.
    """
    if "::" not in name or [rows is not None, elementwise, rule is not None].count(True) != 1:
        raise PaddingRuleError.bad_rule(name)
    if rule is None:
        rule = _elementwise if elementwise else _Rows(dict(rows or {}), results)
    _registry[name] = PaddingRule(name, rule, trial)


def registered_rule(op: Any) -> PaddingRule | None:
    """The rule that was registered for an op."""
    return _registry.get(op._schema.name)


@dataclass(frozen=True)
class _Rows:
    """Rows are independent, and all else is constant."""

    rows: Mapping[str, int]
    results: int | Sequence[int]

    def __call__(self, call: Call) -> Sequence[State]:
        call.numbers_are_constant()
        row_dims = {id(call.arguments.get(name)): dim for name, dim in self.rows.items()}
        rows: set[Dim] = set()
        for tensor in call.tensors:
            dims = (call.layout if call.writes(tensor) else call.claim)(tensor).dims
            if id(tensor) in row_dims:
                at = row_dims[id(tensor)] % tensor.ndim
                rows.add(dims[at])
                dims = without(dims, at)
            constant = all(dim is UNIFORM if call.writes(tensor) else is_constant(dim) for dim in dims)
            require(constant or all(map(is_constant, dims)), "another dimension counts tokens")
        rows -= {UNIFORM} if len(rows) > 1 else set()  # memory that is about to be written
        require(len(rows) == 1, "rows of different orders meet")
        (row,) = rows
        places = [row_dims.get(id(tensor)) for tensor in call.written]
        places += [self.results] * len(call.new) if isinstance(self.results, int) else self.results
        require(None not in places, "writes an argument without rows")
        return [
            Claim(
                tuple(row if d == (at or 0) % t.ndim else call.padding.dim(n) for d, n in enumerate(t.shape))
            )
            for t, at in zip((*call.written, *call.new), places, strict=True)
        ]


def _elementwise(call: Call) -> Sequence[State]:
    """Each element is computed from those of the same place."""
    call.numbers_are_constant()
    read = [call.claim(tensor) for tensor in call.tensors if not call.writes(tensor)]
    read += [c for c in map(call.layout, call.written) if c.role is not Role.UNWRITTEN]
    return [Claim(broadcast(read))] * len((*call.written, *call.new))
