"""Random batches, trees and drafts for the tests of metadata ops."""

from __future__ import annotations

import math

import torch
from hypothesis import settings, strategies as st
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md

CPU = torch.device("cpu")
ROUNDS = settings(max_examples=50)
SEEDS = st.integers(0, 2**31)
PAGES = {1: 48, 16: 5, 64: 3}  # page size -> pages per request


def random_batch(seed: int, size: int, page_size: int, room: int, device: torch.device = CPU) -> md.Batch:
    """Requests in any order, some padded (some with a length); `room` tokens are left in each."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # for what a test draws without a generator
    rows, pages = size + 3, PAGES[page_size]
    table = torch.randperm((rows - 1) * pages, generator=generator).view(rows - 1, pages) + 1
    table = torch.cat([torch.zeros(1, pages, dtype=torch.int64), table]).int()
    requests = (torch.randperm(rows - 1, generator=generator)[:size] + 1).int()
    padded = torch.rand(size, generator=generator) < 0.25
    lens = torch.randint(0, pages * page_size - room + 1, (size,), generator=generator).int()
    lens = torch.where(padded & (torch.rand(size, generator=generator) < 0.5), 0, lens)
    requests = torch.where(padded, 0, requests)
    return md.Batch(requests.to(device), lens.int().to(device), table.to(device), page_size)


def live_lens(batch: md.Batch) -> list[int]:
    return [int(n) if r else 0 for r, n in zip(batch.requests.tolist(), batch.seq_lens.tolist(), strict=True)]


def slot(batch: md.Batch, b: int, token: int) -> int:
    request = int(batch.requests[b])
    if request == 0 or token >= batch.table.shape[1] * batch.page_size:
        return 0  # in the null page
    page = int(batch.table[request, token // batch.page_size])
    return page * batch.page_size + token % batch.page_size


def random_parents(generator: torch.Generator, nodes: int, steps: int) -> list[int]:
    """Parent of each node of a random tree at most `steps` deep, -1 for the root, parents first."""
    parents, depth = [-1], [0]
    for _ in range(1, nodes):
        able = [n for n in range(len(parents)) if depth[n] < steps]
        parents.append(able[int(torch.randint(len(able), (), generator=generator))])
        depth.append(depth[parents[-1]] + 1)
    return parents


def ancestors(parents: list[int], node: int) -> list[int]:
    """From the root's child down to `node`."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    return path


def mask_of(parents: list[int]) -> Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, [0, *ancestors(parents, node)]] = True
    return mask


def sibling_tokens(parents: list[int], generator: torch.Generator, vocab: int) -> list[int]:
    """Random tokens, different among siblings."""
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = {tokens[m] for m in range(1, node) if parents[m] == parent}
        free = [t for t in range(vocab) if t not in taken]
        tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
    return tokens


def dyadic_probs(generator: torch.Generator, *shape: int) -> Tensor:
    """Distributions in multiples of 1/64: sums and products are exact in any order."""
    rows = math.prod(shape[:-1])
    picks = torch.randint(shape[-1], (rows, 64), generator=generator)
    counts = torch.zeros(rows, shape[-1]).scatter_add_(1, picks, torch.ones(rows, 64))
    return (counts / 64).view(*shape)


def dyadic_uniforms(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 64, shape, generator=generator) / 64


def draft(
    batch: md.Batch, steps: int, topk: int, generator: torch.Generator, vocab: int = 50
) -> tuple[md.DraftSteps, md.Branches, list[md.Branches]]:
    """A whole draft with random children, and the branches after each level. Scores often tie."""
    levels = md.DraftSteps.allocate(batch, steps=steps, topk=topk)
    md.draft_steps(batch, levels)
    branches, history = md.Branches.allocate(batch, steps=steps, topk=topk), []
    for level in range(steps):
        shape = (batch.size, topk if level else 1, topk)
        probs = torch.randint(0, 9, shape, generator=generator) / 8
        tokens = torch.rand(*shape[:-1], vocab, generator=generator).argsort(-1)[..., :topk].contiguous()
        md.select_branches(batch.requests, level, probs, tokens, branches)
        history.append(md.Branches(*(t.clone() for t in branches.args)))
    return levels, branches, history


def candidate_path(branches: md.Branches, b: int, candidate: int) -> list[int]:
    path: list[int] = []
    while candidate >= 0:
        path.insert(0, candidate)
        candidate = int(branches.all_parents[b, candidate])
    return path


def random_verify(
    seed: int, size: int, nodes: int, steps: int, vocab: int = 6
) -> tuple[md.Batch, list[list[int]], Tensor, Tensor]:
    """Batch, parents of each request's tree, tokens [B*N], mask [B, N, N]."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(seed, size, 1, room=nodes)
    trees = [random_parents(generator, nodes, steps) for _ in range(size)]
    tokens = torch.tensor([t for tree in trees for t in sibling_tokens(tree, generator, vocab)])
    return batch, trees, tokens.int(), torch.stack([mask_of(tree) for tree in trees])
