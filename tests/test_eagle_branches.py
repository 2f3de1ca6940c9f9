"""Every node of a tree computes what its own path says: as if its ancestors stood before it in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from eagle_cases import DEVICE, one_state_for_all_tests, shapes_of_rounds, small_pair, small_prompts
from hypothesis import example, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import piecewise_graph as pg
from piecewise_graph.eagle import DraftModel, DraftShape, Speculator

SIZE = 4  # requests of a round; one of them is padding
LENGTHS = (5, 1, 9)


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


@dataclass(frozen=True)
class Seen:
    """One forward of a round.

    Attributes:
        tokens, positions: `[B, rows]`.
        mask: `[B, rows, width]` which of the latest `width` rows each row sees; None = all up to itself.
        out: `[B, rows, ...]`.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor | None
    out: Tensor


@contextmanager
def watching(
    module: nn.Module, argument: str, head: Callable[[Any], Tensor] = lambda out: out
) -> Iterator[list[Seen]]:
    """Forwards of eager rounds in which `module` gets such an argument, and `head` of their results."""
    seen: list[Seen] = []

    def note(_: Any, args: Any, given: dict[str, Any], out: Any) -> None:
        batch = pg.get_forward_context().get("attention")
        if argument not in given or batch is None or batch.query_len is None:
            return
        positions = given.get("position_ids", given.get("positions"))
        parts = (
            x.reshape(SIZE, batch.query_len, -1).clone() for x in (given["input_ids"], positions, head(out))
        )
        tokens, places, found = parts
        mask = None if batch.tree_mask is None else batch.tree_mask.clone()
        seen.append(Seen(tokens[..., 0], places[..., 0], mask, found))

    handle = module.register_forward_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def paths(mask: Tensor | None, rows: int) -> list[list[int]]:
    """Of every row of the latest forward, the rows that it sees, itself last."""
    if mask is None:
        return [list(range(row + 1)) for row in range(rows)]
    return [row.nonzero()[:, 0].tolist() for row in mask]


def close(found: Sequence[Tensor], wanted: Tensor) -> None:
    """A sibling in the attention would make a difference a thousand times as large."""
    torch.testing.assert_close(torch.stack(list(found)), wanted, rtol=1e-4, atol=5e-3)


def check_nodes(seen: Seen, request: int, prefix: list[int], plain: nn.Module) -> int:
    """Compare the target's logits at every node with those of a plain model; returns how many."""
    tokens, positions = seen.tokens[request].tolist(), seen.positions[request].tolist()
    assert tokens[0] == prefix[-1]
    missing = set(range(len(tokens)))
    for path in reversed(paths(None if seen.mask is None else seen.mask[request], len(tokens))):
        if path[-1] not in missing:
            continue  # on the way to a leaf that was compared
        ids = torch.tensor([prefix[:-1] + [tokens[node] for node in path]], device=DEVICE)
        wanted = plain(input_ids=ids, use_cache=False).logits[0, -len(path) :]
        close([seen.out[request, node] for node in path], wanted)
        assert [positions[node] for node in path] == list(range(len(prefix) - 1, ids.shape[1]))
        missing -= set(path)
    return len(tokens)


class Chain:
    """A draft that runs down one path: dense attention, all rows in one line.

    Args:
        prefix: tokens of the request, the root last.
    """

    def __init__(self, draft: DraftModel, plain: nn.Module, prefix: list[int]) -> None:
        self.draft, self.tokens = copy.deepcopy(draft), prefix[1:]
        for layer in self.draft.layers:
            layer.self_attn.attend = self.attend
        ids = torch.tensor([prefix[:-1]], device=DEVICE)
        states = plain(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        layers = draft.config.feature_layers or (-1,)
        self.hidden = self.draft.project(torch.cat([states[layer][0] for layer in layers], -1))

    def down(self, path: list[int]) -> Tensor:
        """What the draft returns for each token of `path` after the prefix."""
        tokens, hidden = list(self.tokens), self.hidden
        for token in path:
            hidden = torch.cat([hidden, self.run(tokens, hidden)[-1:]])
            tokens.append(token)
        return self.run(tokens, hidden)[-len(path) :]

    def run(self, tokens: list[int], hidden: Tensor) -> Tensor:
        ids = torch.tensor(tokens, device=DEVICE)
        return self.draft(ids, torch.arange(len(ids), device=DEVICE), hidden)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float, window: int | None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return found[0].transpose(0, 1)


def check_branches(steps: Sequence[Seen], request: int, prefix: list[int], chain: Chain) -> int:
    """Compare what the draft returned at every branch of every step; returns how many."""
    tokens = [token for step in steps for token in step.tokens[request].tolist()]
    found = [row for step in steps for row in step.out[request]]
    missing = set(range(len(tokens)))
    for level in reversed(range(len(steps))):
        mask = steps[level].mask
        branches = len(steps[level].tokens[request])
        below = [[*range(level + 1)]] if mask is None else paths(mask[request], branches)
        for branch, path in enumerate(below):
            assert path[-1] == level * branches + branch
            assert len(path) == level + 1
            assert steps[level].positions[request, branch] == len(prefix) - 1 + level
            if path[-1] in missing:
                close([found[row] for row in path], chain.down([tokens[row] for row in path]))
                missing -= set(path)
    return len(tokens)


@settings(max_examples=12)
@given(shapes_of_rounds(), st.sampled_from(["twin", "eagle1", "eagle3"]), st.integers(0, 99))
@example(DraftShape(4, 4, 24), "eagle3", 0)
@example(DraftShape(5, 2, 16), "twin", 1)
@torch.no_grad()
def test_branches_see_their_own_ancestors_and_nobody_else(shape: DraftShape, kind: str, seed: int) -> None:
    """In the target and in the draft, in the first round and in one that follows a commit."""
    target, plain, draft = small_pair(kind)
    loop = Speculator(
        target, draft, shapes=[shape], max_requests=SIZE, batch_sizes=[SIZE], max_seq_len=40,
        graphs="eager",
    )  # fmt: skip
    prompts = small_prompts(LENGTHS, seed)
    decoder, head = target.get_decoder(), target.get_output_embeddings()
    with (
        watching(decoder, "position_ids", lambda out: head(out[0])) as verified,
        watching(draft, "hidden") as drafted,
    ):
        engine, requests = loop.session(prompts, max_new_tokens=2 * shape.steps + 4)
        engine.step()  # the prompts
        for _ in range(2):
            lengths = [len(request.tokens) for request in requests]
            engine.step()
            known = [r.sequence(0, len(r.prompt) + n) for r, n in zip(requests, lengths, strict=True)]
            steps = drafted[len(drafted) - (shape.steps - 1) :]
            for index, prefix in enumerate(known):
                assert check_nodes(verified[-1], index, prefix, plain) == shape.nodes
                chain = Chain(draft, plain, prefix)
                count = check_branches(steps, index, prefix, chain) if steps else 0
                assert count == (shape.steps - 1) * shape.topk
        engine.close()
