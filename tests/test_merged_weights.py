"""merge_linears: parameters are views of merged tensors, and stay usable as parameters."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import models
import pytest
import torch
from internals import (
    check_weights,
    merged_parameters,
    merged_tensors,
    no_memory_for_rows,
    pool_of,
)
from merge_cases import WIDTH, Llama, agree, groups, merged, renew, replace_data, replace_parameter, storages
from toys import COUNTS, assert_same, compiled, rows

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, MergedWeightsError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- parameters ---------------------------------------------------------------------------------------


def test_parameters_are_views_and_nothing_else_changes(device: torch.device, tmp_path: Path) -> None:
    model = Llama(bias=True).to(device)
    before, objects = sum(storages(model).values()), [*model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    agree(merged(model), model, device)
    for layer in model.layers:
        for group in ((layer.q, layer.k, layer.v), (layer.gate, layer.up)):
            for kind in ("weight", "bias"):
                held = {getattr(member, kind).untyped_storage().data_ptr() for member in group}
                assert len(held) == 1
    assert sum(storages(model).values()) == before
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    torch.save(model.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state")
    for found in (model.state_dict(), loaded):
        assert list(found) == list(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
    assert (tmp_path / "state").stat().st_size < 2 * before + 20_000


def test_save_pretrained_writes_what_it_would_have_written(device: torch.device, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = models.build("llama", 2, device)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    call = models.call("llama", models.random_ids(3, device=device))
    pg.compile(model, compiler="eager", capture_sizes=[4], merge_linears=True)(**call)
    assert len(storages(model)) < len(list(model.parameters()))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert list(again) == list(wanted)
    assert all(torch.equal(again[name].to(device), value) for name, value in wanted.items())


def test_weights_written_in_place_are_seen(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    frozen = pg.freeze(fast, rows(3, device))
    with pg.counters.expect(traces=0, tapes=0):
        for _ in range(2):
            renew(model)
            agree(fast, model, device)
            agree(frozen, model, device)
            model.load_state_dict(Llama().state_dict())
            agree(fast, model, device)
            agree(frozen, model, device)


def test_replaced_parameter_is_read_at_once(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    replace_parameter(model.layers[1].k)
    agree(fast, model, device)
    agree(fast, model, device)


def test_moved_storage_raises_by_name_until_reset(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    replace_data(model.layers[1].k)
    with pytest.raises(AddressMovedError, match=r"layers\.1\.k\.weight"):
        fast(rows(3, device))
    pg.reset()
    with pg.counters.expect(tapes=2):
        agree(fast, model, device)
    layer = model.layers[1]
    assert layer.k.weight.untyped_storage().data_ptr() == layer.q.weight.untyped_storage().data_ptr()


def test_frozen_callable_is_right_again_after_rebind(device: torch.device) -> None:
    model = Llama().to(device)
    call = pg.freeze(merged(model), rows(3, device))
    agree(call, model, device)
    for layer in model.layers:
        replace_data(layer.v)
    with pytest.raises(AddressMovedError, match=r"v\.weight"):
        check_weights(call)
    call.rebind()
    agree(call, model, device)


def test_weights_that_were_replaced_before_any_capture_are_laid_out_again(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model, cuda_graphs="off")
    for _ in range(3):
        agree(fast, model, device, [3, 8])
        replace_data(model.layers[0].q)
        replace_parameter(model.layers[1].up)
    with pg.counters.expect(traces=0):
        agree(fast, model, device, [3, 8])


def test_another_kind_of_weight_is_refused_by_name(device: torch.device) -> None:
    model = Llama().to(device)
    call = pg.freeze(merged(model, cuda_graphs="off"), rows(3, device))
    model.layers[0].k.weight.data = torch.randn(4, WIDTH, device=device)
    with pytest.raises(MergedWeightsError, match=r"layers\.0\.k\.weight of .*\(8, 8\).*\(4, 8\)"):
        call(rows(3, device))


def test_model_may_be_converted(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    model.double()
    for count in COUNTS:
        x = rows(count, device).double()
        assert_same(fast(x), model(x))
    assert len({p.untyped_storage().data_ptr() for p in model.layers[0].q.parameters()}) == 1
    assert len(storages(model)) == 2 * (2 + 2)


# --- memory -------------------------------------------------------------------------------------------


def test_too_little_memory_leaves_groups_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory_for_rows(monkeypatch, 16 + 8 + 8)
    model = Llama().to(device)
    fast = merged(model)
    with pg.counters.expect(merged_linears=2 * 2, **{"unmerged_groups:no_room": 2}):
        agree(fast, model, device)
    assert "apart: 2 no_room" in str(pg.explain(fast))


@pytest.mark.parametrize("reset", [False, True])
def test_merged_weights_die_with_the_model(reset: bool, device: torch.device) -> None:
    others = merged_parameters()
    model = Llama(bias=True).to(device)
    fast = merged(model)
    agree(fast, model, device)
    if reset:
        pg.reset()
        pool_of(fast).release()
        agree(fast, model, device)
    held = weakref.ref(model.layers[0].q.weight)
    over = merged_tensors()
    assert over
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert held() is None
    assert not over & merged_tensors()
    assert not merged_parameters() - others


def test_reset_lets_go_of_the_memory(device: torch.device) -> None:
    """Without graphs, only the parameters hold the merged tensors."""
    others = merged_tensors()
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    assert len(merged_tensors() - others) == 2 * 2
    pg.reset()
    gc.collect()
    assert not merged_tensors() - others


def test_warm_start_from_cache_dir(device: torch.device, tmp_path: Path) -> None:
    for compiles, hits in ((3, 0), (0, 3)):
        torch._dynamo.reset()
        model = Llama().to(device)
        fast = merged(model, compiler="inductor", cache_dir=tmp_path)
        with pg.counters.expect(merged_linears=10, compiles=compiles, cache_hits=hits, cache_rejected=0):
            agree(fast, model, device, (3, 4, 8))
    plain = Llama().to(device)
    with pg.counters.expect(merged_linears=0, cache_hits=0):
        agree(compiled(plain, compiler="inductor", cache_dir=tmp_path), plain, device, (3, 4, 8))


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu_memory_stays_the_same_and_answers_right() -> None:
    device = torch.device("cuda")
    with torch.device(device):
        model = models.build("llama", 4, device).to(torch.bfloat16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fast = pg.compile(model, capture_sizes=[1, 8], max_tokens=8, merge_linears=True, cuda_graphs="off")
    ids = models.random_ids(3, device=device)
    wanted = models.rows(model(**models.call("llama", ids)))
    found = models.rows(fast(**models.call("llama", ids)))
    torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert groups(fast) == {"q_proj+k_proj+v_proj": 4, "gate_proj+up_proj": 4}


@pytest.mark.gpu
def test_on_a_gpu_with_inductor_graphs_and_a_frozen_callable() -> None:
    device = torch.device("cuda")
    model = Llama(bias=True).to(device)
    call = pg.freeze(merged(model, compiler="inductor"), rows(3, device))
    with pg.counters.expect(fallbacks=2):  # above max_tokens, twice
        agree(call, model, device, (*COUNTS, *COUNTS))
    renew(model)
    agree(call, model, device)
    replace_data(model.layers[0].gate)
    call.rebind()
    agree(call, model, device)
