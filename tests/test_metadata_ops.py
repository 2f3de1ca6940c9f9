"""How metadata ops are called: dispatch, checks, bound launches, compiled graphs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from metadata_cases import CPU, dyadic_probs, dyadic_uniforms, mask_of, random_batch
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md


def arguments() -> dict[md.MetadataOp, tuple]:
    """One valid call of every op."""
    batch = random_batch(2, 3, 1, room=8)
    generator = torch.Generator().manual_seed(0)
    tree, steps = md.Tree.allocate(batch, nodes=4), md.DraftSteps.allocate(batch, steps=3, topk=2)
    accepted = md.Accepted.allocate(batch, nodes=4, steps=3)
    branches = md.Branches.allocate(batch, steps=3, topk=2)
    ids, mask = batch.ints(12), mask_of([-1, 0, 1, 2]).repeat(3, 1, 1)
    p, q = dyadic_probs(generator, 3, 4, 5), dyadic_probs(generator, 3, 3, 5)
    u = dyadic_uniforms(generator, 3, 4)
    scores, tokens = torch.rand(3, 10), batch.ints(3, 10)
    state = md.RequestState.zeros(CPU, R=len(batch.table))
    return {
        md.extend_batch: md.extend_batch.flatten(batch, batch.ints(3), md.ExtendRows.allocate(batch, 9)),
        md.gather_requests: md.gather_requests.flatten(
            batch.requests, batch.table, state, md.Gathered.zeros(CPU, B=3, P=batch.table.shape[1])
        ),
        md.scatter_accepted: md.scatter_accepted.flatten(batch.requests, accepted, batch.ints(3, 5), state),
        md.draft_steps: md.draft_steps.flatten(batch, steps),
        md.select_branches: md.select_branches.flatten(
            batch.requests, 1, torch.rand(3, 2, 2), torch.ones(3, 2, 2, dtype=torch.int64), branches
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
    columns = flat[2:4] if op is md.gather_requests else flat[-2:] if op is md.scatter_accepted else ()
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            strided = value.repeat_interleave(2, -1)[..., ::2]
            may_be_strided = any(value is column for column in columns)
            for wrong in (
                value.to(torch.float64),
                value[..., None],
                value[..., :0] if may_be_strided else strided,
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
    for last in (-1, 2**31):
        with pytest.raises(md.MetadataError, match=f"max_position is {last}"):
            tree = md.Tree.allocate(batch, nodes=4)
            md.build_tree(batch, batch.ints(3), batch.ints(3, 3), tree, max_position=last)
    with pytest.raises(md.MetadataError, match=r"level 2 of 2 steps"):
        branches = md.Branches.allocate(batch, steps=2, topk=2)
        md.select_branches(batch.requests, 2, torch.ones(3, 2, 2), batch.ints(3, 2, 2), branches)
    with pytest.raises(md.MetadataError, match="requests is empty"):
        empty = replace(batch, requests=batch.requests[:0])
        md.draft_steps(empty, md.DraftSteps.allocate(batch, steps=2, topk=2))


def test_errors_name_what_is_known_of_a_shape() -> None:
    batch = random_batch(2, 3, 1, room=8)
    steps = md.DraftSteps.allocate(batch, steps=3, topk=2)
    with pytest.raises(md.MetadataError, match=r"positions has shape \[2, 5\].*\[2, B\*k\]"):
        md.draft_steps(batch, replace(steps, positions=batch.ints(2, 5)))
    with pytest.raises(md.MetadataError, match=r"out.seq_lens has shape \[2, 4\].*\[2, 3\]"):
        md.draft_steps(batch, replace(steps, seq_lens=batch.ints(2, 4)))
    tree = md.Tree.allocate(batch, nodes=4)
    with pytest.raises(md.MetadataError, match="one of scores and parents"):
        md.build_tree(batch, batch.ints(3), batch.ints(3, 3), tree, parents=batch.ints(3, 3))
    with pytest.raises(md.MetadataError, match=r"probs has shape \[3, 2, 2\].*\[3, 1, 2\]"):
        branches = md.Branches.allocate(batch, steps=3, topk=2)
        md.select_branches(batch.requests, 0, torch.ones(3, 2, 2), batch.ints(3, 2, 2), branches)


def test_binding_checks_as_a_call_does() -> None:
    """The launch itself checks nothing, on a CPU as on a GPU."""
    batch = random_batch(2, 3, 1, room=8)
    tree, steps = md.Tree.allocate(batch, nodes=4), md.DraftSteps.allocate(batch, steps=3, topk=2)
    with pytest.raises(md.MetadataError, match="a root and 2 draft tokens"):
        md.build_tree.bind(batch, batch.ints(3), batch.ints(3, 2), tree)
    with pytest.raises(md.MetadataError, match=r"draft_steps.*positions has shape \[2, 5\]"):
        md.draft_steps.bind(batch, replace(steps, positions=batch.ints(2, 5)))
    with pytest.raises(md.MetadataError, match=r"extend_batch.*float32"):
        md.extend_batch.bind(batch, torch.zeros(3), md.ExtendRows.allocate(batch, 9))


def test_a_bound_call_repeats_the_op() -> None:
    batch = random_batch(4, 3, 1, room=8)
    start, live = batch.seq_lens.clone(), batch.requests != 0
    out = replace(md.Accepted.allocate(batch, nodes=1, steps=0), new_seq_lens=batch.seq_lens)
    launch = md.accept_greedy.bind(batch, batch.ints(3), batch.ints(3), out)
    launch()
    launch()
    assert torch.equal(batch.seq_lens, torch.where(live, start + 2, 0))


def test_ops_can_be_compiled_into_a_graph() -> None:
    batch = random_batch(4, 3, 1, room=8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(requests: Tensor, lens: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        positions, slots, out_lens = (torch.empty(2, n, dtype=torch.int32) for n in (6, 6, 3))
        torch.ops.piecewise.draft_steps(requests, lens, table, 1, positions, slots, out_lens)
        lens.copy_(out_lens[0])
        return positions, slots + 0

    steps = md.DraftSteps.allocate(batch, steps=3, topk=2)
    md.draft_steps(batch, steps)
    found = step(batch.requests, batch.seq_lens, batch.table)
    assert torch.equal(found[0], steps.positions) and torch.equal(found[1], steps.slot_mapping)
    assert torch.equal(batch.seq_lens, steps.seq_lens[0])


def test_importing_the_ops_loads_no_triton() -> None:
    code = "import piecewise_graph.custom_ops.metadata, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
