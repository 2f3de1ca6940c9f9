"""Metadata ops through their public face: what a batch and a speculative round may rely on."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md
from piecewise_graph.custom_ops.metadata.accept_reference import draw

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
        return 0  # the sink
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


@ROUNDS
@given(SEEDS, st.integers(1, 5), st.sampled_from(sorted(PAGES)))
def test_extend_rows_are_the_last_tokens_of_each_request(seed: int, size: int, page_size: int) -> None:
    batch = random_batch(seed, size, page_size, room=0)
    generator = torch.Generator().manual_seed(seed)
    lens = live_lens(batch)
    queries = [int(torch.randint(0, min(n, 9) + 1, (), generator=generator)) for n in lens]
    out = md.ExtendRows.allocate(batch, sum(queries) + 3)
    out.block_table.fill_(-7)
    md.extend_batch(batch, torch.tensor(queries, dtype=torch.int32), out)
    expected = [(b, t) for b in range(size) for t in range(lens[b] - queries[b], lens[b])]
    assert out.positions.tolist() == [t for _, t in expected] + [0] * 3
    assert out.slot_mapping.tolist() == [slot(batch, b, t) for b, t in expected] + [0] * 3
    assert out.qo_indptr.tolist() == [sum(queries[:b]) for b in range(size + 1)]
    for b in range(size):
        used = -(-lens[b] // page_size)
        row = batch.table[batch.requests[b]]
        assert out.block_table[b].tolist() == [*row[:used].tolist(), *[-7] * (PAGES[page_size] - used)]


@ROUNDS
@given(SEEDS, st.integers(1, 5), st.sampled_from(sorted(PAGES)))
def test_kv_indices_list_the_pages_of_each_request(seed: int, size: int, page_size: int) -> None:
    batch = random_batch(seed, size, page_size, room=0)
    lens = live_lens(batch)
    pages = [-(-n // page_size) for n in lens]
    out = md.PagedKV.allocate(batch, sum(pages) + 2)
    out.kv_indices.fill_(-7)
    md.kv_indices(batch, out)
    used = [p for b in range(size) for p in batch.table[batch.requests[b], : pages[b]].tolist()]
    assert out.kv_indices.tolist() == [*used, -7, -7]
    assert out.kv_indptr.tolist() == [sum(pages[:b]) for b in range(size + 1)]
    assert out.last_page_len.tolist() == [
        n - (p - 1) * page_size if n else 0 for n, p in zip(lens, pages, strict=True)
    ]


def test_pages_past_the_capacity_are_dropped() -> None:
    batch = random_batch(3, 4, 1, room=0)
    full, short = md.PagedKV.allocate(batch, 400), md.PagedKV.allocate(batch, 5)
    md.kv_indices(batch, full)
    md.kv_indices(batch, short)
    assert torch.equal(short.kv_indices, full.kv_indices[:5])
    assert torch.equal(short.kv_indptr, full.kv_indptr)


@ROUNDS
@given(SEEDS, st.integers(1, 5), st.sampled_from(sorted(PAGES)))
def test_advance_adds_the_next_token_of_live_requests(seed: int, size: int, page_size: int) -> None:
    batch = random_batch(seed, size, page_size, room=1)
    lens = live_lens(batch)
    positions, slots = batch.ints(size), batch.ints(size)
    md.advance(batch, positions, slots)
    live = [int(r != 0) for r in batch.requests]
    assert positions.tolist() == lens
    assert slots.tolist() == [slot(batch, b, lens[b]) for b in range(size)]
    assert batch.seq_lens.tolist() == [n + one for n, one in zip(lens, live, strict=True)]


def test_a_token_past_the_end_of_its_row_goes_to_the_sink() -> None:
    table = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    batch = md.Batch(torch.tensor([1], dtype=torch.int32), torch.tensor([8], dtype=torch.int32), table, 4)
    positions, slots = batch.ints(1), torch.full((1,), 9, dtype=torch.int32)
    md.advance(batch, positions, slots)
    assert (positions.item(), slots.item()) == (8, 0)


def draft(
    batch: md.Batch, steps: int, topk: int, generator: torch.Generator, vocab: int = 50
) -> tuple[md.DraftSteps, md.Branches, list[md.Branches]]:
    """A whole draft with random children, and the branches after each level. Scores often tie."""
    levels = md.DraftSteps.allocate(batch, steps=steps, topk=topk, kv_capacity=batch.size * topk * 400)
    md.draft_steps(batch, levels)
    branches, history = md.Branches.allocate(batch, steps=steps, topk=topk), []
    for level in range(steps):
        shape = (batch.size, topk) if level == 0 else (batch.size, topk, topk)
        probs = torch.randint(0, 9, shape, generator=generator) / 8
        tokens = torch.rand(*shape[:-1], vocab, generator=generator).argsort(-1)[..., :topk].contiguous()
        md.select_branches(batch, level, probs, tokens, branches, levels)
        history.append(md.Branches(*(t.clone() for t in branches.args)))
    return levels, branches, history


def candidate_path(branches: md.Branches, b: int, candidate: int) -> list[int]:
    path: list[int] = []
    while candidate >= 0:
        path.insert(0, candidate)
        candidate = int(branches.all_parents[b, candidate])
    return path


@ROUNDS
@given(SEEDS, st.integers(1, 4), st.sampled_from(sorted(PAGES)), st.integers(1, 4), st.integers(1, 3))
def test_a_branch_attends_to_the_prefix_its_ancestors_and_itself(
    seed: int, size: int, page_size: int, steps: int, topk: int
) -> None:
    batch = random_batch(seed, size, page_size, room=(steps - 1) * topk)
    levels, _, history = draft(batch, steps, topk, torch.Generator().manual_seed(seed))
    lens, live = live_lens(batch), batch.requests != 0
    for s in range(steps - 1):
        now = history[s]
        for b, j in ((b, j) for b in range(size) for j in range(topk)):
            row = b * topk + j
            assert levels.positions[s, row] == (lens[b] + s if live[b] else 0)
            own = slot(batch, b, lens[b] + s * topk + j)
            assert levels.slot_mapping[s, row] == own
            assert levels.seq_lens[s, b] == (lens[b] + (s + 1) * topk if live[b] else 0)
            # Where the path was kept in the draft region: level d of it among that level's branches.
            path = candidate_path(now, b, int(now.candidates[b, j]))
            places = [d * topk + history[d].candidates[b].tolist().index(c) for d, c in enumerate(path)]
            assert now.mask[b, j].nonzero().flatten().tolist() == places
            slots = [slot(batch, b, lens[b] + place) for place in places]
            assert now.ancestors[row].tolist() == slots + [0] * (steps - s - 1)
            begin, end = levels.kv_indptr[s, row : row + 2].tolist()
            attended = [slot(batch, b, t) for t in range(lens[b])] + slots if live[b] else []
            assert levels.kv_indices[s, begin:end].tolist() == attended


@ROUNDS
@given(SEEDS, st.integers(1, 3), st.integers(2, 4), st.integers(2, 4))
def test_branches_are_the_best_products_and_ties_go_to_the_lower_index(
    seed: int, size: int, steps: int, topk: int
) -> None:
    batch = random_batch(seed, size, 1, room=steps * topk)
    _, branches, history = draft(batch, steps, topk, torch.Generator().manual_seed(seed))
    for level in range(1, steps - 1):
        now, before = history[level], history[level - 1]
        offset = topk + (level - 1) * topk**2
        for b in range(size):
            scores = branches.all_scores[b, offset : offset + topk**2].tolist()
            best = sorted(range(topk**2), key=lambda i: (-scores[i], i))[:topk]
            assert now.candidates[b].tolist() == [offset + i for i in best]
            assert now.parents[b].tolist() == [i // topk for i in best]
            assert now.scores[b].tolist() == [scores[i] for i in best]
            rows = [b * topk + i // topk for i in best]
            assert now.hidden_index[b * topk : (b + 1) * topk].tolist() == rows
            assert now.tokens[b].tolist() == branches.all_tokens[b, now.candidates[b].long()].tolist()
            above = [before.candidates[b, i // topk].item() for i in range(topk**2)]
            assert branches.all_parents[b, offset : offset + topk**2].tolist() == above


@ROUNDS
@given(SEEDS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 100))
def test_the_tree_is_the_best_candidates_in_order(
    seed: int, size: int, steps: int, topk: int, extra: int
) -> None:
    batch = random_batch(seed, size, 1, room=30)
    _, branches, _ = draft(batch, steps, topk, torch.Generator().manual_seed(seed))
    count = branches.all_scores.shape[1]
    nodes = 1 + extra % count
    tree = md.Tree.allocate(batch, nodes=nodes)
    roots = torch.arange(size) + 100
    md.build_tree(
        batch, roots, branches.all_tokens, tree, scores=branches.all_scores, parents=branches.all_parents
    )
    lens = live_lens(batch)
    for b in range(size):
        rows = slice(b * nodes, (b + 1) * nodes)
        assert tree.retrieve_index[b].tolist() == list(range(b * nodes, (b + 1) * nodes))
        assert tree.slot_mapping[rows].tolist() == [slot(batch, b, lens[b] + n) for n in range(nodes)]
        if batch.requests[b] == 0:
            assert not tree.tokens[rows].any() and not tree.positions[rows].any() and tree.seq_lens[b] == 0
            continue
        scores = branches.all_scores[b].tolist()
        chosen = sorted(sorted(range(count), key=lambda i: (-scores[i], i))[: nodes - 1])
        above = [int(branches.all_parents[b, c]) for c in chosen]
        parents = [-1, *(0 if c < 0 else chosen.index(c) + 1 for c in above)]  # closed: no ValueError
        assert tree.tokens[rows].tolist() == [roots[b], *branches.all_tokens[b, chosen].tolist()]
        assert torch.equal(tree.mask[b], mask_of(parents))
        depth = [len(ancestors(parents, n)) for n in range(nodes)]
        assert tree.positions[rows].tolist() == [lens[b] + d for d in depth]
        for n in range(nodes):
            assert children(tree, b, n) == [m for m in range(1, nodes) if parents[m] == n]
        assert tree.seq_lens[b] == lens[b] + nodes
    assert tree.qo_indptr.tolist() == [b * nodes for b in range(size + 1)]


def children(tree: md.Tree, b: int, node: int) -> list[int]:
    found, child = [], int(tree.next_token[b, node])
    while child >= 0:
        found.append(child)
        child = int(tree.next_sibling[b, child])
    return found


@pytest.mark.parametrize("page_size", sorted(PAGES))
def test_a_chain_is_the_tree_of_its_candidates(page_size: int) -> None:
    batch, steps = random_batch(1, 4, page_size, room=6), 5
    tokens = torch.arange(20, dtype=torch.int32).view(4, steps)
    scores = torch.rand(4, steps).cumprod(1)
    parents = (torch.arange(steps, dtype=torch.int32) - 1).expand(4, -1).contiguous()
    chain, tree = (md.Tree.allocate(batch, nodes=steps + 1) for _ in range(2))
    md.build_tree(batch, batch.ints(4), tokens, chain)
    md.build_tree(batch, batch.ints(4), tokens, tree, scores=scores, parents=parents)
    for b in range(4):
        if batch.requests[b]:
            rows = slice(b * (steps + 1), (b + 1) * (steps + 1))
            assert torch.equal(chain.mask[b], tree.mask[b])
            assert torch.equal(chain.next_token[b], tree.next_token[b])
            assert torch.equal(chain.tokens[rows], tree.tokens[rows])
            assert torch.equal(chain.positions[rows], tree.positions[rows])


def random_verify(
    seed: int, size: int, nodes: int, steps: int, vocab: int = 6
) -> tuple[md.Batch, list[list[int]], Tensor, Tensor]:
    """Batch, parents of each request's tree, tokens [B*N], mask [B, N, N]."""
    generator = torch.Generator().manual_seed(seed)
    batch = random_batch(seed, size, 1, room=nodes)
    trees = [random_parents(generator, nodes, steps) for _ in range(size)]
    tokens = torch.tensor([t for tree in trees for t in sibling_tokens(tree, generator, vocab)])
    return batch, trees, tokens.int(), torch.stack([mask_of(tree) for tree in trees])


def check_commit(
    batch: md.Batch, before: Tensor, tokens: Tensor, out: md.Accepted, paths: list[list[int]]
) -> None:
    """Everything in `out` but the bonus follows from the accepted paths (root included)."""
    size, longest = out.accept_index.shape
    nodes, lens = tokens.numel() // size, live_lens(batch)
    for b, path in enumerate(paths):
        live = int(batch.requests[b]) != 0
        path = path if live else []
        count, first, rows = len(path), b * nodes, slice(b * nodes, (b + 1) * nodes)
        bonus = [int(out.bonus[b])] if live else []
        emitted = [int(tokens[first + n]) for n in path[1:]] + bonus
        assert out.accept_index[b].tolist() == [first + n for n in path] + [-1] * (longest - count)
        assert out.out_tokens[b].tolist() == emitted + [-1] * (longest - count)
        assert (out.accept_len[b], out.new_seq_lens[b]) == (count, lens[b] + count)
        assert out.select_index[b] == first + max(count - 1, 0)
        assert out.input_ids[rows].tolist() == emitted + [0] * (nodes - count)
        hidden = [first + n for n in path] + [first + r for r in range(count, nodes)]
        assert out.hidden_index[rows].tolist() == hidden
        assert out.positions[rows].tolist() == [lens[b] + r if live else 0 for r in range(nodes)]
        assert out.slot_mapping[rows].tolist() == [slot(batch, b, lens[b] + r) for r in range(nodes)]
        if batch.page_size == 1:
            row, old = batch.table[batch.requests[b]], before[batch.requests[b]]
            order = path + [n for n in range(nodes) if n not in path] if live else range(nodes)
            assert row[lens[b] : lens[b] + nodes].tolist() == [int(old[lens[b] + n]) for n in order]
    assert torch.equal(batch.table.sort(1).values, before.sort(1).values)  # no slot lost or doubled
    used = batch.requests[batch.requests != 0].long()
    others = [r for r in range(before.shape[0]) if r not in used.tolist()]
    assert torch.equal(batch.table[others], before[others])


@ROUNDS
@given(SEEDS, st.integers(1, 4), st.integers(1, 9), st.integers(1, 4))
def test_greedy_acceptance_follows_the_targets_choice(seed: int, size: int, nodes: int, steps: int) -> None:
    batch, trees, tokens, mask = random_verify(seed, size, nodes, steps, vocab=9)
    target = torch.randint(0, 3, (size * nodes,), generator=torch.Generator().manual_seed(seed))
    out, before = md.Accepted.allocate(batch, nodes=nodes, steps=steps), batch.table.clone()
    md.accept_greedy(batch, tokens, target, out, mask=mask)
    paths = []
    for b, parents in enumerate(trees):
        path = [0]
        while True:
            want = target[b * nodes + path[-1]]
            hits = [n for n in range(1, nodes) if parents[n] == path[-1] and tokens[b * nodes + n] == want]
            if not hits:
                break
            path.append(hits[0])
        paths.append(path)
        assert out.bonus[b] == (target[b * nodes + path[-1]] if batch.requests[b] else 0)
    check_commit(batch, before, tokens, out, paths)


@ROUNDS
@given(SEEDS, st.integers(1, 4), st.integers(1, 9), st.integers(1, 4))
def test_tree_sampling_tries_children_in_order(seed: int, size: int, nodes: int, steps: int) -> None:
    vocab = 9
    batch, trees, tokens, mask = random_verify(seed, size, nodes, steps, vocab)
    generator = torch.Generator().manual_seed(seed)
    probs = dyadic_probs(generator, size, nodes, vocab)
    uniforms = dyadic_uniforms(generator, size, nodes)
    out, before = md.Accepted.allocate(batch, nodes=nodes, steps=steps), batch.table.clone()
    md.accept_tree(batch, tokens, probs, uniforms, out, mask=mask)
    paths = []
    for b, parents in enumerate(trees):
        path, moved = [0], True
        while moved:
            moved, left = False, probs[b, path[-1]].clone()
            for child in [n for n in range(1, nodes) if parents[n] == path[-1]]:
                token = tokens[b * nodes + child].long()
                if uniforms[b, child] * left.sum() < left[token]:
                    path, moved = [*path, child], True
                    break
                left[token] = 0
        paths.append(path)
        if batch.requests[b]:
            goal = uniforms[b, 0] * left.sum()
            assert out.bonus[b] == int((left.cumsum(0) > goal).int().argmax())
    check_commit(batch, before, tokens, out, paths)


@ROUNDS
@given(SEEDS, st.integers(1, 4), st.integers(1, 6), st.sampled_from(sorted(PAGES)))
def test_chain_sampling_accepts_by_the_ratio(seed: int, size: int, steps: int, page_size: int) -> None:
    vocab, nodes = 7, steps + 1
    batch = random_batch(seed, size, page_size, room=nodes)
    generator = torch.Generator().manual_seed(seed)
    p, q = dyadic_probs(generator, size, nodes, vocab), dyadic_probs(generator, size, steps, vocab)
    tokens = torch.randint(0, vocab, (size, nodes), generator=generator).int()
    uniforms = dyadic_uniforms(generator, size, nodes)
    out, before = md.Accepted.allocate(batch, nodes=nodes, steps=steps), batch.table.clone()
    md.accept_chain(batch, tokens.flatten(), p, q, uniforms, out)
    paths = []
    for b in range(size):
        path = [0]
        while len(path) < nodes:
            i = len(path)
            if not uniforms[b, i] * q[b, i - 1, tokens[b, i]] < p[b, i - 1, tokens[b, i]]:
                break
            path.append(i)
        paths.append(path)
        tip = path[-1]
        left = p[b, tip] if tip == steps else (p[b, tip] - q[b, tip]).clamp(min=0)
        left = left if left.sum() > 0 else p[b, tip]
        if batch.requests[b]:
            assert out.bonus[b] == int((left.cumsum(0) > uniforms[b, 0] * left.sum()).int().argmax())
    check_commit(batch, before, tokens.flatten(), out, paths)
    assert torch.equal(batch.table, before)


def total_variation(samples: Tensor, truth: Tensor) -> tuple[float, float]:
    """Distance of samples from `truth [cells]`, and what noise exceeds once in a million runs."""
    n = samples.numel()
    found = torch.bincount(samples, minlength=truth.numel()) / n
    mean = 0.5 * (2 * truth * (1 - truth) / (math.pi * n)).sqrt().sum().item()
    return 0.5 * (found - truth).abs().sum().item(), mean + math.sqrt(math.log(1e6) / (2 * n))


def plain_batch(size: int, room: int) -> md.Batch:
    requests = torch.arange(1, size + 1, dtype=torch.int32)
    table = torch.arange((size + 1) * room, dtype=torch.int32).view(size + 1, room)
    return md.Batch(requests, torch.zeros(size, dtype=torch.int32), table, 1)


def pair_samples(out: md.Accepted, target: Tensor) -> Tensor:
    """First two tokens of every request as one number; a second that is missing comes from the target."""
    first = out.out_tokens[:, 0].long()
    second = torch.multinomial(target[first], 1)[:, 0]
    if out.out_tokens.shape[1] > 1:
        second = torch.where(out.accept_len > 1, out.out_tokens[:, 1].long(), second)
    return first * target.shape[0] + second


@pytest.fixture
def markov() -> tuple[Tensor, Tensor]:
    """Next-token distributions of a target and of a draft that is far from it, `[V, V]`."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 5, 5, generator=generator) * 1.5
    target, draft = logits.softmax(-1)
    return target, draft


def test_sampled_chains_have_the_targets_distribution(markov: tuple[Tensor, Tensor]) -> None:
    target, draft = markov
    size, steps, root = 30_000, 3, 2
    tokens = torch.full((size, 1), root)
    for _ in range(steps):
        tokens = torch.cat([tokens, torch.multinomial(draft[tokens[:, -1]], 1)], 1)
    batch = plain_batch(size, steps + 1)
    out = md.Accepted.allocate(batch, nodes=steps + 1, steps=steps)
    flat = tokens.int().flatten()
    md.accept_chain(batch, flat, target[tokens], draft[tokens[:, :-1]], torch.rand(size, steps + 1), out)
    distance, noise = total_variation(pair_samples(out, target), (target[root][:, None] * target).flatten())
    assert distance < noise
    assert 1.2 < out.accept_len.float().mean() < steps  # the test tests something
    uncorrected = torch.bincount(tokens[:, 1], minlength=5) / size
    assert 0.5 * (uncorrected - target[root]).abs().sum() > 3 * noise


@pytest.mark.parametrize("nodes", [1, 3, 7])
def test_sampled_trees_have_the_targets_distribution(markov: tuple[Tensor, Tensor], nodes: int) -> None:
    target, draft = markov
    size, root = 30_000, 2
    parents = [-1, 0, 0, 1, 1, 2, 0][:nodes]
    tokens = [root]
    for node in range(1, nodes):  # the draft's best children that are not yet taken
        taken = [tokens[m] for m in range(1, node) if parents[m] == parents[node]]
        best = draft[tokens[parents[node]]].argsort(descending=True).tolist()
        tokens.append(next(t for t in best if t not in taken))
    batch = plain_batch(size, nodes)
    out = md.Accepted.allocate(batch, nodes=nodes, steps=2)
    flat = torch.tensor(tokens).repeat(size)
    probs = target[flat].view(size, nodes, -1)
    mask = mask_of(parents).repeat(size, 1, 1)
    md.accept_tree(batch, flat.int(), probs, torch.rand(size, nodes), out, mask=mask)
    distance, noise = total_variation(pair_samples(out, target), (target[root][:, None] * target).flatten())
    assert distance < noise


def test_a_draft_that_is_the_target_is_always_accepted(markov: tuple[Tensor, Tensor]) -> None:
    target, _ = markov
    size, steps = 500, 4
    tokens = torch.randint(0, 5, (size, steps + 1))
    batch = plain_batch(size, steps + 1)
    out = md.Accepted.allocate(batch, nodes=steps + 1, steps=steps)
    uniforms = torch.rand(size, steps + 1)
    md.accept_chain(
        batch, tokens.int().flatten(), target[tokens], target[tokens[:, :-1]].clone(), uniforms, out
    )
    assert (out.accept_len == steps + 1).all()


def test_drawing_never_picks_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-24])
    assert draw(weights, weights, uniform).tolist() == [1, 3, 3]
    assert draw(torch.zeros(1, 5), weights[:1], uniform[:1]).tolist() == [1]


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
            shaped = (guesses[:, 0], probs[:, 0]) if level == 0 else (guesses, probs)
            ids, p = (x.contiguous() for x in shaped)
            md.select_branches(batch, level, p, ids, branches, levels)
            if level < steps - 1:
                drafted.write(levels.slot_mapping[level], branches.tokens.flatten())
                for b, j in ((b, j) for b in (0, 2) for j in range(topk)):
                    path = candidate_path(branches, b, int(branches.candidates[b, j]))
                    seen = branches.ancestors[b * topk + j, : level + 1].long()
                    assert drafted.tokens[seen].tolist() == branches.all_tokens[b, path].tolist()
        if topk == 1:
            md.build_tree(batch, roots, branches.all_tokens, tree)
        else:
            md.build_tree(
                batch, roots, branches.all_tokens, tree,
                scores=branches.all_scores, parents=branches.all_parents,
            )  # fmt: skip
        cache.write(tree.slot_mapping, tree.tokens)
        target = torch.zeros(size * nodes, dtype=torch.int64)
        for b, n in ((b, n) for b in (0, 2) for n in range(nodes)):
            seen = tree.tokens[b * nodes : (b + 1) * nodes][tree.mask[b, n]].tolist()
            target[b * nodes + n] = next_token(texts[b] + seen)
        md.accept_greedy(batch, tree.tokens, target, out, mask=None if topk == 1 else tree.mask)
        for b in (0, 2):
            emitted = out.out_tokens[b, : out.accept_len[b]].tolist()
            texts[b] += [int(roots[b]), *emitted[:-1]]
            assert cache.read(b, int(batch.seq_lens[b])) == texts[b]
            rows = slice(b * nodes, b * nodes + len(emitted))
            assert out.input_ids[rows].tolist() == emitted
            assert tree.tokens[out.hidden_index[rows].long()].tolist() == texts[b][-len(emitted) :]
        roots = out.bonus.clone()
    for text, start in ((texts[0], 3), (texts[2], 5)):
        assert len(text) > start + 8  # some drafts were accepted
        assert all(text[i] == next_token(text[:i]) for i in range(start, len(text)))


def arguments() -> dict[md.MetadataOp, tuple]:
    """One valid call of every op."""
    batch = random_batch(2, 3, 1, room=8)
    generator = torch.Generator().manual_seed(0)
    tree, steps = (
        md.Tree.allocate(batch, nodes=4),
        md.DraftSteps.allocate(batch, steps=3, topk=2, kv_capacity=900),
    )
    accepted, branches = (
        md.Accepted.allocate(batch, nodes=4, steps=3),
        md.Branches.allocate(batch, steps=3, topk=2),
    )
    ids, mask = batch.ints(12), mask_of([-1, 0, 1, 2]).repeat(3, 1, 1)
    p, q = dyadic_probs(generator, 3, 4, 5), dyadic_probs(generator, 3, 3, 5)
    u = dyadic_uniforms(generator, 3, 4)
    scores, tokens = torch.rand(3, 10), batch.ints(3, 10)
    return {
        md.extend_batch: md.extend_batch.flatten(batch, batch.ints(3), md.ExtendRows.allocate(batch, 9)),
        md.kv_indices: md.kv_indices.flatten(batch, md.PagedKV.allocate(batch, 200)),
        md.advance: md.advance.flatten(batch, batch.ints(3), batch.ints(3)),
        md.draft_steps: md.draft_steps.flatten(batch, steps),
        md.select_branches: md.select_branches.flatten(
            batch, 1, torch.rand(3, 2, 2), torch.ones(3, 2, 2, dtype=torch.int64), branches, steps
        ),
        md.build_tree: md.build_tree.flatten(
            batch, batch.ints(3), tokens, tree, scores=scores, parents=tokens - 1
        ),
        md.accept_greedy: md.accept_greedy.flatten(batch, ids, ids, accepted, mask=mask),
        md.accept_chain: md.accept_chain.flatten(batch, ids, p, q, u, accepted),
        md.accept_tree: md.accept_tree.flatten(batch, ids, p, u, accepted, mask=mask),
    }


OPS = sorted(arguments(), key=lambda op: op.name)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_opcheck(op: md.MetadataOp) -> None:
    torch.library.opcheck(getattr(torch.ops.piecewise, op.name).default, arguments()[op])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_tensor_is_checked(op: md.MetadataOp) -> None:
    """A wrong dtype, size or stride of any argument is an error that names it, and nothing is written."""
    run, flat = getattr(torch.ops.piecewise, op.name), arguments()[op]
    before = [x.clone() if isinstance(x, Tensor) else x for x in flat]
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            for wrong in (
                value.to(torch.float64),
                value[..., None],
                value.repeat_interleave(2, -1)[..., ::2],
            ):
                with pytest.raises(md.MetadataError, match=op.name):
                    run(*flat[:place], wrong, *flat[place + 1 :])
    assert all(torch.equal(x, y) for x, y in zip(flat, before, strict=True) if isinstance(x, Tensor))


def test_errors_say_what_to_do() -> None:
    batch = random_batch(2, 3, 16, room=8)
    out = md.Accepted.allocate(batch, nodes=4, steps=3)
    mask = torch.ones(3, 4, 4, dtype=torch.bool)
    with pytest.raises(md.MetadataError, match="page size of 16") as info:
        md.accept_greedy(batch, batch.ints(12), batch.ints(12), out, mask=mask)
    assert "page size of 1" in info.value.remedy
    with pytest.raises(md.MetadataError, match="a root and 2 draft tokens"):
        md.build_tree(batch, batch.ints(3), batch.ints(3, 2), md.Tree.allocate(batch, nodes=4))
    with pytest.raises(md.MetadataError, match=r"level 2 of 2 steps"):
        branches = md.Branches.allocate(batch, steps=2, topk=2)
        levels = md.DraftSteps.allocate(batch, steps=2, topk=2)
        md.select_branches(batch, 2, torch.ones(3, 2, 2), batch.ints(3, 2, 2), branches, levels)
    with pytest.raises(md.MetadataError, match="requests is empty"):
        md.kv_indices(replace(batch, requests=batch.requests[:0]), md.PagedKV.allocate(batch, 4))


def test_a_bound_call_repeats_the_op() -> None:
    batch = random_batch(4, 3, 1, room=8)
    positions, slots = batch.ints(3), batch.ints(3)
    start, live = batch.seq_lens.clone(), (batch.requests != 0).int()
    launch = md.advance.bind(batch, positions, slots)
    launch()
    launch()
    assert torch.equal(batch.seq_lens, (start + 2) * live)


def test_ops_can_be_compiled_into_a_graph() -> None:
    batch = random_batch(4, 3, 1, room=8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(requests: Tensor, lens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        positions, slots = torch.empty_like(lens), torch.empty_like(lens)
        torch.ops.piecewise.advance(requests, lens, table, 1, positions, slots)
        return positions, slots + 0

    eager = batch.seq_lens.clone()
    positions, slots = batch.ints(3), batch.ints(3)
    md.advance(replace(batch, seq_lens=eager), positions, slots)
    found = step(batch.requests, batch.seq_lens, batch.table)
    assert torch.equal(found[0], positions) and torch.equal(found[1], slots)
    assert torch.equal(batch.seq_lens, eager)


def test_importing_the_ops_loads_no_triton() -> None:
    code = "import piecewise_graph.custom_ops.metadata, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
