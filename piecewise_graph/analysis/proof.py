"""Runs a segment once on fake tensors and judges each op as it passes: is padding harmless to live rows?

The walk keeps a claim (claims.py) per tensor, which rules (rules.py) derive from the claims of what the op
read. No graph is rewritten: a write through a view is followed by its storage.

Note [Regions]
~~~~~~~~~~~~~~
A node whose results are not shown to be clean is a finding. The caller cuts it out and runs it on live rows,
so its results are as good as a call's inputs, and the walk goes on with them. What such a node reads is
narrowed to the live rows. That needs a value whose dimensions are constants or exactly the tokens; so the
node that made any other value (tokens times two, tokens + 3, rows in sorted order) runs on live rows too, and
a result of such a shape is read on live rows only. The walk is repeated until no further node is found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.analysis.claims import (
    UNIFORM,
    Claim,
    Mark,
    Padding,
    Role,
    Unproved,
    hull,
    is_constant,
    is_plain,
    is_symbolic,
    live_claim,
    require,
)
from piecewise_graph.analysis.facts import Observations, SegmentFacts
from piecewise_graph.analysis.op_call import Call, State, tensors_of
from piecewise_graph.analysis.padding_rules import registered_rule
from piecewise_graph.analysis.rules import find


@dataclass(frozen=True)
class Finding:
    """A node that has to run on live rows.

    Attributes:
        node: of the segment.
        op: the op in it that no rule shows clean ("aten::_softmax").
        why: in words ("over tokens", "no rule").
        waits: no graph can hold it, whatever its size.
    """

    node: fx.Node
    op: str
    why: str
    waits: bool = False


@dataclass(frozen=True)
class SegmentProof:
    """What padding does to one segment.

    Attributes:
        findings: the nodes that have to run on live rows. Without any, padding cannot change live rows.
        outputs: the claim of each output; None: it has none.
        inputs: the claim of each input afterwards, as the segment may have written it.
        facts: what else the run showed.
    """

    findings: tuple[Finding, ...]
    outputs: tuple[Claim | None, ...]
    inputs: tuple[Claim | None, ...]
    facts: SegmentFacts


def analyse(
    gm: GraphModule,
    inputs: Sequence[Any],
    claims: Sequence[Claim | None],
    tokens: Collection[sympy.Symbol],
    largest: int | None = None,
    device: torch.device | None = None,
) -> SegmentProof:
    """Run `gm` on its fake `inputs` and judge it.

    Args:
        claims: of each input; None for what is no tensor, or of which nothing is known.
        tokens: the size symbols that are padded.
        largest: no run, padded or not, has more tokens; None where that is not known. It bounds indices that
            count tokens (positions).
        device: where graphs of the trace run; None where that is not known.
    """
    padding = Padding(frozenset(tokens), largest)
    forced: dict[fx.Node, str] = {}
    while True:
        walk = _Walk(gm, padding, forced, device)
        outputs = walk.run_on(inputs, claims)
        more = walk.nodes_to_force()
        if not more:
            break
        forced |= more
    findings = tuple(walk.found[node] for node in gm.graph.nodes if node in walk.found)
    after = tuple(map(walk.settled, outputs)), tuple(map(walk.settled, inputs))
    return SegmentProof(findings, *after, walk.seen.facts(inputs, outputs))


class _Walk(fx.Interpreter):
    """One run. Claims are kept by the identity of the tensors, which stay alive until its end."""

    def __init__(
        self, gm: GraphModule, padding: Padding, forced: dict[fx.Node, str], device: torch.device | None
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.mode = _torch.fake_mode_of(gm)
        self.padding, self.forced = padding, forced
        self.fixed = self._fixes_tokens()
        self.found: dict[fx.Node, Finding] = {}
        self.seen = Observations(device)
        self.states: dict[int, State] = {}
        self.layouts: dict[int, tuple[Sequence[Any], Sequence[Any], Any]] = {}
        self.by_storage: dict[int, dict[int, Tensor]] = {}
        self.writers: dict[int, list[fx.Node]] = {}
        self.feeders: dict[fx.Node, list[fx.Node]] = {}  # made what a node reads and cannot be narrowed
        self.torn: set[int] = set()  # storages of which a node on live rows made a view
        self.shifted: set[int] = set()  # storages of which a view begins at a later token
        self.inputs: list[Tensor] = []
        self.node: fx.Node | None = None

    def run_on(self, inputs: Sequence[Any], claims: Sequence[Claim | None]) -> Sequence[Any]:
        for value, claim in zip(inputs, claims, strict=True):
            for tensor in _torch.inner_tensors(value) if isinstance(value, Tensor) else ():
                self.inputs.append(tensor)
                self.seen.note_input(tensor)
                self._keep(tensor, claim if tensor is value else live_claim(tensor, ()))
        with self.mode or nullcontext(), torch.no_grad(), _torch.observe_ops(self.on_op):
            outputs: Sequence[Any] = self.run(*inputs, enable_io_processing=False)
        return outputs

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        values = {source: tensors_of(self.env[source]) for source in n.all_input_nodes}
        if n in self.forced:
            self._find(_name(n), self.forced[n])
        if any(source in self.found and any(map(_torch.is_wrapped, values[source])) for source in values):
            self._find(_name(n), "inside of a transform with what runs on live rows")
        self.feeders[n] = [source for source in values if not all(map(self.is_narrowable, values[source]))]
        known = set(self.by_storage)
        given = {id(tensor) for tensors in values.values() for tensor in tensors}
        result = super().run_node(n)
        if not self.fixed and self._fixes_tokens():
            self.fixed = True
            self.forced[n] = "fixes the number of tokens"
            self._find(_name(n), self.forced[n])
        for tensor in tensors_of(result):
            if n.op == "get_attr" and id(tensor) not in self.states:
                self._keep(tensor, live_claim(tensor, ()))
            elif n in self.found and id(tensor) not in given and not _torch.is_wrapped(tensor):
                self._keep(tensor, live_claim(tensor, self.padding.symbols))
                self.torn |= {_torch.storage_id(tensor)} & known
        return result

    def _fixes_tokens(self) -> bool:
        """The run so far holds for one number of tokens only."""
        env = None if self.mode is None else self.mode.shape_env
        return env is not None and any(_torch.is_fixed(env, symbol) for symbol in self.padding.symbols)

    # --- judging ----------------------------------------------------------------------------------

    def on_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        waits, runs_graphs = self.seen.note(op, args, kwargs, result), _torch.is_higher_order(op)
        if waits is not None:
            self._find(str(op) if runs_graphs else op._schema.name, waits, waits=True)
        if runs_graphs:
            self._unproved(str(op), "runs graphs of its own")
            self._set_live(tensors_of(result))
            return
        if op.namespace == "prim" or (not tensors_of((args, kwargs)) and not tensors_of(result)):
            return
        call = Call.of(op, args, kwargs, result, self.padding, self.state_of)
        try:
            require(self.node not in self.found, "runs on live rows")
            states = self._judge(call)
            if _begins_later(call):
                self.shifted.add(_torch.storage_id(call.results[0]))
            for tensor, state in zip((*call.written, *call.new), states, strict=True):
                write = self._write if call.writes(tensor) else self._keep
                write(tensor, state)
        except Unproved as problem:
            if call.reads_unwritten_alone():
                for tensor in call.new:
                    self._keep(tensor, Claim((UNIFORM,) * tensor.ndim, role=Role.UNWRITTEN))
                return
            self._unproved(op._schema.name, str(problem))
            self._set_live(call.new)
            for tensor in call.written:
                self._write_live(tensor)

    def state_of(self, tensor: Tensor) -> State:
        return self.states.get(id(tensor))

    def _judge(self, call: Call) -> Sequence[State]:
        """The claims of what the op writes, and of its new results."""
        tags, own = call.op.tags, registered_rule(call.op)
        require(torch.Tag.nondeterministic_seeded not in tags, "random")
        if call.name == "aten::as_strided" and call.written and self._stays(call.written[0]):
            return [call.layout(call.written[0])]
        require(torch.Tag.inplace_view not in tags, "changes its argument's shape")
        for tensor in call.written:
            require(_torch.storage_id(tensor) not in self.torn, "writes what a region views")
            shared = [t for t in self.inputs if _torch.storage_id(t) == _torch.storage_id(tensor)]
            require(len(shared) < 2, "writes memory that inputs share")
        in_place = len(call.written) == 1 and call.name != call.op._schema.name and not call.new
        require(not call.written or in_place or own is not None, "writes an argument")
        changed = (*call.written, *call.new)
        rule = own or find(call)
        found = _of_constants(call) if rule is None else rule(call)
        if found is None or isinstance(found, (Claim, Mark)):
            found = [found] * len(changed)
        fit = all(not isinstance(s, Claim) or _fits(s, t) for t, s in zip(changed, found, strict=False))
        require(fit and len(found) == len(changed), "its rule is wrong")
        return found

    def _stays(self, tensor: Tensor) -> bool:
        """An op that arranges it anew changed nothing, as where adaptive_avg_pool2d makes one place."""
        before, after = self.layouts.get(id(tensor)), _layout(tensor)
        return before is not None and _elements(*before) == _elements(*after)

    def _unproved(self, op: str, why: str) -> None:
        if self.node not in self.found:
            self._find(op, why)

    def _find(self, op: str, why: str, *, waits: bool = False) -> None:
        assert self.node is not None
        self.found[self.node] = Finding(self.node, op, why, waits)

    # --- state ------------------------------------------------------------------------------------

    def _keep(self, tensor: Tensor, state: State) -> None:
        self.states[id(tensor)], self.layouts[id(tensor)] = state, _layout(tensor)
        self.by_storage.setdefault(_torch.storage_id(tensor), {})[id(tensor)] = tensor

    def _set_live(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._keep(tensor, live_claim(tensor, self.padding.symbols))

    def _write(self, written: Tensor, new: State) -> None:
        """Every tensor that shares the storage of `written` changes with it."""
        self._note_writer(written)
        for tensor in self.by_storage[_torch.storage_id(written)].values():
            mine = self.states[id(tensor)]
            if _place(tensor) == _place(written):
                self.states[id(tensor)] = new
            else:
                self.states[id(tensor)] = self._written_in_part(tensor, mine, written, new)

    def _written_in_part(self, whole: Tensor, old: State, part: Tensor, new: State) -> Claim | None:
        """The claim of a tensor after a write to a part of its storage, both with plain dimensions.

        Each live element of the whole that lies in the part must be live in the part: the part's token
        dimensions are dimensions of tokens of the whole, told by their strides, and begin at the same token.
        All others stay as they were.
        """
        before, after = self._plain(whole, old), self._plain(part, new)
        if before is None or after is None or not _steps(part, after) <= _steps(whole, before):
            return None
        if _torch.storage_id(part) in self.shifted and _steps(part, after):
            return None
        if before.role is Role.UNWRITTEN:
            return replace(before, role=None)
        if whole.dtype != part.dtype:  # its bits are other numbers here
            return Claim(before.dims)
        live = hull([before.live, after.live])
        return Claim(before.dims, live, hull([before.anywhere, after.anywhere]))

    def _write_live(self, written: Tensor) -> None:
        """A node on live rows wrote the live rows of `written`; the tail is as it was."""
        self._note_writer(written)
        for tensor in self.by_storage.get(_torch.storage_id(written), {}).values():
            mine = self._plain(tensor, self.states[id(tensor)])
            torn = _torch.storage_id(tensor) in self.torn
            self.states[id(tensor)] = None if mine is None or torn else Claim(mine.dims, None, mine.anywhere)

    def _note_writer(self, written: Tensor) -> None:
        assert self.node is not None
        self.writers.setdefault(_torch.storage_id(written), []).append(self.node)

    def _plain(self, tensor: Tensor, state: State) -> Claim | None:
        """The claim with plain dimensions, where it has or implies one."""
        if not isinstance(state, Claim) or len(state.dims) != tensor.ndim:  # an op changed its shape in place
            return None
        try:
            sizes = zip(state.dims, tensor.shape, strict=True)
            dims = [self.padding.dim(size) if dim is UNIFORM else dim for dim, size in sizes]
        except Unproved:
            return None
        return state.with_dims(dims) if all(map(is_plain, dims)) else None

    def is_narrowable(self, tensor: Tensor) -> bool:
        return self._plain(tensor, self.state_of(tensor)) is not None

    # --- the end ----------------------------------------------------------------------------------

    def settled(self, output: Any) -> Claim | None:
        """The claim of an output, as plain as it can be said."""
        state = self.state_of(output) if isinstance(output, Tensor) else None
        if not isinstance(state, Claim):
            return None
        plain = self._plain(output, state) or state
        return replace(plain, role=None) if plain.role is Role.UNWRITTEN else plain

    def nodes_to_force(self) -> dict[fx.Node, str]:
        """Nodes that have to run on live rows because of others (Note [Regions])."""
        more = {
            feeder: f"makes a value of derived rows for {node.name}"
            for node in self.found
            for feeder in self.feeders[node]
        }
        for tensor in self.inputs:
            storage = _torch.storage_id(tensor)
            if storage in self.writers and not self.is_narrowable(tensor):
                more |= dict.fromkeys(self.writers[storage], "leaves an input that is not clean")
        return {n: why for n, why in more.items() if n not in self.found and n.op != "placeholder"}


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _of_constants(call: Call) -> Sequence[State]:
    """An op without a rule that reads constants alone does the same in both runs.

    A view might read more of a storage than its argument shows (as_strided).
    """
    call.numbers_are_constant()
    returns = call.op._schema.returns
    require(not any(r.alias_info is not None and not r.alias_info.is_write for r in returns), "no rule")
    require(all(is_constant(dim) for t in call.tensors for dim in call.claim(t).dims), "no rule")
    return [Claim(call.fresh(result)) for result in call.results]


def _fits(claim: Claim, tensor: Tensor) -> bool:
    """A rule that forgets a dimension proves nothing."""
    return len(claim.dims) == tensor.ndim and all(
        dim is UNIFORM or _torch.expression(size) == _size(dim)
        for dim, size in zip(claim.dims, tensor.shape, strict=True)
    )


def _size(atoms: Sequence[Any]) -> sympy.Expr:
    size = sympy.Integer(1)
    for atom in atoms:
        if isinstance(atom, int):
            size *= atom
        else:
            size *= _size(atom.before) if hasattr(atom, "before") else atom.symbol + atom.extra
    return size


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Which elements of its storage a tensor shows, and as what."""
    return (tensor.dtype, *_elements(*_layout(tensor)))


def _layout(tensor: Tensor) -> tuple[Sequence[Any], Sequence[Any], Any]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _elements(shape: Sequence[Any], stride: Sequence[Any], offset: Any) -> list[Any]:
    """The same of two tensors of one storage means the same elements. Along one element no step is made."""
    steps = [0 if isinstance(n, int) and n == 1 else step for n, step in zip(shape, stride, strict=True)]
    return [len(steps), *map(_torch.expression, (*shape, *steps, offset))]


def _begins_later(call: Call) -> bool:
    """It makes a view of tokens whose first row may be another one than its argument's."""
    if call.name != "aten::slice" or not is_symbolic(call.results[0].shape[call.dim_of(call.results[0])]):
        return False
    return is_symbolic(call.arguments["start"]) or bool(call.arguments["start"])


def _steps(tensor: Tensor, claim: Claim) -> set[sympy.Expr]:
    """Strides, in bytes, of the token dimensions."""
    pairs = zip(claim.dims, tensor.stride(), strict=True)
    return {_torch.expression(step) * tensor.itemsize for dim, step in pairs if not is_constant(dim)}
