"""What the ops of batches and drafts promise: rows, branches, trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from metadata_cases import (
    CPU,
    PAGES,
    ROUNDS,
    SEEDS,
    ancestors,
    candidate_path,
    draft,
    live_lens,
    mask_of,
    random_batch,
    slot,
)

from piecewise_graph.custom_ops import metadata as md


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
@given(SEEDS, st.integers(1, 5), st.integers(1, 5))
def test_a_round_begins_where_the_one_before_left_each_request(seed: int, size: int, nodes: int) -> None:
    batch = random_batch(seed, size, 16, room=nodes)
    matrix = torch.randint(0, 99, (len(batch.table), 4)).int()
    matrix[batch.requests.long(), 2] = batch.seq_lens
    matrix[0] = 0
    state, before = md.RequestState(matrix[:, 2], matrix[:, 0]), matrix.clone()
    found = md.Gathered.zeros(CPU, B=size, P=batch.table.shape[1])
    for bonus in (5, 7):
        md.gather_requests(batch.requests, batch.table, state, found)
        for b, request in enumerate(batch.requests.tolist()):
            kept = found.seq_lens[b], found.root_tokens[b]
            assert kept == (matrix[request, 2], matrix[request, 0])
            assert found.block_table[b].tolist() == batch.table[request].tolist()
        accepted = md.Accepted.allocate(batch, nodes=nodes, steps=nodes - 1)
        tokens, result = torch.randint(0, 2, (size * nodes,)).int(), batch.ints(size, nodes + 1)
        now = replace(batch, seq_lens=found.seq_lens)
        md.accept_greedy(now, tokens, torch.full_like(tokens, bonus), accepted)
        md.scatter_accepted(batch.requests, accepted, result, state)
        for row in result[batch.requests != 0].tolist():
            assert row == [bonus, *[-1] * (nodes - 1), 1]
        live = batch.requests[batch.requests != 0].long()
        before[live, 2] += 1
        before[live, 0] = bonus
        assert torch.equal(matrix, before)


def test_a_token_past_the_end_of_its_row_has_slot_0() -> None:
    table = torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
    batch = md.Batch(torch.tensor([1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), table, 4)
    out = md.ExtendRows.allocate(batch, 1)
    out.slot_mapping.fill_(9)
    md.extend_batch(batch, torch.tensor([1], dtype=torch.int32), out)
    assert (out.positions.item(), out.slot_mapping.item()) == (8, 0)


@ROUNDS
@given(SEEDS, st.integers(1, 4), st.sampled_from(sorted(PAGES)), st.integers(1, 4), st.integers(1, 3))
def test_a_branch_attends_to_its_ancestors_and_itself(
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
    listed = {"scores": branches.all_scores, "parents": branches.all_parents}
    md.build_tree(batch, roots, branches.all_tokens, tree, **listed, max_position=20)
    lens = live_lens(batch)
    for b in range(size):
        rows = slice(b * nodes, (b + 1) * nodes)
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
        assert tree.positions[rows].tolist() == [min(lens[b] + d, 20) for d in depth]
        assert tree.seq_lens[b] == lens[b] + nodes
    assert tree.qo_indptr.tolist() == [b * nodes for b in range(size + 1)]


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
            assert torch.equal(chain.tokens[rows], tree.tokens[rows])
            assert torch.equal(chain.positions[rows], tree.positions[rows])
