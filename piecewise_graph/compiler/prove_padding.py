"""Every segment of a trace is proved to bear padding; what cannot be proved is cut out.

Note [Cut out what is unproved]
The proof (analysis/) names the nodes that it cannot answer for. They go to segments of their own, which
replays run on the live rows, as they run a splitting op: between graphs, on views narrowed to the token
count. The rest is padded. What crosses such a cut has to be narrowable: its sizes are constants or the
token count itself. Where it is not, the nodes that make it or read it go to the same segment. So do padded
readers of a view that overlaps itself (unfold): rows of padding would lie in live ones. Where no such cut
exists (the caller's result has T + 1 rows, an argument or the result of an op overlaps itself), the trace
serves exact sizes only.

A trace whose segments write a tensor at a fixed address (a static KV cache) serves exact sizes only: rows of
padding would be written too.

What no graph can hold at any size (a value that the host reads back, a copy between host and device) is cut
out where that is possible, whatever becomes of padding: it costs itself, not the model. Most of it shows in
the fake run of the proof. The rest shows when a capture fails (recorder/uncapturable.py), and the trace is
cut anew.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch.fx import GraphModule, Node

from piecewise_graph.analysis.bounds import bounds_by_index
from piecewise_graph.compiler.judge import Judge, ProvedGraph, Prover, judge
from piecewise_graph.splitter.split import Unsplittable, split
from piecewise_graph.splitter.splitting_ops import splitting_op_of

# Between two unproved nodes, this many proved ones go with them: a graph for them costs more than it saves.
_GAP = 8
_ROUNDS = 8  # each grows the regions by the neighbours that the one before asked for


Unproved = Literal["cut", "exact", "tried"]


def prove_padding(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compiler: str,
    largest: int,
    *,
    unproved: Unproved,
    uncapturable: Mapping[str, str],
    most_symbols: int = 1,
) -> ProvedGraph:
    """Split `gm` so that as much as possible of it may be padded.

    Args:
        example_inputs: the trace's arguments. What integer buffers hold now bounds them as indices.
        compiler: what will compile the segments; part of the keys of `facts`.
        largest: the largest bucket, in tokens, or of whatever else its sizes count.
        unproved: what becomes of a region without proof. "cut": it is cut out where that is possible.
            "exact": its trace is never padded. "tried": its segment is reported, for trials. Where one
            is given an object that may keep state, "cut": a trial would change it.
        uncapturable: names of nodes that no graph can hold, as a capture showed, and why.
        most_symbols: a trace with more sizes that vary is never padded; of one that has as many, all are.

    Raises:
        Unsplittable: the graph has to stay whole.
    """
    prover = Prover(compiler, largest)
    bounds = bounds_by_index(example_inputs)

    def judged(cut_out: Container[str] = ()) -> Judge:
        graph = split(gm, cut_out)
        return judge(graph, prover, bounds, uncapturable, most_symbols=most_symbols)

    whole = judged()
    pads = not whole.writes_static
    if unproved == "tried" and whole.may_change_objects():
        unproved = "cut"
    found = whole
    if unproved == "cut" and pads and whole.may_pad and not whole.is_proved:
        cut = _cut(gm, judged, whole.wanted, pads=True)
        if cut is not None and cut.pads_something:
            return cut.result()
    if unproved != "exact" and whole.waiting:
        found = _cut(gm, judged, whole.waiting, pads=False) or whole
    if not whole.may_pad or (pads and (whole.is_proved or unproved == "tried")):
        return found.result()
    why = "no_padding_proof" if pads else "writes_static_input"
    return replace(found.result(), unpaddable=whole.unpaddable or why)


def _cut(
    gm: GraphModule, judged: Callable[[set[str]], Judge], first: set[str], *, pads: bool
) -> Judge | None:
    """The graph with `first` and what has to go with it cut out; None where that is impossible.

    Args:
        first: names of nodes of `gm`.
        pads: the rest has to be proved; else no more is asked than that graphs can hold it.
    """
    wanted = set(first)
    for _ in range(_ROUNDS):
        _fill_gaps(gm, wanted)
        try:
            found = judged(wanted)
        except Unsplittable:
            return None
        grown, stuck = (found.wanted, found.is_stuck) if pads else (found.waiting, found.is_torn)
        if not grown and not stuck:
            return found
        if stuck or grown <= wanted:
            return None
        wanted |= grown
    return None


def _fill_gaps(gm: GraphModule, wanted: set[str]) -> None:
    """Add the few nodes between two wanted ones of a segment."""
    gap: list[Node] | None = None  # since the last wanted node
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if splitting_op_of(node) is not None:
            gap = None
        elif node.name in wanted:
            wanted.update(other.name for other in gap or ())
            gap = []
        elif gap is not None:
            gap.append(node)
            gap = gap if len(gap) <= _GAP else None
