"""The request table: who owns which page, what the device knows of it, and what a refusal leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from piecewise_graph.custom_ops.errors import CacheError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable


def make_table(device: torch.device | str = "cpu", **changes: Any) -> RequestTable:
    defaults: dict[str, Any] = {"num_pages": 9, "page_size": 4, "max_requests": 3, "max_seq_len": 20}
    return RequestTable(**(defaults | changes), device=device)


def test_cache_has_a_layer_per_pair_of_tensors() -> None:
    cache = PagedKVCache(
        num_layers=3, num_pages=5, page_size=4, kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu"
    )
    assert cache.num_layers == 3
    assert {tuple(x.shape) for x in (*cache.k, *cache.v)} == {(5, 4, 2, 8)}
    cache.k[1].fill_(1)
    assert not cache.k[0].any() and not cache.v[1].any() and not cache.k[2].any()


def test_cache_is_shaped_after_a_models_config() -> None:
    from transformers import LlamaConfig, Qwen3Config

    made = {"num_pages": 4, "page_size": 2, "dtype": torch.float32, "device": "cpu"}
    llama = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    cache = PagedKVCache.for_model(llama, **made)
    assert (cache.num_layers, cache.kv_heads, cache.head_dim) == (3, 2, 16)
    qwen = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=32)
    assert PagedKVCache.for_model(qwen, **made).head_dim == 32


def test_device_sees_the_pages_after_flush(device: torch.device) -> None:
    table = make_table(device)
    slot = table.open()
    table.reserve({slot: 9})
    assert not table.block_table.any()
    table.flush()
    row = table.block_table[slot].tolist()
    assert len(set(row[:3])) == 3 and 0 not in row[:3]
    assert row[3:] == [0] * 5  # of five pages; rows are of a multiple of 16 bytes
    table.close(slot)
    table.flush()
    assert not table.block_table.any()


def test_page_and_slot_0_are_never_handed_out() -> None:
    table = make_table()
    slots = [table.open() for _ in range(3)]
    table.reserve({slots[0]: 20, slots[1]: 12})
    table.flush()
    assert 0 not in slots
    assert sorted(table.block_table.flatten().tolist())[-8:] == list(range(1, 9))


def test_exhausted_pages_are_named_and_change_nothing() -> None:
    table = make_table()
    first, second = table.open(), table.open()
    table.reserve({first: 20})
    table.flush()
    before = table.block_table.clone()
    with pytest.raises(CacheError, match=r"4 more pages of 4 tokens are wanted, 3 of 8 are free"):
        table.reserve({first: 20, second: 16})
    assert (table.free_pages, table.capacity(first), table.capacity(second)) == (3, 20, 0)
    table.flush()
    assert torch.equal(table.block_table, before)
    table.reserve({second: 12})


def test_request_that_outgrows_its_row_changes_nothing() -> None:
    table = make_table()
    first, second = table.open(), table.open()
    with pytest.raises(CacheError, match=r"slot \d would hold 21 tokens.*room for 20"):
        table.reserve({first: 8, second: 21})
    assert table.capacity(first) == 0
    assert table.free_pages == table.total_pages


def test_exhausted_slots_are_named() -> None:
    table = make_table()
    slots = [table.open() for _ in range(3)]
    with pytest.raises(CacheError, match="all 3 request slots"):
        table.open()
    table.close(slots[1])
    assert table.open() == slots[1]


@pytest.mark.parametrize("call", ["reserve", "close", "capacity"])
def test_closed_slot_is_refused(call: str) -> None:
    table = make_table()
    slot = table.open()
    table.close(slot)
    with pytest.raises(CacheError, match=f"slot {slot} is not open"):
        getattr(table, call)({slot: 1} if call == "reserve" else slot)


def test_reserving_less_keeps_what_is_there() -> None:
    table = make_table()
    slot = table.open()
    table.reserve({slot: 9})
    table.reserve({slot: 2})
    assert table.capacity(slot) == 12


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    table = make_table("cuda", num_pages=200, max_seq_len=400)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            slot = table.open()
            table.reserve({slot: 33})
            table.flush()
            table.close(slot)
            table.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.free_pages == 199


class Table(RuleBasedStateMachine):
    """Any order of calls: pages are owned once, and the device's table is what the host says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table(num_pages=7, max_requests=3)
        self.tokens: dict[int, int] = {}

    @rule()
    def open(self) -> None:
        if len(self.tokens) == 3:
            with pytest.raises(CacheError):
                self.table.open()
        else:
            self.tokens[self.table.open()] = 0

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1))
        wanted = {slot: data.draw(st.integers(0, 24)) for slot in chosen}
        after = self.tokens | {slot: max(count, self.tokens[slot]) for slot, count in wanted.items()}
        fits = sum(-(-count // 4) for count in after.values()) <= 6 and max(wanted.values()) <= 20
        if fits:
            self.table.reserve(wanted)
            self.tokens = after
        else:
            with pytest.raises(CacheError):
                self.table.reserve(wanted)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.table.close(slot)
        del self.tokens[slot]

    @invariant()
    def pages_are_owned_once(self) -> None:
        self.table.flush()
        rows = self.table.block_table
        used = {slot: -(-count // 4) for slot, count in self.tokens.items()}
        owned = [page for slot, count in used.items() for page in rows[slot, :count].tolist()]
        assert len(set(owned)) == len(owned) and 0 not in owned
        assert self.table.free_pages == 6 - len(owned)
        assert int((rows != 0).sum()) == len(owned)
        assert set(self.table.open_slots) == set(self.tokens)


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=20)


def pages(count: int, *shape: int, apart: int = 1) -> torch.Tensor:
    return torch.zeros(count, apart, *shape)[:, 0]


def test_pages_of_somebody_else_may_lie_apart() -> None:
    """Their number may differ from layer to layer, as transformers has it."""
    cache = PagedKVCache.of_pages([pages(5, 4, 2, 8), pages(3, 4, 2, 8)], [pages(5, 4, 2, 8)] * 2)
    assert (cache.page_size, cache.page_pitch) == (4, 4)
    assert PagedKVCache.of_pages(*[[pages(5, 4, 2, 8, apart=3)]] * 2).page_pitch == 12
    assert PagedKVCache.of_pages(*[[pages(1, 4, 2, 8, apart=3)]] * 2).page_pitch == 4


WRONG_PAGES = {
    "heads first": pages(5, 2, 4, 8).transpose(1, 2),
    "no whole slots apart": torch.zeros(130).as_strided((2, 4, 2, 8), (65, 16, 8, 1)),
    "overlapping": torch.zeros(96).as_strided((2, 4, 2, 8), (32, 16, 8, 1)),
}
OTHER_PAGES = {"shape": pages(5, 4, 2, 16), "pitch": pages(5, 4, 2, 8, apart=2), **WRONG_PAGES}


@pytest.mark.parametrize("name", OTHER_PAGES)
def test_pages_that_are_not_like_the_first_are_refused(name: str) -> None:
    first = pages(5, 4, 2, 8)
    with pytest.raises(CacheError, match="with strides"):
        PagedKVCache.of_pages([first, first], [first, OTHER_PAGES[name]])


@pytest.mark.parametrize("name", WRONG_PAGES)
def test_pages_that_are_not_dense_are_refused(name: str) -> None:
    with pytest.raises(CacheError, match="with strides"):
        PagedKVCache.of_pages([WRONG_PAGES[name]], [WRONG_PAGES[name]])
