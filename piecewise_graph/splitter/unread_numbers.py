"""Random numbers that nobody reads are not drawn: AOTAutograd, before every real compiler, drops them too.

A trace that draws numbers is not captured: each replay would draw the same ones again. Encoders of speech in
transformers (Wav2Vec2, HuBERT, SEW) draw one per layer, to skip layers in training, and never look at it in
eval mode.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.splitter.segment_builder import copied

_DRAWING = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like),
        *(torch.randint_like, torch.bernoulli, torch.multinomial, torch.normal, torch.poisson),
    }
)


def without_unread_numbers(gm: GraphModule) -> GraphModule:
    """A copy of `gm` that does not draw the numbers which nobody reads; `gm` itself where all are read."""
    draws = (node for node in gm.graph.nodes if node.target in _DRAWING and not node.users)
    unread = [node for node in draws if node.kwargs.get("out") is None]  # with out=, the argument is read
    if not unread:
        return gm
    graph, copies = copied(gm)
    for node in unread:
        graph.erase_node(copies[node])
    return _torch.ending_like(gm, GraphModule(gm, graph))
