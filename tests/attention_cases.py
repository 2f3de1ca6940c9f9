"""Random paged batches, and attention as a loop over tokens: what every implementation has to equal."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch
from piecewise_graph.custom_ops.attention.call import AttentionCall
from piecewise_graph.custom_ops.attention.implementations import serve
from piecewise_graph.custom_ops.kv_cache import PagedKVCache

WRONG = 777.0  # in cache slots that may not be read: it would show in any result


@dataclass(frozen=True)
class Shape:
    """What a random batch looks like; `lengths`: (tokens before, rows now) of each, (0, 0) = padded."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    tree: bool = False  # every request has the same number of rows, seen as a random tree
    tree_width: int | None = None  # columns of its mask, None = one per row; older ones are in the cache
    uniform: bool = False  # padded requests have rows too (they stand in the batch, seq_len 0)
    max_seq_len: int | None = None
    # K and V of a page lie together, slots are int64, and padded rows, behind all others, have none.
    as_vllm: bool = False


@dataclass(frozen=True)
class Case:
    """A batch with its call, and what was true before it."""

    batch: AttentionBatch
    call: AttentionCall
    history: list[tuple[Tensor, Tensor]]  # per request K and V of the tokens before, float64
    shape: Shape
    before: tuple[Tensor, Tensor]


def make_case(
    shape: Shape, *, dtype: torch.dtype, device: torch.device, implementation: str, seed: int = 0
) -> Case:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rows_each = max((rows for _, rows in shape.lengths), default=1)
    uniform = shape.uniform or shape.tree
    counts = [rows_each if uniform else rows for _, rows in shape.lengths]
    num_tokens = sum(counts)
    if shape.as_vllm:
        counts = [rows for _, rows in shape.lengths]
    totals = [before + rows for before, rows in shape.lengths]
    cache, pages = make_cache(totals, shape, dtype, device, rng)
    slots: list[int] = []
    for (before, rows), mine, count in zip(shape.lengths, pages, counts, strict=True):
        at = [slot_of(mine, before + i, shape.page_size) for i in range(rows)]
        slots += at + [0] * (count - rows)
    slots += [-1] * (num_tokens - len(slots))
    q = random_rows(num_tokens, shape.heads, shape.head_dim, dtype, device)
    k, v = (random_rows(num_tokens, shape.kv_heads, shape.head_dim, dtype, device) for _ in "kv")
    history = []
    for (before, _), mine in zip(shape.lengths, pages, strict=True):
        known = [random_rows(before, shape.kv_heads, shape.head_dim, dtype, device) for _ in "kv"]
        for cached, values in zip((cache.k[1], cache.v[1]), known, strict=True):
            for token in range(before):
                slot = slot_of(mine, token, shape.page_size)
                cached[slot // shape.page_size, slot % shape.page_size] = values[token]
        history.append((known[0].double().cpu(), known[1].double().cpu()))
    width = max(map(len, pages), default=1) or 1
    table = torch.tensor(
        [mine + [0] * (width - len(mine)) for mine in pages], dtype=torch.int32, device=device
    )
    starts = torch.tensor([0, *counts]).cumsum(0)
    batch = AttentionBatch(
        cache,
        block_table=table,
        seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
        qo_indptr=starts.to(device, torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64 if shape.as_vllm else torch.int32, device=device),
        max_query_len=max(rows_each, 1),
        max_seq_len=shape.max_seq_len or max([*totals, 1]),
        query_len=rows_each if uniform else None,
        tree_mask=random_trees(shape, rows_each, rng).to(device) if shape.tree else None,
        host_query_lens=tuple(counts),
        host_seq_lens=tuple(totals),
    )
    out = torch.full_like(q, WRONG)
    call = AttentionCall(q, k, v, out, 1, shape.head_dim**-0.5, shape.window, shape.softcap, implementation)
    return Case(batch, call, history, shape, (cache.k[1].clone(), cache.v[1].clone()))


CPU = torch.device("cpu")
MIXED = Shape(((5, 1), (0, 4), (0, 0)))
DECODE = Shape(((5, 1), (0, 1)), uniform=True)
TREE = Shape(((5, 3), (2, 3)), tree=True)


def case_of(shape: Shape = MIXED, implementation: str = "torch", **call: Any) -> Case:
    """A small case on the CPU, its call with these arguments."""
    case = make_case(shape, dtype=torch.float32, device=CPU, implementation=implementation)
    return replace(case, call=replace(case.call, **call))


def make_cache(
    totals: list[int], shape: Shape, dtype: torch.dtype, device: torch.device, rng: random.Random
) -> tuple[PagedKVCache, list[list[int]]]:
    """A cache of two layers with scattered pages; layer 1 is used, and unused slots hold WRONG."""
    needed = [-(-total // shape.page_size) for total in totals]
    free = list(range(1, 2 + 2 * sum(needed)))
    rng.shuffle(free)
    pages = [[free.pop() for _ in range(count)] for count in needed]
    sizes = {"page_size": shape.page_size, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    num_pages = 2 + 2 * sum(needed)
    if shape.as_vllm:
        storage = [torch.empty(num_pages, 2, *sizes.values(), dtype=dtype, device=device) for _ in range(2)]
        cache = PagedKVCache.of_pages(*([layer[:, which] for layer in storage] for which in (0, 1)))
    else:
        cache = PagedKVCache(num_layers=2, num_pages=num_pages, **sizes, dtype=dtype, device=device)
    for cached in (*cache.k, *cache.v):
        cached.fill_(WRONG)
    return cache, pages


def slot_of(pages: list[int], token: int, page_size: int) -> int:
    return pages[token // page_size] * page_size + token % page_size


def random_rows(rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(rows, heads, head_dim, device=device).to(dtype)


def random_trees(shape: Shape, rows: int, rng: random.Random) -> Tensor:
    """bool `[requests, rows, width]`: row 0 is the root, each other's parent comes before it.

    The last `rows` columns are the rows, and those before them tokens of the cache, where there are any.
    """
    older = (shape.tree_width or rows) - rows
    mask = torch.zeros(len(shape.lengths), rows, older + rows, dtype=torch.bool)
    for (before, _), request in zip(shape.lengths, mask, strict=True):
        for column in range(max(older - before, 0), older):
            request[0, column] = rng.random() < 0.5
        for node in range(rows):
            if node:
                request[node] = request[rng.randrange(node)]
            request[node, older + node] = True
    return mask


def expected(case: Case) -> Tensor:
    """Row by row, head by head, in float64 on the CPU."""
    call, batch, shape = case.call, case.batch, case.shape
    q, k, v = (x.double().cpu() for x in (call.q, call.k, call.v))
    result = torch.zeros_like(q)
    starts = batch.qo_indptr.tolist()
    group = shape.heads // shape.kv_heads
    for request, (before, rows) in enumerate(shape.lengths):
        new = slice(starts[request], starts[request] + rows)
        keys, values = (
            torch.cat([old, fresh[new]]) for old, fresh in zip(case.history[request], (k, v), strict=True)
        )
        for i in range(rows):
            seen = list(range(before + i + 1))
            if batch.tree_mask is not None:
                drawn = batch.tree_mask[request, i].tolist()
                first = before + rows - len(drawn)
                seen = [*range(first), *(first + j for j, seen in enumerate(drawn) if seen)]
            seen = seen[-shape.window :] if shape.window else seen
            for head in range(shape.heads):
                scores = keys[seen, head // group] @ q[starts[request] + i, head] * call.scale
                if shape.softcap:
                    scores = shape.softcap * torch.tanh(scores / shape.softcap)
                weights = torch.softmax(scores, 0)
                result[starts[request] + i, head] = weights @ values[seen, head // group]
    return result


def check(case: Case, tolerance: float, *, captured: bool = False) -> None:
    """Run the call and compare everything it may and may not have written."""
    serve(case.batch, case.call, captured=captured)
    live = int(case.batch.qo_indptr[-1])
    found, wanted = case.call.out[:live].double().cpu(), expected(case)[:live]
    error = (found - wanted).norm() / wanted.norm().clamp(min=1e-9)
    assert found.isfinite().all()
    assert error < tolerance, f"relative error {error:.2e}"
    check_cache(case)


def check_without_slots(case: Case) -> None:
    """Rows of negative slots leave the cache as it was: all, as in vLLM's dummy batches, or all but one."""
    last = int(case.batch.qo_indptr[-1]) - 1
    for others in (0, 1):
        slots = torch.full_like(case.batch.slot_mapping, -1, dtype=torch.int64)
        slots[last : last + others] = case.batch.slot_mapping[last]
        found = replace(case, batch=replace(case.batch, slot_mapping=slots))
        serve(found.batch, found.call, captured=False)
        check_cache(found)


def check_cache(case: Case) -> None:
    """Live rows are in the cache, everything else is as it was; the null page too where no row names it."""
    cache, slots = case.batch.kv_cache, case.batch.slot_mapping.long()
    first = 0 if case.shape.as_vllm else cache.page_size
    written = slots[slots > 0]
    rows = (slots > 0).nonzero().flatten()
    for found, old, new in zip(
        (cache.k[1], cache.v[1]), case.before, (case.call.k, case.call.v), strict=True
    ):
        wanted = old.clone().view(-1, *old.shape[2:])
        wanted[written] = new[rows]
        found = found.reshape(-1, *old.shape[2:])
        assert torch.equal(found[first:], wanted[first:])
    for other in (cache.k[0], cache.v[0]):
        assert bool((other == WRONG).all()), "another layer was written"
