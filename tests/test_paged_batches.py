"""What describes a batch has to be possible, and to fit its cache, its table and its forward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.custom_ops import kv_cache
from piecewise_graph.custom_ops.attention import AttentionBatch, BatchBuffers, attention, make_batch
from piecewise_graph.custom_ops.errors import AttentionError, CacheError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

HEADS, HEAD_DIM = 2, 8


def make_cache(device: torch.device | str = "cpu", **changes: Any) -> PagedKVCache:
    defaults: dict[str, Any] = {
        "num_layers": 2, "num_pages": 20, "page_size": 4, "kv_heads": HEADS, "head_dim": HEAD_DIM,
        "dtype": torch.float32,
    }  # fmt: skip
    return PagedKVCache(**(defaults | changes), device=device)


@dataclasses.dataclass
class Setup:
    """Three open requests of eight tokens each."""

    cache: PagedKVCache
    table: RequestTable
    slots: list[int]

    def buffers(self, **changes: Any) -> BatchBuffers:
        defaults: dict[str, Any] = {"num_requests": 3, "num_tokens": 8, "max_query_len": 8}
        return BatchBuffers(self.cache, self.table, **(defaults | changes))

    def attend(self, batch: AttentionBatch, rows: int) -> Tensor:
        q, k, v = (
            torch.arange(rows * HEADS * HEAD_DIM, device=self.cache.device).view(rows, HEADS, HEAD_DIM).sin()
            for _ in "qkv"
        )
        with pg.forward_context(attention=batch):
            return attention(q, k, v)


@pytest.fixture
def setup(device: torch.device) -> Setup:
    cache = make_cache(device)
    table = RequestTable.for_cache(cache, max_requests=4, max_seq_len=32)
    slots = [table.open() for _ in range(3)]
    table.reserve(dict.fromkeys(slots, 8))
    return Setup(cache, table, slots)


# --- what a batch may be filled with; a, b, c are the open slots ---

IMPOSSIBLE: dict[str, tuple[Any, type[Exception], str]] = {
    "fewer query_lens": (lambda a, b, c: ([a, b], [2], [2, 2]), AttentionError, "2 slots, 2 seq_lens, 1 q"),
    "more seq_lens": (lambda a, b, c: ([a], [1], [3, 2]), AttentionError, "1 slots, 2 seq_lens, 1 q"),
    "floats": (lambda a, b, c: ([a], [2.7], [2.7]), AttentionError, r"query_lens is \[2\.7\]"),
    "words": (lambda a, b, c: ([a], [2], ["x"]), AttentionError, r"seq_lens is \['x'\]"),
    "negative rows": (lambda a, b, c: ([a, b], [-1, 3], [2, 3]), AttentionError, "has -1 new rows"),
    "tokens below rows": (lambda a, b, c: ([a], [6], [3]), AttentionError, "has 6 new rows and 3 tokens"),
    "not reserved": (lambda a, b, c: ([a], [1], [9]), CacheError, r"would hold 9 tokens.*room for 8"),
    "never opened": (lambda a, b, c: ([4], [1], [1]), CacheError, "slot 4 is not open"),
    "out of range": (lambda a, b, c: ([2**40], [1], [1]), CacheError, "is not open"),
    "negative slot": (lambda a, b, c: ([-1], [1], [1]), CacheError, "slot -1 is not open"),
    "the null slot": (lambda a, b, c: ([0], [1], [1]), CacheError, "slot 0 is not open"),
    "twice": (lambda a, b, c: ([a, a], [1, 2], [1, 3]), AttentionError, "is named twice"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_requests_are_refused_and_change_nothing(case: str, setup: Setup) -> None:
    choose, error, message = IMPOSSIBLE[case]
    slots, query_lens, seq_lens = choose(*setup.slots)
    buffers = setup.buffers()
    positions = buffers.fill(setup.slots[:2], [5, 3], [5, 4]).clone()
    wanted = setup.attend(buffers.batch, 8)
    setup.table.reserve({setup.slots[2]: 12})
    unsent = dict(setup.table._unsent)
    with pytest.raises(error, match=message):
        buffers.fill(slots, query_lens, seq_lens)
    with pytest.raises(error, match=message):
        make_batch(setup.cache, setup.table, slots, query_lens, seq_lens)
    assert setup.table._unsent == unsent
    assert torch.equal(buffers.positions, positions)
    assert torch.equal(setup.attend(buffers.batch, 8), wanted)


def test_a_request_that_is_not_reserved_names_reserve(setup: Setup) -> None:
    with pytest.raises(CacheError) as caught:
        setup.buffers().fill(setup.slots[:1], [9], [9])
    assert f"reserve({{{setup.slots[0]}: 9}})" in caught.value.remedy


def test_a_closed_slot_is_refused(setup: Setup) -> None:
    setup.table.close(setup.slots[0])
    with pytest.raises(CacheError, match="is not open"):
        make_batch(setup.cache, setup.table, setup.slots[:1], [1], [1])


def test_a_batch_without_rows_is_refused(setup: Setup) -> None:
    for slots, lengths in (([], []), (setup.slots[:1], [0])):
        with pytest.raises(AttentionError, match=f"{len(slots)} requests and no row"):
            make_batch(setup.cache, setup.table, slots, lengths, lengths)


def test_zero_length_requests_are_served(setup: Setup) -> None:
    first, second, third = setup.slots
    batch, positions = make_batch(setup.cache, setup.table, [first, second, third], [2, 0, 1], [2, 0, 3])
    assert positions.tolist() == [0, 1, 2]
    assert batch.qo_indptr.tolist() == [0, 2, 2, 3]
    setup.attend(batch, 3)


def test_uniform_buffers_take_uniform_requests(setup: Setup) -> None:
    buffers = setup.buffers(num_requests=3, num_tokens=6, max_query_len=2, uniform=True)
    first, second, third = setup.slots
    buffers.fill([first, second], [2, 2], [2, 5])
    buffers.fill([first, second, third], [2, 2, 0], [2, 5, 0])
    buffers.fill([first, 0, 0], [2, 0, 0], [2, 0, 0])
    assert buffers.batch.qo_indptr[1].item() == 2
    for query_lens, odd in (([1, 2], "request 0 has 1 rows"), ([0, 2], "request 0 has 0 rows")):
        with pytest.raises(AttentionError, match=f"{odd}, each of uniform buffers 2"):
            buffers.fill([first, second], query_lens, query_lens)
    with pytest.raises(AttentionError, match="request 1 has 0 rows"):
        buffers.fill([first, second], [2, 0], [2, 3])


def test_whole_numbers_of_any_kind_are_lengths(setup: Setup) -> None:
    lengths = torch.tensor([2, 1])
    batch, _ = make_batch(setup.cache, setup.table, setup.slots[:2], lengths, list(lengths))  # type: ignore[arg-type]
    assert batch.host_query_lens == batch.host_seq_lens == (2, 1)


def test_lengths_on_the_host_belong_to_one_filling(setup: Setup) -> None:
    """Buffers that can be filled again have none: a planner would believe the old ones."""
    buffers = setup.buffers()
    buffers.fill(setup.slots[:1], [2], [3])
    assert (buffers.batch.host_query_lens, buffers.batch.host_seq_lens) == (None, None)
    batch, _ = make_batch(setup.cache, setup.table, setup.slots[:1], [2], [3])
    assert (batch.host_query_lens, batch.host_seq_lens) == ((2,), (3,))


# --- the table against the cache ---


def test_a_table_for_a_cache_hands_out_its_pages(device: torch.device) -> None:
    cache = make_cache(device)
    table = RequestTable.for_cache(cache, max_requests=4, max_seq_len=30)
    assert (table.page_size, table.total_pages, table.max_pages) == (4, 19, 8)
    assert table.block_table.device == cache.device


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"page_size": 16}, "pages of 16 tokens on .* pages of 4"),
        ({"num_pages": 21}, "table of 21 pages, and a KV cache of 20"),
        ({"device": "meta"}, "tokens on meta"),
    ],
)
def test_a_table_of_another_cache_is_refused(
    change: dict[str, Any], found: str, device: torch.device
) -> None:
    cache = make_cache(device)
    sizes = {"num_pages": 20, "page_size": 4, "max_requests": 4, "max_seq_len": 32, "device": device}
    table = RequestTable(**(sizes | change))  # type: ignore[arg-type]
    with pytest.raises(AttentionError, match=found) as caught:
        BatchBuffers(cache, table, num_requests=1, num_tokens=1, max_query_len=1)
    assert "RequestTable.for_cache" in caught.value.remedy


def test_a_table_of_fewer_pages_is_fine(device: torch.device) -> None:
    table = RequestTable(num_pages=10, page_size=4, max_requests=4, max_seq_len=32, device=device)
    BatchBuffers(make_cache(device), table, num_requests=1, num_tokens=1, max_query_len=1)


def test_changes_whose_transfer_failed_are_sent_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "to_device", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            setup.table.flush()
    setup.table.flush()
    owned = [setup.table._pages[slot] for slot in setup.slots]
    assert setup.table.block_table[setup.slots, :2].tolist() == owned
    assert not setup.table._unsent


# --- the batch against the forward ---


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).view(-1, HEADS, HEAD_DIM)
        return self.out(attention(x.sin(), x.cos(), x).flatten(1))


@pytest.fixture
def model(device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


@pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])
def test_rows_that_the_batch_was_not_filled_with_are_refused(
    full: bool, setup: Setup, model: Model, no_grad: None
) -> None:
    fast = pg.compile(model, token_dim={"ids": 0}, compiler="eager", capture_sizes=[8])
    ids = torch.arange(8, device=setup.cache.device)
    buffers, (first, second, _) = setup.buffers(), setup.slots

    def forward(rows: int) -> Tensor:
        with pg.forward_context(attention=buffers.batch, full_graph=full):
            return fast(ids[:rows])

    buffers.fill([first], [8], [8])
    for _ in range(2):
        wanted = forward(8).clone()
    buffers.fill([first], [5], [5])
    assert torch.allclose(forward(5), wanted[:5], atol=1e-6)
    for live in (3, 5, 7):
        buffers.fill([first], [live], [live])
        kept = [cached.clone() for cached in (*setup.cache.k, *setup.cache.v)]
        for rows in {3, 5, 7, 8} - {live}:
            with pytest.raises(AttentionError, match=f"describes {live} tokens.*called with {rows}"):
                forward(rows)
        for before, after in zip(kept, (*setup.cache.k, *setup.cache.v), strict=True):
            assert torch.equal(before[1:], after[1:])
    buffers.fill([first, second], [5, 2], [5, 7])
    with pytest.raises(AttentionError, match=r"describes 7 tokens.*called with 5"):
        forward(5)
    buffers.fill([first], [5], [5], padded=True)
    assert torch.allclose(forward(8)[:5], wanted[:5], atol=1e-6)
    with pytest.raises(AttentionError, match=r"describes 8 tokens.*called with 5"):
        forward(5)
    buffers.fill([first], [5], [5])
    assert torch.allclose(forward(5), wanted[:5], atol=1e-6)


def test_padded_rows_of_an_uncompiled_forward_are_asked_for(
    setup: Setup, model: Model, no_grad: None
) -> None:
    buffers, ids = setup.buffers(), torch.arange(8, device=setup.cache.device)
    buffers.fill(setup.slots[:1], [7], [7])
    with (
        pg.forward_context(attention=buffers.batch),
        pytest.raises(AttentionError, match="describes 7 tokens"),
    ):
        model(ids)
    buffers.fill(setup.slots[:1], [7], [7], padded=True)
    with pg.forward_context(attention=buffers.batch):
        assert model(ids).isfinite().all()
