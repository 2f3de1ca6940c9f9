"""Prompts, alone and beside a round: kernels of attention and tapes are there before the first one comes."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_cases import QUICK, resources, small_prompts
from eagle_engine_cases import CHAIN, PLAIN, TREE, lone, make, run
from hypothesis import given, settings, strategies as st
from linear_operands import DTYPES

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import AttentionBatch
from piecewise_graph.custom_ops.attention.call import Traits
from piecewise_graph.eagle import DraftShape
from piecewise_graph.eagle.rounds import prefill
from piecewise_graph.eagle.serving.pace import Pace, Timed

MAX_REQUESTS, PREFILL_ROWS, MAX_TOKENS = 32, 400, 500


@pytest.fixture(scope="module")
def announced() -> list[AttentionBatch]:
    """The batches whose kernels a speculator has compiled ahead for prompts."""
    found = list[AttentionBatch]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(prefill, "compile_ahead", found.append)
        limits = {"max_requests": MAX_REQUESTS, "prefill_rows": PREFILL_ROWS, "max_seq_len": MAX_TOKENS}
        make(shapes=[PLAIN], graphs="eager", **limits).prepare()
    return found


@settings(max_examples=600)
@given(
    st.tuples(st.sampled_from([2, 8, 40, PREFILL_ROWS]), st.sampled_from([1, 8])).flatmap(
        lambda most_and_fewest: st.lists(
            st.tuples(st.integers(1, most_and_fewest[0]), st.integers(0, MAX_TOKENS)),
            min_size=most_and_fewest[1],
        )
    ),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([1, 3, 4, 7, 16, 64]),
    st.sampled_from([64, 80, 128, 256]),
    st.sampled_from([*DTYPES, torch.float32]),
    st.none() | st.integers(1, 500),
    st.sampled_from([8, 20, 108, 132, 148]),
    st.sampled_from([0, 1, 7, MAX_REQUESTS]),
    st.sampled_from([1, 4]),
)
def test_attention_of_prompts_that_come_together(
    announced: list[AttentionBatch], prompts: list[tuple[int, int]], kv_heads: int, group: int, head_dim: int,
    dtype: torch.dtype, window: int | None, processors: int, decoding: int, nodes: int,
) -> None:  # fmt: skip
    """Their variants are announced. `prompts`: rows, and tokens before.

    `decoding` requests of `nodes` rows are with them.
    """
    pytest.importorskip("triton")
    from piecewise_graph.custom_ops.attention.tiling import tile_batch
    from piecewise_graph.custom_ops.attention.triton_attention import _constants

    cache, heads = announced[0].kv_cache, kv_heads * group
    traits = Traits("auto", "cuda", dtype, heads, kv_heads, head_dim, window, None, False)
    ends = [*accumulate(rows for rows, _ in prompts)]
    fitting = [each for each, end in zip(prompts, ends, strict=True) if end <= PREFILL_ROWS]
    rows = [rows for rows, _ in fitting[:MAX_REQUESTS]] or [1]
    longest = max((min(sum(each), MAX_TOKENS) for each in fitting[:MAX_REQUESTS]), default=1)
    if decoding:  # requests whose lengths only the device knows
        longest = max(batch.max_seq_len for batch in announced)

    def variant(requests: int, total: int, most: int, span: int) -> Any:
        seen = span if window is None else min(span, window + most)
        tiling = tile_batch(traits, requests, total, most, seen, processors).tiling
        batch: Any = SimpleNamespace(num_requests=requests, query_len=None, tree_mask=None, kv_cache=cache)
        return tiling.tile.warps, _constants(batch, traits, tiling)

    known = {variant(b.num_requests, b.num_tokens, b.max_query_len, b.max_seq_len) for b in announced}
    most = max(*rows, nodes if decoding else 1)
    assert variant(len(rows) + decoding, sum(rows) + nodes * decoding, most, longest) in known


def test_logits_of_a_padded_round_and_many_prompts_come_from_one_tape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five requests are a round of eight rows. With nineteen prompts that end, no round has as many."""
    monkeypatch.setattr(Pace, "begin", lambda *_: Timed(True))
    sizes: dict[str, Any] = {"prefill_rows": 20, "batch_sizes": [8, 24], "max_requests": 24}
    loop = make(shapes=[PLAIN], graphs={"prefill": "piecewise"}, **sizes, **QUICK)
    loop.prepare()
    engine = loop.engine(overlap=True)
    first = [engine.add_request(prompt, max_new_tokens=6) for prompt in small_prompts([1] * 5)]
    engine.step()
    second = [engine.add_request(prompt, max_new_tokens=6) for prompt in small_prompts([1] * 19, 1)]
    with pg.counters.expect(replays=2, captures=0):  # the target and its head
        engine.step()
    run(engine)
    assert all(request.tokens == lone(request, PLAIN) for request in first + second)


@pytest.mark.parametrize(
    ("shape", "prefill_rows", "max_requests", "largest"),
    [
        (PLAIN, 512, 32, 560), (PLAIN, 500, 8, 516), (CHAIN, 512, 32, 512 + 32 * CHAIN.nodes),
        (PLAIN, 512, 1, 512), (PLAIN, 600, 32, 512), (PLAIN, 8192, 32, 512), (TREE, 512, 4, 512),
    ],
    ids=str,
)  # fmt: skip
def test_largest_tape_of_the_target(
    shape: DraftShape, prefill_rows: int, max_requests: int, largest: int
) -> None:
    """A batch of prompts and a round; no more than prompts need that are alone, or that have no tape."""
    page_size = 1 if shape.is_tree else 16
    made = make(shapes=[shape], prefill_rows=prefill_rows, max_requests=max_requests, page_size=page_size)
    assert max(resources(made).models.target.sizes) == largest
