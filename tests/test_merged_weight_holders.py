"""merge_linears: weights with other holders, and layouts that several models share."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from merge_cases import (
    WIDTH,
    Llama,
    Parallel,
    agree,
    apart,
    groups,
    linear,
    merged,
    renew,
    replace_data,
    replace_parameter,
    storages,
)
from torch import nn
from toys import SIZES, compiled, rows

import piecewise_graph as pg
from piecewise_graph.errors import MergedWeightsError

pytestmark = pytest.mark.usefixtures("no_grad")


def state_dict(model: nn.Module) -> Any:
    return model.state_dict()


def detached(model: nn.Module) -> Any:
    return model.layers[0].k.weight.detach()


def storage(model: nn.Module) -> Any:
    return model.layers[0].k.weight.untyped_storage()


def part(model: nn.Module) -> Any:
    return model.layers[0].k.weight.data[2:]


@pytest.mark.parametrize("hold", [state_dict, detached, storage, part])
def test_weight_with_another_holder_is_not_moved(hold: Callable[[nn.Module], Any]) -> None:
    model = Llama(1)
    held, before = hold(model), storages(model)
    fast = merged(model)
    agree(fast, model, torch.device("cpu"))
    assert apart(fast)["shared_storage"] == (2 if hold is state_dict else 1)
    assert "apart: " in str(pg.explain(fast))
    weight = model.layers[0].k.weight
    assert weight.untyped_storage().data_ptr() in before
    weight.fill_(7.0)
    alias = held["layers.0.k.weight"] if hold is state_dict else held
    assert alias.data_ptr() in (weight.data_ptr(), weight[2:].data_ptr())
    assert isinstance(alias, torch.UntypedStorage) or bool((alias == 7.0).all())


def test_slice_of_a_larger_tensor_is_not_moved(device: torch.device) -> None:
    model = Parallel(linear(), linear()).to(device)
    model.linears[0].weight.data = torch.randn(20, WIDTH, device=device)[4:12]
    fast = merged(model)
    agree(fast, model, device)
    assert apart(fast) == {"shared_storage": 1}


def test_weights_in_shared_memory_and_of_inference_mode_are_not_moved() -> None:
    model = Parallel(linear(), linear())
    model.share_memory()
    fast = merged(model)
    agree(fast, model, torch.device("cpu"))
    assert apart(fast) == {"shared_storage": 1}
    with torch.inference_mode():
        model = Parallel(linear(), linear())
        fast = merged(model)
        agree(fast, model, torch.device("cpu"))
        assert apart(fast) == {"inference_tensor": 1}


def test_replaced_weight_is_refused_by_name_where_its_neighbour_has_another_holder(
    device: torch.device,
) -> None:
    model = Llama().to(device)
    fast = merged(model, cuda_graphs="off")
    agree(fast, model, device, [3])
    held = model.layers[0].v.weight.detach()
    replace_data(model.layers[0].q)
    with pytest.raises(MergedWeightsError, match=r"layers\.0\.k\.weight.*shared_storage"):
        fast(rows(3, device))
    model.layers[0].v.weight.fill_(0.5)
    assert bool((held == 0.5).all())
    del held
    agree(fast, model, device, [3])


def test_two_models_of_one_trace_have_merged_weights_of_their_own(device: torch.device) -> None:
    one, two = Llama().to(device), Llama().to(device)
    options = {"compiler": "eager", "capture_sizes": tuple(SIZES), "merge_linears": True}
    with pg.counters.expect(traces=3):  # fixed shapes, dynamic ones, one token
        first = torch.compile(one, backend="piecewise", options=options)
        agree(first, one, device)
    with pg.counters.expect(traces=0):
        second = torch.compile(two, backend="piecewise", options=options)
        agree(second, two, device)
        agree(first, one, device)
    assert not set(storages(one)) & set(storages(two))
    assert len(storages(one)) == len(storages(two)) == 2 * 4
    two.layers[0].q.weight.fill_(1.0)
    agree(second, two, device)
    agree(first, one, device)


def test_second_model_of_a_trace_whose_weights_stay_is_refused(device: torch.device) -> None:
    one, two = Llama().to(device), Llama().to(device)
    options = {"compiler": "eager", "capture_sizes": tuple(SIZES), "merge_linears": True}
    agree(torch.compile(one, backend="piecewise", options=options), one, device)
    held = two.state_dict()
    second = torch.compile(two, backend="piecewise", options=options)
    with pytest.raises(MergedWeightsError, match=r"q\.weight.*\n.*merge_linears=False"):
        second(rows(3, device))
    del held
    agree(second, two, device)


@pytest.mark.parametrize("merge_first", [False, True])
def test_merged_engine_beside_an_unmerged_one(merge_first: bool, device: torch.device) -> None:
    model = Llama().to(device)
    first = compiled(model, merge_linears=merge_first)
    agree(first, model, device)
    second = compiled(model, merge_linears=not merge_first)
    agree(second, model, device)
    fast = first if merge_first else second
    assert apart(fast) == ({} if merge_first else {"shared_storage": 4})
    renew(model)
    agree(first, model, device)
    agree(second, model, device)


def test_unmerged_engine_that_captures_after_the_merge(device: torch.device) -> None:
    model = Llama().to(device)
    plain = compiled(model, capture="explicit")
    agree(plain, model, device)
    agree(merged(model), model, device)
    pg.capture(plain, lambda n: {"x": rows(n, device)}, progress=False)
    agree(plain, model, device)


def test_two_merged_engines_share_the_memory(device: torch.device) -> None:
    model = Llama(bias=True).to(device)
    first = merged(model)
    agree(first, model, device)
    before = storages(model)
    with pg.counters.expect(merged_linears=10, unmerged_groups=0):
        second = merged(model)
        agree(second, model, device)
    assert storages(model) == before
    agree(first, model, device)
    replace_data(model.layers[0].q)
    pg.reset()
    agree(first, model, device)
    agree(second, model, device)


def test_graphs_of_another_layout_keep_their_weights(device: torch.device) -> None:
    """Two models share linears, and the second one would merge them with a third linear."""
    a, b, c = (linear().to(device) for _ in range(3))
    small, large = Parallel(a, b), Parallel(a, b, c)
    call = pg.freeze(merged(small), rows(3, device))
    agree(call, small, device)
    fast = merged(large)
    agree(fast, large, device)
    assert apart(fast) == {"shared_storage": 1}
    renew(large)
    agree(call, small, device)
    agree(fast, large, device)


def test_replacing_a_weight_of_one_model_moves_none_of_another(device: torch.device) -> None:
    b, c = linear().to(device), linear().to(device)
    one, two = Parallel(linear().to(device), b, c), Parallel(linear(), b, c).to(device)
    two.linears[0].weight = one.linears[0].weight
    call, fast = pg.freeze(merged(one), rows(3, device)), merged(two, cuda_graphs="off")
    agree(call, one, device)
    agree(fast, two, device)
    replace_parameter(two.linears[0])
    with pytest.raises(MergedWeightsError, match="shared_storage"):
        fast(rows(3, device))
    renew(two)
    agree(call, one, device)
    del call
    gc.collect()
    agree(fast, two, device)


def test_weights_go_from_one_layout_to_another_where_no_graph_holds_them(device: torch.device) -> None:
    a, b, c = (linear().to(device) for _ in range(3))
    first = merged(Parallel(a, b), cuda_graphs="off")
    agree(first, Parallel(a, b), device)
    second = merged(Parallel(b, c), cuda_graphs="off")
    for _ in range(2):
        agree(second, Parallel(b, c), device)
        agree(first, Parallel(a, b), device)
    assert groups(first) == groups(second) == {"0+1": 1}


def test_copies_of_a_model_are_models_of_their_own(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    other = copy.deepcopy(model)
    renew(other)
    agree(merged(other), other, device)
    agree(fast, model, device)
    assert not set(storages(model)) & set(storages(other))
