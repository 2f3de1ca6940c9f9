"""What may be padded in a split graph: one pass that carries claims from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import sympy
import torch
from torch.fx import GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.analysis.claims import UNIFORM, Bounds, Claim, Sorted, live_claim, stored_claim
from piecewise_graph.analysis.facts import SegmentFacts
from piecewise_graph.analysis.proof import Finding, SegmentProof, analyse
from piecewise_graph.compiler.segment_key import Key, structure_key
from piecewise_graph.sizes import is_scalar
from piecewise_graph.splitter.split_graph import OpCall, Ref, SegmentStep, SplitGraph, references
from piecewise_graph.splitter.splitting_ops import bind_arguments, called_name, written_arguments


@dataclass(frozen=True)
class ProvedGraph:
    """A split graph, and what may be padded in it.

    Attributes:
        keys: of each segment's structure, by SegmentStep.index.
        facts: of each structure, by its key's digest.
        unproved: SegmentStep.index -> what could not be proved in the segment, and why.
        unpaddable: why the trace serves exact sizes only, or None.
    """

    split: SplitGraph
    keys: Mapping[int, Key]
    facts: Mapping[str, SegmentFacts]
    unproved: Mapping[int, str]
    unpaddable: str | None


class Prover:
    """Proves each structure once per claims of its inputs."""

    def __init__(self, compiler: str, largest: int) -> None:
        self._compiler, self.largest = compiler, largest
        self._known: dict[tuple[str, tuple[Claim | None, ...]], SegmentProof] = {}

    def keys(self, graph: SplitGraph) -> dict[int, Key]:
        """The keys of a graph's segments, made before a proof of one can add conditions to their trace."""
        device = graph.device
        return {step.index: structure_key(step.gm, self._compiler, device) for step in graph.segments}

    def prove(
        self,
        key: Key,
        gm: GraphModule,
        claims: tuple[Claim | None, ...],
        tokens: Sequence[sympy.Symbol],
        device: torch.device,
    ) -> SegmentProof:
        """What is proved of the structure of `key`, in a trace whose graphs run on `device`."""
        proof = self._known.get((key.digest, claims))
        if proof is None:
            inputs = _torch.argument_values(gm)
            proof = analyse(gm, inputs, claims, tokens, self.largest, device)
            if not any(map(_is_sorted, (*proof.outputs, *proof.inputs))):  # each sort has an order of its own
                self._known[key.digest, claims] = proof
        return proof


def _is_sorted(claim: Claim | None) -> bool:
    atoms = (a for dim in (claim.dims if claim else ()) if dim is not UNIFORM for a in dim)
    return any(isinstance(atom, Sorted) for atom in atoms)


def judge(
    graph: SplitGraph,
    prover: Prover,
    bounds: Mapping[int, Bounds],
    uncapturable: Mapping[str, str],
    *,
    most_symbols: int = 1,
) -> Judge:
    """Judge the graph; what a buffer holds now says nothing where the trace itself writes it.

    Args:
        most_symbols: a trace with more size symbols is not padded.
    """
    tokens = graph.symbols if len(graph.symbols) <= most_symbols else ()
    judging = partial(Judge, graph, prover.keys(graph), prover, tokens=tokens, uncapturable=uncapturable)
    judged = judging(bounds=bounds).run()
    kept = {slot: bound for slot, bound in bounds.items() if graph.storages[slot] not in judged.written}
    return judged if len(kept) == len(bounds) else judging(bounds=kept).run()


class Judge:
    """One pass over the steps of a split graph, which carries claims from slot to slot.

    Args:
        uncapturable: names of the trace's nodes that a capture showed no graph can hold, and why.
        tokens: the size symbols that are padded.

    Attributes:
        wanted: names of the trace's nodes that have to be cut out, as far as this pass can tell.
        waiting: of those, the ones that no graph can hold, whatever its size.
        is_stuck: some value cannot cross the cut that it has to cross.
        is_torn: at any size, because its storage is written.
        writes_static: a segment writes an argument at a fixed address.
    """

    def __init__(
        self,
        graph: SplitGraph,
        keys: Mapping[int, Key],
        prover: Prover,
        bounds: Mapping[int, Bounds],
        uncapturable: Mapping[str, str],
        tokens: Sequence[sympy.Symbol],
    ) -> None:
        self.split, self.keys, self.prover, self.bounds = graph, keys, prover, bounds
        self.uncapturable, self.tokens = uncapturable, tokens
        self.claims: dict[int, Claim | None] = {}
        self.facts: dict[str, SegmentFacts] = {}
        self.unproved: dict[int, str] = {}
        self.computes: dict[int, bool] = {}
        self.wanted: set[str] = set()
        self.waiting: set[str] = set()
        self.is_stuck = self.is_torn = self.writes_static = False
        self.unpaddable: str | None = None
        self.makers: dict[int, tuple[int, str]] = {}  # slot -> the step and the node that made it
        self.written: set[int | None] = set()  # storages
        self.overlapping: set[int] = set()  # slots that an unpadded segment returns

    @property
    def is_proved(self) -> bool:
        return not (self.wanted or self.is_stuck)

    @property
    def may_pad(self) -> bool:
        """A replay of the trace could be padded: it has sizes to pad, and graphs may hold what it does."""
        return bool(self.tokens) and not any(fact.random for fact in self.facts.values())

    @property
    def pads_something(self) -> bool:
        """Replays would save more than nothing."""
        return any(step.padded and self.computes[step.index] for step in self.split.segments)

    def may_change_objects(self) -> bool:
        """An unproved segment is given an object that may keep state."""
        return any(
            _torch.may_keep_state(value)
            for step in self.split.segments
            if step.index in self.unproved
            for value in _torch.argument_values(step.gm)
        )

    def result(self) -> ProvedGraph:
        apart = {step.index for step in self.split.segments if not step.padded}
        unproved = {index: why for index, why in self.unproved.items() if self.may_pad or index in apart}
        unpaddable = self.unpaddable if self.may_pad else None
        return ProvedGraph(self.split, self.keys, self.facts, unproved, unpaddable)

    def run(self) -> Judge:
        for slot, given in enumerate(self.split.inputs):
            if given.spec is not None:
                stored = given.bound or given.merged or given.constant is not None
                self.claims[slot] = self._stored(slot) if stored else self._live(slot)
                if not stored:
                    self._refuse_overlap(slot)
        for step in self.split.steps:
            if isinstance(step, SegmentStep):
                self._segment(step)
            else:
                for call in step.calls:
                    self._op(call)
        for slot in references(self.split.outputs):
            if slot >= len(self.split.inputs):
                self._narrowed(slot)
        self._refuse_torn_views()
        return self

    def _live(self, slot: int) -> Claim | None:
        return live_claim(self.split.spec(slot), self.tokens)

    def _stored(self, slot: int) -> Claim | None:
        claim, bounds = stored_claim(self.split.spec(slot)), self.bounds.get(slot)
        return replace(claim, live=bounds) if claim is not None and bounds is not None else claim

    def _segment(self, step: SegmentStep) -> None:
        made = next(node for node in reversed(step.gm.graph.nodes)).args[0]
        assert isinstance(made, (tuple, list))
        self.makers.update(
            (slot, (step.index, step.origins[node.name]))
            for slot, node in zip(step.outputs, made, strict=True)
        )
        hidden = self.overlapping if step.padded else ()
        given = tuple(
            self.claims.get(x.slot) if isinstance(x, Ref) and x.slot not in hidden else None
            for x in step.inputs
        )
        key = self.keys[step.index]
        proof = self.prover.prove(key, step.gm, given, self.tokens, self.split.device)
        proof = self._with_uncapturable(step, proof)
        self.facts[key.digest] = proof.facts
        self.computes[step.index] = proof.facts.computes
        named = self.split.arguments_sharing_storage(slot for _, slot in _written(step, proof))
        self.writes_static |= any(given.bound for given in named)
        if step.padded:
            self._padded(step, proof)
        else:
            self._unpadded(step, proof)

    def _with_uncapturable(self, step: SegmentStep, proof: SegmentProof) -> SegmentProof:
        """What was proved of the segment, and what captures showed of it."""
        known = self.uncapturable
        found = [
            Finding(node, called_name(node), known[step.origins[node.name]], waits=True)
            for node in step.gm.graph.nodes
            if step.origins.get(node.name) in known
        ]
        if not found:
            return proof
        told = {finding.node.name for finding in found}  # a proof is of one of several equal segments
        others = [finding for finding in proof.findings if finding.node.name not in told]
        facts = replace(proof.facts, host_sync=True)
        return replace(proof, findings=(*found, *others), facts=facts)

    def _padded(self, step: SegmentStep, proof: SegmentProof) -> None:
        for index, slot in _written(step, proof):
            self._write(slot, proof.inputs[index])
        self.claims.update(zip(step.outputs, proof.outputs, strict=True))
        self.claims.update((step.outputs[i], self._live(step.outputs[i])) for i in proof.facts.uninitialised)
        self._refuse_numbers_elsewhere(step)
        if proof.findings:
            self.unproved[step.index] = _text(proof.findings)
            self.wanted |= {step.origins[found.node.name] for found in proof.findings}
            waiting = [node for found in proof.findings if found.waits for node in _with_readers(found.node)]
            self.waiting |= {step.origins[node.name] for node in waiting}

    def _refuse_numbers_elsewhere(self, step: SegmentStep) -> None:
        """A graph makes no number on the host anew. One that leaves it is made between the graphs."""
        for slot in step.outputs:
            spec, (_, node) = self.split.spec(slot), self.makers[slot]
            if spec.device != self.split.device and not spec.shape:
                self.wanted.add(node)
                self.waiting.add(node)
                self.unproved.setdefault(step.index, f"{node} (is a number on {spec.device})")

    def _unpadded(self, step: SegmentStep, proof: SegmentProof) -> None:
        self.unproved[step.index] = _text(proof.findings) or "beside what is unproved"
        for slot in references(step.inputs):
            self._narrowed(slot)
        for _, slot in _written(step, proof):
            self._write_live_rows(slot)
        # Inputs of one memory cannot be laid out anew, one by one.
        self.is_stuck |= proof.facts.aliased_write and self.split.strides_vary(step, proof.facts.written)
        self.claims.update((slot, self._live(slot)) for slot in step.outputs)
        self.overlapping |= set(filter(self._overlaps, step.outputs))

    def _op(self, call: OpCall) -> None:
        for slot in references((call.args, call.kwargs)):
            self._narrowed(slot)
        for name, value in bind_arguments(call.target, call.args, call.kwargs):
            if name in written_arguments(call.target):
                for slot in references(value):
                    self._write_live_rows(slot, also_tail=call.op.padded)
        for _, slot in call.outputs:
            claim = self._live(slot)
            self.claims[slot] = replace(claim, tail=None) if claim and call.op.padded else claim
            self._refuse_overlap(slot)

    def _refuse_overlap(self, slot: int) -> None:
        """The value is copied to a buffer of its layout, where rows of padding would lie in live ones."""
        if self._overlaps(slot):
            self.is_stuck, self.unpaddable = True, "overlapping_memory"

    def _overlaps(self, slot: int) -> bool:
        sizes = dict.fromkeys(self.tokens, self.prover.largest)
        return bool(self.tokens) and self.split.spec(slot).overlaps(sizes)

    def _write_live_rows(self, slot: int, also_tail: bool = False) -> None:
        """Live rows are live; the tail is what it was, or with `also_tail` anything."""
        before = self.claims.get(slot)
        if before is None or not before.is_plain:
            self._write(slot, self._live(slot))
        else:
            self._write(slot, Claim(before.dims, tail=None if also_tail else before.tail))

    def _write(self, slot: int, claim: Claim | None) -> None:
        """Give a written slot its claim. Of the values of all others in its storage nothing is known."""
        storage = self.split.storages[slot]
        self.written.add(storage)
        for other, old in self.claims.items():
            if self.split.storages[other] == storage and old is not None:
                self.claims[other] = Claim(old.dims) if old.is_plain else None
        self.claims[slot] = claim

    def _narrowed(self, slot: int) -> None:
        """The value is seen by an op, an unpadded segment or the caller, who get its live rows."""
        claim = self.claims.get(slot)
        if claim is not None and claim.is_plain:
            return
        if self._live(slot) is None or slot not in self.makers:
            self.is_stuck, self.unpaddable = True, "derived_size"
            return
        index, node = self.makers[slot]
        self.wanted.add(node)
        self.unproved.setdefault(index, f"{node} (its rows are not in the order of the tokens)")

    def _refuse_torn_views(self) -> None:
        """What an unpadded segment returns is copied, so nothing that shares its storage may be written."""
        for step in self.split.segments:
            mine = {self.split.storages[slot] for slot in step.outputs}
            others = {self.split.storages[slot] for slot in references(step.inputs)}
            several = len(mine) < len(step.outputs)
            if not step.padded and (mine & self.written) and (several or mine & others):
                self.is_stuck = self.is_torn = True


def _with_readers(node: Node) -> Iterator[Node]:
    """The node; of one that makes a number, which no segment owns, what computes with the number too."""
    yield node
    for user in node.users if is_scalar(_torch.example_value(node)) else ():
        yield from _with_readers(user)


def _written(step: SegmentStep, proof: SegmentProof) -> list[tuple[int, int]]:
    """The inputs that a segment writes: position and slot."""
    return [(i, x.slot) for i in sorted(proof.facts.written) if isinstance(x := step.inputs[i], Ref)]


def _text(findings: Sequence[Finding]) -> str:
    """The first ops, which are the cause of the others."""
    ops = list(dict.fromkeys(f"{found.op} ({found.why})" for found in findings))
    return ", ".join(ops[:2]) + (f" and {len(ops) - 2} more" if len(ops) > 2 else "")
