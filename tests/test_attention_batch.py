"""A call and its batch: what belongs together, what fits the cache, and what is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import DECODE, TREE, case_of, check

from piecewise_graph.custom_ops.attention import AttentionBatch
from piecewise_graph.custom_ops.attention.implementations import choose, serve
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache

CACHE = {
    "num_layers": 2,
    "num_pages": 9,
    "page_size": 16,
    "kv_heads": 2,
    "head_dim": 64,
    "dtype": torch.float32,
    "device": "cpu",
}


# --- the call against the cache ---


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kv_heads": 1}, "the model has 2 KV heads of 64, its KV cache 1 of 64"),
        ({"head_dim": 32}, "the model has 2 KV heads of 64, its KV cache 2 of 32"),
        ({"num_layers": 1}, "layer 1 of the model, and a KV cache of 1 layers"),
        ({"dtype": torch.float16}, "the model computes torch.float32, its KV cache holds torch.float16"),
    ],
)
def test_a_cache_of_another_model_is_refused(change: dict[str, Any], found: str) -> None:
    case = case_of()
    batch = dataclasses.replace(case.batch, kv_cache=PagedKVCache(**{**CACHE, **change}))
    with pytest.raises(AttentionError) as caught:
        serve(batch, case.call, captured=False)
    assert found in caught.value.what


def test_a_negative_layer_is_refused() -> None:
    case = case_of(layer=-1)
    with pytest.raises(AttentionError, match="layer -1 of the model"):
        serve(case.batch, case.call, captured=False)


def test_a_window_smaller_than_the_tree_is_refused() -> None:
    case = case_of(dataclasses.replace(TREE, window=3))
    choose(case.call, case.batch, False)
    case = case_of(dataclasses.replace(TREE, window=2))
    with pytest.raises(AttentionError, match="a sliding window of 2 tokens and a tree mask of 3"):
        choose(case.call, case.batch, False)


@pytest.mark.parametrize("layer", [-1, 2])
def test_the_layer_of_every_call_is_checked(layer: int) -> None:
    """Layers share what a batch remembers of its calls: the first one's check is not enough."""
    case = case_of(layer=0)
    serve(case.batch, case.call, captured=False)
    before = [cached.clone() for cached in (*case.batch.kv_cache.k, *case.batch.kv_cache.v)]
    with pytest.raises(AttentionError, match=f"layer {layer} of the model, and a KV cache of 2"):
        serve(case.batch, dataclasses.replace(case.call, layer=layer), captured=False)
    for cached, old in zip((*case.batch.kv_cache.k, *case.batch.kv_cache.v), before, strict=True):
        assert torch.equal(cached, old)


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "k of more rows": (lambda call: {"k": torch.cat([call.k] * 2), "v": torch.cat([call.v] * 2)}, "k .10, 2"),
    "k of fewer rows": (lambda call: {"k": call.k[:-1], "v": call.v[:-1]}, r"k \(4, 2"),
    "v of fewer rows": (lambda call: {"v": call.v[:-1]}, r"v \(4, 2, 64\)"),
    "v of other size": (lambda call: {"v": call.v[..., :32]}, r"v \(5, 2, 32\)"),
    "k of other size": (lambda call: {"k": call.k[..., :32], "v": call.v[..., :32]}, r"k \(5, 2, 32\)"),
    "k's dtype": (lambda call: {"k": call.k.double()}, "k torch.float64"),
    "v's dtype": (lambda call: {"v": call.v.double()}, "v torch.float64"),
    "q's dtype": (lambda call: {"q": call.q.double()}, "q is torch.float64"),
    "heads": (lambda call: {"q": call.q[:, :3], "out": call.out[:, :3]}, r"q \(5, 3, 64\)"),
    "no heads": (lambda call: {"k": call.k[:, :0], "v": call.v[:, :0]}, r"k \(5, 0, 64\)"),
    "dimensions": (lambda call: {"q": call.q[None]}, r"q \(1, 5, 4, 64\)"),
    "window 0": (lambda call: {"window": 0}, "window=0"),
    "window below": (lambda call: {"window": -3}, "window=-3"),
    "softcap 0": (lambda call: {"softcap": 0.0}, "softcap=0"),
    "softcap below": (lambda call: {"softcap": -5.0}, "softcap=-5"),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_arguments_that_do_not_belong_together_are_refused(what: str) -> None:
    change, found = BAD_CALLS[what]
    case = case_of()
    with pytest.raises(AttentionError, match=found):
        dataclasses.replace(case.call, **change(case.call))


def test_too_few_rows_are_refused() -> None:
    case = case_of()
    rows = {name: getattr(case.call, name)[:-1] for name in ("q", "k", "v", "out")}
    with pytest.raises(AttentionError, match="the batch describes 5 tokens, but the model was called with 4"):
        serve(case.batch, dataclasses.replace(case.call, **rows), captured=False)


def test_padded_rows_are_left_alone() -> None:
    case = case_of()
    more = {
        name: torch.cat([getattr(case.call, name), getattr(case.call, name)[:2]])
        for name in ("q", "k", "v", "out")
    }
    case = dataclasses.replace(case, call=dataclasses.replace(case.call, live=5, **more))
    before = case.call.out.clone()
    check(case, 1e-5)
    assert torch.equal(case.call.out[5:], before[5:])
    with pytest.raises(AttentionError, match="5 tokens, but the model was called with 6"):
        serve(case.batch, dataclasses.replace(case.call, live=6), captured=False)


# --- AttentionBatch ---


def fields_of(batch: AttentionBatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "qo_indptr", "slot_mapping"])
def test_integers_of_a_batch_are_int32(name: str) -> None:
    """Slots may be int64 too."""
    wrong = torch.int16 if name == "slot_mapping" else torch.int64
    fields = fields_of(case_of().batch)
    fields[name] = fields[name].to(wrong)
    with pytest.raises(AttentionError, match=rf"{name} is {wrong}"):
        AttentionBatch(**fields)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("block_table", (4, 2)), ("block_table", (3,)), ("qo_indptr", (3,)), ("slot_mapping", (5, 1))],
)
def test_shapes_of_a_batch_belong_together(name: str, shape: tuple[int, ...]) -> None:
    fields = fields_of(case_of().batch)
    fields[name] = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(AttentionError, match=rf"{name} is torch\.int32") as caught:
        AttentionBatch(**fields)
    assert "seq_lens names 3 requests" in caught.value.remedy


def test_seq_lens_has_one_dimension() -> None:
    fields = fields_of(case_of().batch)
    fields["seq_lens"] = fields["seq_lens"][:, None]
    with pytest.raises(AttentionError, match=r"seq_lens is torch\.int32"):
        AttentionBatch(**fields)


def test_a_uniform_batch_has_a_slot_for_every_row() -> None:
    fields = fields_of(case_of(DECODE).batch)
    with pytest.raises(AttentionError, match="2 requests of 2 rows each, and 2 slots"):
        AttentionBatch(**{**fields, "query_len": 2, "max_query_len": 2})


def test_a_uniform_batch_has_one_bound_of_rows() -> None:
    fields = fields_of(case_of(DECODE).batch)
    with pytest.raises(AttentionError, match="query_len=1, max_query_len=2"):
        AttentionBatch(**{**fields, "max_query_len": 2})


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 3, 3),
        torch.ones(3, 3, dtype=torch.bool),
        torch.ones(3, 3, 3, dtype=torch.bool),
        torch.ones(2, 2, 3, dtype=torch.bool),
        torch.ones(2, 3, 2, dtype=torch.bool),
    ],
    ids=["dtype", "dimensions", "requests", "rows", "width"],
)
def test_a_tree_mask_fits_its_batch(mask: torch.Tensor) -> None:
    fields = fields_of(case_of(TREE).batch)
    with pytest.raises(AttentionError, match=r"tree_mask is") as caught:
        AttentionBatch(**{**fields, "tree_mask": mask})
    assert "pass bool [2, 3, width], width at least 3" in caught.value.remedy


def test_a_tree_mask_may_be_wider_than_its_rows() -> None:
    fields = fields_of(case_of(TREE).batch)
    AttentionBatch(**{**fields, "tree_mask": torch.ones(2, 3, 5, dtype=torch.bool)})


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"host_query_lens": (1, 4)}, "2 host_query_lens for 3 requests"),
        ({"host_seq_lens": (6, 4, 0, 0)}, "4 host_seq_lens for 3 requests"),
        ({"host_query_lens": (0, 5, 0)}, "host_query_lens up to 5, max_query_len=4"),
        ({"host_seq_lens": (7, 4, 0)}, "host_seq_lens up to 7, max_seq_len=6"),
        ({"host_query_lens": (3, 3, 0)}, "host_query_lens of 6 rows, and 5 slots"),
    ],
)
def test_lengths_on_the_host_fit_the_bounds(change: dict[str, Any], found: str) -> None:
    fields = fields_of(case_of().batch)
    with pytest.raises(AttentionError, match=found):
        AttentionBatch(**{**fields, **change})


def test_what_no_op_writes_is_what_says_which_tokens_there_are() -> None:
    """Not the cache, which attention writes, and not the tree, which it reads after the kernels before."""
    batch = case_of(TREE).batch
    named = [batch.block_table, batch.seq_lens, batch.qo_indptr, batch.slot_mapping]
    assert list(map(id, batch.unwritten_in_forward())) == list(map(id, named))
