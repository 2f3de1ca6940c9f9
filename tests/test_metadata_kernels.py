"""The Triton kernels against the torch reference: compiled on a GPU, in Triton's interpreter without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from metadata_cases import (
    PAGES,
    SEEDS,
    dyadic_probs,
    dyadic_uniforms,
    random_batch,
    random_verify,
)
from torch import Tensor, nn

from piecewise_graph.custom_ops import metadata as md

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EXAMPLES = settings(max_examples=15 if INTERPRETED else 60)
SIZES, PAGE_SIZES = st.integers(1, 6), st.sampled_from(sorted(PAGES))


@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def copies(flat: tuple, device: torch.device) -> tuple:
    return tuple(x.to(device, copy=True) if isinstance(x, Tensor) else x for x in flat)


def agree(op: md.MetadataOp, *args: object, **kwargs: object) -> None:
    """Kernel and reference leave the same in every tensor; then the arguments get the results.

    Outputs start as garbage (whatever the caller left in them), so that untouched entries show.
    """
    flat = op.flatten(*args, **kwargs)
    ours, expected = copies(flat, DEVICE), copies(flat, torch.device("cpu"))
    op.kernel(ours)()
    getattr(torch.ops.piecewise, op.name)(*expected)
    for place, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        if isinstance(theirs, Tensor):
            assert torch.equal(mine.cpu(), theirs), f"argument {place} of {op.name}:\n{mine}\n{theirs}"
    for given_value, value in zip(flat, expected, strict=True):
        if isinstance(value, Tensor):
            given_value.copy_(value)


def kernel_alone(op: md.MetadataOp, *args: object, **kwargs: object) -> None:
    """The kernel on the device; then the arguments get the results."""
    flat = op.flatten(*args, **kwargs)
    ours = copies(flat, DEVICE)
    op.kernel(ours)()
    for given_value, value in zip(flat, ours, strict=True):
        if isinstance(value, Tensor):
            given_value.copy_(value)


def garbage(bundle: object) -> object:
    for tensor in bundle.args:
        if isinstance(tensor, Tensor):
            tensor.copy_(torch.randint(0, 2, tensor.shape) if tensor.dtype == torch.bool else tensor - 9)
    return bundle


class TestKernels:
    pytestmark = needs_kernels

    @EXAMPLES
    @given(SEEDS, SIZES, PAGE_SIZES, st.integers(0, 20))
    def test_extend_batch(self, seed: int, size: int, page_size: int, spare: int) -> None:
        batch = random_batch(seed, size, page_size, room=0)
        queries = torch.minimum(batch.seq_lens, torch.randint(0, 12, (size,))).int()
        rows = max(int(queries.sum()) + spare - 5, 1)  # rows that do not fit are dropped
        out = garbage(md.ExtendRows.allocate(batch, rows))
        agree(md.extend_batch, batch, queries, out)
        narrow = replace(out, block_table=out.block_table[:, :2].contiguous())
        agree(md.extend_batch, batch, queries, narrow)

    @EXAMPLES
    @given(SEEDS, SIZES, PAGE_SIZES, st.integers(1, 6), st.sampled_from([1, 2, 5, 2049]))
    def test_requests_are_gathered_and_scattered(
        self, seed: int, size: int, page_size: int, nodes: int, more_pages: int
    ) -> None:
        """State may be columns of a matrix, of which nothing else changes."""
        batch = random_batch(seed, size, page_size, room=nodes)
        table = nn.functional.pad(batch.table, (0, more_pages))
        accepted = md.Accepted.allocate(batch, nodes=nodes, steps=nodes - 1)
        md.accept_greedy(batch, *torch.randint(0, 3, (2, size * nodes)).int(), accepted)
        matrix, results = torch.randint(0, 99, (len(table), 5)).int(), []
        for device in (DEVICE, torch.device("cpu")):
            given_to = [tensor.to(device, copy=True) for tensor in (batch.requests, table, matrix)]
            requests, pages, columns = given_to
            state = md.RequestState(columns[:, 1], columns[:, 3])
            gathered = garbage(md.Gathered.zeros(device, B=size, P=table.shape[1]))
            found = md.Accepted(*(tensor.to(device) for tensor in accepted.args))
            result = torch.empty(size, nodes + 1, dtype=torch.int32, device=device)
            calls = {
                md.gather_requests: (requests, pages, state, gathered),
                md.scatter_accepted: (requests, found, result, state),
            }
            for op, arguments in calls.items():
                op.kernel(op.flatten(*arguments))() if device == DEVICE else op(*arguments)
            results.append([tensor.cpu() for tensor in (*gathered.args, result, *given_to)])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))

    @EXAMPLES
    @given(SEEDS, st.integers(1, 4), PAGE_SIZES, st.integers(1, 5), st.integers(1, 5))
    def test_a_whole_draft_and_its_tree(
        self, seed: int, size: int, page_size: int, steps: int, topk: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = random_batch(seed, size, page_size, room=seed % 30)  # too little room at times
        levels = garbage(md.DraftSteps.allocate(batch, steps=steps, topk=topk))
        agree(md.draft_steps, batch, levels)
        branches = garbage(md.Branches.allocate(batch, steps=steps, topk=topk))
        for level in range(steps):
            shape = (size, topk if level else 1, topk)
            probs = torch.randint(0, 9, shape, generator=generator) / 8
            tokens = torch.randint(0, 99, shape, generator=generator)
            tokens = tokens.int() if seed % 2 else tokens
            agree(md.select_branches, batch.requests, level, probs, tokens, branches)
        count = branches.all_scores.shape[1]
        nodes = 1 + int(torch.randint(0, min(count, 40) + 1, (), generator=generator))
        tree, roots = garbage(md.Tree.allocate(batch, nodes=nodes)), torch.randint(0, 99, (size,))
        listed = {"scores": branches.all_scores, "parents": branches.all_parents}
        agree(md.build_tree, batch, roots, branches.all_tokens, tree, **listed)

    @EXAMPLES
    @given(SEEDS, SIZES, PAGE_SIZES, st.integers(1, 33))
    def test_build_chain(self, seed: int, size: int, page_size: int, nodes: int) -> None:
        batch = random_batch(seed, size, page_size, room=0)
        tokens, roots = torch.randint(0, 99, (size, nodes - 1)), batch.ints(size) + 5
        tree = garbage(md.Tree.allocate(batch, nodes=nodes))
        agree(md.build_tree, batch, roots, tokens, tree)
        agree(md.build_tree, batch, roots, tokens, tree, max_position=seed % 50)

    @EXAMPLES
    @given(SEEDS, st.integers(1, 4), st.integers(1, 34), st.integers(1, 7), st.booleans())
    def test_accept_a_tree(self, seed: int, size: int, nodes: int, steps: int, greedy: bool) -> None:
        vocab = 41
        batch, _, tokens, mask = random_verify(seed, size, nodes, steps, vocab)
        batch = replace(batch, seq_lens=batch.seq_lens + seed % 3)  # too little room at times
        batch.table[:, batch.table.shape[1] - seed % 5 :] = 0  # and too few pages
        out = garbage(md.Accepted.allocate(batch, nodes=nodes, steps=steps))
        if greedy:
            # A choice that is mostly some child's token.
            target = tokens[torch.randint(0, size * nodes, (size * nodes,))]
            target = target.long() if seed % 2 else target
            agree(md.accept_greedy, batch, tokens, target, out, mask=mask)
        else:
            generator = torch.Generator().manual_seed(seed)
            probs = dyadic_probs(generator, size, nodes, vocab)
            uniforms = dyadic_uniforms(generator, size, nodes) * (seed % 2 or 0.25)
            agree(md.accept_tree, batch, tokens, probs, uniforms, out, mask=mask)

    @EXAMPLES
    @given(
        SEEDS, st.integers(1, 4), PAGE_SIZES, st.integers(1, 20), st.sampled_from(["greedy", "ratio", "mass"])
    )
    def test_accept_a_chain(self, seed: int, size: int, page_size: int, steps: int, rule: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        vocab, nodes = 1 + seed % 300, steps + 1
        batch = random_batch(seed, size, page_size, room=seed % 40)
        tokens = torch.randint(0, vocab, (size * nodes,), generator=generator).int()
        out = garbage(md.Accepted.allocate(batch, nodes=nodes, steps=steps))
        if rule == "greedy":
            target = tokens.roll(-1)
            wrong = torch.rand(target.shape, generator=generator) < 0.2
            agree(md.accept_greedy, batch, tokens, torch.where(wrong, target + 1, target), out)
            return
        p, q = dyadic_probs(generator, size, nodes, vocab), dyadic_probs(generator, size, steps, vocab)
        if seed % 3 == 0:
            q = p[:, :-1].clone()
        uniforms = dyadic_uniforms(generator, size, nodes)
        if rule == "ratio":
            agree(md.accept_chain, batch, tokens, p, q, uniforms, out)
        else:
            agree(md.accept_tree, batch, tokens, p, uniforms / 8, out)

    @pytest.mark.parametrize("rule", ["ratio", "mass", "tree"])
    def test_a_vocabulary_of_several_blocks(self, rule: str) -> None:
        size, nodes, vocab = 3, 4, 20_000
        generator = torch.Generator().manual_seed(1)
        batch, _, tokens, mask = random_verify(1, size, nodes, 3, vocab)
        p, q = dyadic_probs(generator, size, nodes, vocab), dyadic_probs(generator, size, nodes - 1, vocab)
        tokens = p.view(-1, vocab).argmax(1).int() if rule == "tree" else tokens
        out = md.Accepted.allocate(batch, nodes=nodes, steps=3)
        for _ in range(4):
            uniforms = dyadic_uniforms(generator, size, nodes)
            if rule == "ratio":
                agree(md.accept_chain, batch, tokens, p, q, uniforms, out)
            else:
                agree(md.accept_tree, batch, tokens, p, uniforms, out, mask=mask if rule == "tree" else None)

    def test_a_row_without_weights_draws_from_the_target(self) -> None:
        """max(p - q, 0) is 0 everywhere, though the draft was refused: only rounding does that."""
        batch = random_batch(5, 2, 1, room=3)
        tokens = torch.zeros(4, dtype=torch.int32)
        p = torch.tensor([0.0, 0.5, 0.25]).expand(2, 2, 3).contiguous()
        q = torch.tensor([0.5, 0.5, 0.5]).expand(2, 1, 3).contiguous()
        out = md.Accepted.allocate(batch, nodes=2, steps=1)
        agree(md.accept_chain, batch, tokens, p, q, torch.full((2, 2), 0.75), out)

    @pytest.mark.parametrize("rule", ["ratio", "mass"])
    def test_the_largest_uniform_draws_a_token_that_has_weight(self, rule: str) -> None:
        """uniform * total, and sums in another order, may round up beyond every cumulated weight."""
        size, vocab = 24, 70_000  # nine blocks
        generator = torch.Generator().manual_seed(3)
        batch = random_batch(3, size, 1, room=3)
        batch = replace(batch, requests=torch.arange(1, size + 1, dtype=torch.int32) % len(batch.table))
        p = (torch.randn(size, 2, vocab, generator=generator) * 2).softmax(-1)
        p[:, :, vocab // 2 :] = 0  # whole blocks without weight at the end
        q, tokens = p[:, :1] * 0.999, torch.zeros(size * 2, dtype=torch.int32)
        uniforms = torch.full((size, 2), 1 - 2**-24)
        out = md.Accepted.allocate(batch, nodes=2, steps=1)
        if rule == "ratio":
            kernel_alone(md.accept_chain, batch, tokens, p, q, uniforms, out)
        else:
            kernel_alone(md.accept_tree, batch, tokens, p, uniforms, out)
        drawn = out.bonus[batch.requests != 0]
        assert bool(((drawn >= 0) & (drawn < vocab // 2)).all())

    @pytest.mark.parametrize("token", [-1, 7, 8])
    @pytest.mark.parametrize("rule", ["ratio", "mass"])
    def test_a_draft_outside_of_the_vocabulary_is_refused(self, rule: str, token: int) -> None:
        batch = random_batch(2, 3, 1, room=3)
        tokens = torch.tensor([0, token] * 3, dtype=torch.int32)
        p, uniforms = torch.full((3, 2, 7), 1 / 7), torch.zeros(3, 2)
        out = md.Accepted.allocate(batch, nodes=2, steps=1)
        if rule == "ratio":
            kernel_alone(md.accept_chain, batch, tokens, p, p[:, :1].clone(), uniforms, out)
        else:
            kernel_alone(md.accept_tree, batch, tokens, p, uniforms, out)
        assert out.accept_length.tolist() == (batch.requests != 0).int().tolist()

    def test_lengths_may_advance_in_place(self) -> None:
        batch = random_batch(3, 4, 1, room=5)
        tokens, expected = batch.ints(20), md.Accepted.allocate(batch, nodes=5, steps=4)
        lens = batch.seq_lens.clone()
        md.accept_greedy(batch, tokens, tokens, expected)
        here = replace(batch, **{n: getattr(batch, n).to(DEVICE) for n in ("requests", "seq_lens", "table")})
        out = replace(md.Accepted.allocate(here, nodes=5, steps=4), new_seq_lens=here.seq_lens)
        md.accept_greedy.kernel(md.accept_greedy.flatten(here, tokens.to(DEVICE), tokens.to(DEVICE), out))()
        assert torch.equal(here.seq_lens.cpu(), expected.new_seq_lens)
        assert torch.equal(out.positions.cpu(), expected.positions)
        assert not torch.equal(lens, expected.new_seq_lens)


def chain_round(size: int, nodes: int) -> tuple[md.Batch, md.Accepted, list[Callable[[], None]], tuple]:
    """The three bound launches of a greedy round on the GPU, and what has to stay alive."""
    device = torch.device("cuda")
    batch = random_batch(9, size, 16, room=nodes, device=device)
    levels = md.DraftSteps.allocate(batch, steps=nodes - 1, topk=1)
    tree = md.Tree.allocate(batch, nodes=nodes)
    out = md.Accepted.allocate(batch, nodes=nodes, steps=nodes - 1)
    drafts = torch.arange(size * (nodes - 1), device=device).view(size, nodes - 1) % 3
    target = torch.arange(size * nodes, device=device) % 3
    launches = [
        md.draft_steps.bind(batch, levels),
        md.build_tree.bind(batch, batch.ints(size), drafts, tree),
        md.accept_greedy.bind(batch, tree.tokens, target, out),
    ]
    return batch, out, launches, (levels, tree, drafts, target)


@pytest.mark.gpu
def test_a_round_is_captured_and_replayed_without_a_sync() -> None:
    batch, out, launches, _alive = chain_round(8, 5)
    for launch in launches:
        launch()  # compiles
    torch.cuda.synchronize()
    expected = [x.clone() for x in out.args]
    for x in out.args:
        x.fill_(-5)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(out.args, expected, strict=True))
    batch.seq_lens.zero_()  # a replay reads what is on the device by then
    graph.replay()
    assert torch.equal(out.new_seq_lens, out.accept_length)
    assert out.accept_length.any()


@pytest.mark.gpu
def test_the_op_launches_the_kernel_on_cuda() -> None:
    batch = random_batch(4, 5, 16, room=2, device=torch.device("cuda"))
    here = replace(batch, **{n: getattr(batch, n).cpu() for n in ("requests", "seq_lens", "table")})
    found, expected = (md.DraftSteps.allocate(b, steps=3, topk=2) for b in (batch, here))
    md.draft_steps(batch, found)
    md.draft_steps(here, expected)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found.args, expected.args, strict=True))
