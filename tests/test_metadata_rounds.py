"""Rounds of all metadata ops together, beside plain greedy decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from metadata_cases import candidate_path, random_batch, slot
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md


class ToyCache:
    """Remembers which token was written to each slot, in place of K and V."""

    def __init__(self, batch: md.Batch) -> None:
        self.batch = batch
        self.tokens = torch.full((int(batch.table.max() + 1) * batch.page_size,), -1)

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        self.tokens[slots.long()] = tokens.long()

    def read(self, b: int, length: int) -> list[int]:
        return [int(self.tokens[slot(self.batch, b, t)]) for t in range(length)]


def next_token(prefix: list[int], vocab: int = 11) -> int:
    """A greedy target whose choice depends on all that came before."""
    state = 7
    for token in prefix:
        state = (state * 31 + token * 17 + 3) % 1009
    return state % vocab


def build(batch: md.Batch, roots: Tensor, branches: md.Branches, tree: md.Tree, topk: int) -> None:
    """Chains have neither scores nor parents."""
    chosen = {} if topk == 1 else {"scores": branches.all_scores, "parents": branches.all_parents}
    md.build_tree(batch, roots, branches.all_tokens, tree, **chosen)


@pytest.mark.parametrize(("page_size", "topk"), [(1, 1), (16, 1), (1, 2), (1, 3)])
def test_rounds_write_what_plain_greedy_decoding_writes(page_size: int, topk: int) -> None:
    """Eight rounds with a draft that is right two times in three: tokens, and the cache after each commit."""
    steps, size = 3, 3
    nodes = steps + 1 if topk == 1 else 7
    generator = torch.Generator().manual_seed(topk)
    base = random_batch(7, size, page_size, room=0)
    requests = torch.tensor([2, 0, 4], dtype=torch.int32)
    lens = torch.tensor([3, 0, 5], dtype=torch.int32)
    batch = replace(base, requests=requests, seq_lens=lens)
    cache, drafted = ToyCache(batch), ToyCache(batch)
    texts: list[list[int]] = [[1, 2, 3], [], [5, 4, 3, 2, 1]]
    for b, text in enumerate(texts):
        cache.write(torch.tensor([slot(batch, b, t) for t in range(len(text))]), torch.tensor(text))
    roots = torch.tensor([next_token(t) if t else 0 for t in texts], dtype=torch.int32)
    tree = md.Tree.allocate(batch, nodes=nodes)
    out = replace(md.Accepted.allocate(batch, nodes=nodes, steps=steps), new_seq_lens=batch.seq_lens)
    for _ in range(8):
        levels = md.DraftSteps.allocate(batch, steps=steps, topk=topk)
        md.draft_steps(batch, levels)
        branches = md.Branches.allocate(batch, steps=steps, topk=topk)
        for level in range(steps):
            guesses = torch.zeros(size, 1 if level == 0 else topk, topk, dtype=torch.int64)
            for b, j in ((b, j) for b in (0, 2) for j in range(guesses.shape[1])):
                path = [] if level == 0 else candidate_path(branches, b, int(branches.candidates[b, j]))
                prefix = [*texts[b], int(roots[b]), *branches.all_tokens[b, path].tolist()]
                right = next_token(prefix)
                shift = 0 if torch.rand((), generator=generator) < 0.67 else 1
                guesses[b, j] = (right + (torch.arange(topk) + shift) % 11) % 11
            probs = (torch.rand(guesses.shape, generator=generator) + 0.1) / 2
            md.select_branches(batch.requests, level, probs, guesses, branches)
            if level < steps - 1:
                drafted.write(levels.slot_mapping[level], branches.tokens.flatten())
                for b, j in ((b, j) for b in (0, 2) for j in range(topk)):
                    path = candidate_path(branches, b, int(branches.candidates[b, j]))
                    seen = branches.mask[b, j].nonzero().flatten() + batch.seq_lens[b]
                    found = [int(drafted.tokens[slot(batch, b, int(token))]) for token in seen]
                    assert found == branches.all_tokens[b, path].tolist()
        build(batch, roots, branches, tree, topk)
        cache.write(tree.slot_mapping, tree.tokens)
        target = torch.zeros(size * nodes, dtype=torch.int64)
        for b, n in ((b, n) for b in (0, 2) for n in range(nodes)):
            seen = tree.tokens[b * nodes : (b + 1) * nodes][tree.mask[b, n]].tolist()
            target[b * nodes + n] = next_token(texts[b] + seen)
        md.accept_greedy(batch, tree.tokens, target, out, mask=None if topk == 1 else tree.mask)
        for b in (0, 2):
            emitted = out.out_tokens[b, : out.accept_length[b]].tolist()
            texts[b] += [int(roots[b]), *emitted[:-1]]
            assert cache.read(b, int(batch.seq_lens[b])) == texts[b]
            rows = slice(b * nodes, b * nodes + len(emitted))
            assert out.input_ids[rows].tolist() == emitted
            assert tree.tokens[out.hidden_index[rows].long()].tolist() == texts[b][-len(emitted) :]
        roots = out.bonus.clone()
    for text, start in ((texts[0], 3), (texts[2], 5)):
        assert len(text) > start + 8  # some drafts were accepted
        assert all(text[i] == next_token(text[:i]) for i in range(start, len(text)))
