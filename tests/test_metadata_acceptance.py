"""What a round accepts, and what its commit leaves behind."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from metadata_cases import (
    PAGES,
    ROUNDS,
    SEEDS,
    dyadic_probs,
    dyadic_uniforms,
    live_lens,
    mask_of,
    random_batch,
    random_verify,
    slot,
)
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md
from piecewise_graph.custom_ops.metadata.accept_ops import draw


def check_commit(
    batch: md.Batch, before: Tensor, tokens: Tensor, out: md.Accepted, paths: list[list[int]]
) -> None:
    """Everything in `out` but the bonus follows from the accepted paths (root included)."""
    size, longest = out.out_tokens.shape
    nodes, lens = tokens.numel() // size, live_lens(batch)
    for b, path in enumerate(paths):
        live = int(batch.requests[b]) != 0
        path = path if live else []
        count, first, rows = len(path), b * nodes, slice(b * nodes, (b + 1) * nodes)
        bonus = [int(out.bonus[b])] if live else []
        emitted = [int(tokens[first + n]) for n in path[1:]] + bonus
        assert out.out_tokens[b].tolist() == emitted + [-1] * (longest - count)
        assert (out.accept_length[b], out.new_seq_lens[b]) == (count, lens[b] + count)
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
        second = torch.where(out.accept_length > 1, out.out_tokens[:, 1].long(), second)
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
    assert 1.2 < out.accept_length.float().mean() < steps  # the test tests something
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
    assert (out.accept_length == steps + 1).all()


def test_drawing_never_picks_a_token_without_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(3, -1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-24])
    assert draw(weights, weights, uniform).tolist() == [1, 3, 3]
    assert draw(torch.zeros(1, 5), weights[:1], uniform[:1]).tolist() == [1]
