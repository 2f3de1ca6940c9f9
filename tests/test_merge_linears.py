"""merge_linears: parallel linears as one, parameters as views of merged weights, and nothing moved unseen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import (
    check_weights,
    contract,
    merged_parameters,
    merged_tensors,
    no_memory_for_rows,
    pool_of,
    results_are_strided,
)
from paged_generation import Generator
from torch import Tensor, nn
from torch.nn import functional as F
from toys import COUNTS, SIZES, assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, ConfigError, MergedWeightsError

WIDTH = 8


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """Grouped-query attention in outline, and a gated feed-forward: 2 groups, of 3 and 2 linears."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 16, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, 8, bias=bias) for _ in range(2))
        self.o = nn.Linear(16, WIDTH, bias=bias)
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=bias) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x + self.o(ops.mix(q * torch.cat([k, v], -1)))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, *, bias: bool = False, shared: bool = False) -> None:
        super().__init__()
        made = [Layer(bias=bias) for _ in range(1 if shared else layers)]
        self.layers = nn.ModuleList(made * layers if shared else made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Parallel(nn.Module):
    """`linears` of one input, their results side by side."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mix(torch.cat([linear(x) for linear in self.linears], -1))


def linear(out_features: int = 8, *, bias: bool = False, width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, out_features, bias=bias)


def merged(model: Any, **options: Any) -> Any:
    return compiled(model, merge_linears=True, **options)


def apart(fast: Any) -> dict[str, int]:
    return pg.explain(fast).traces[0].apart


def groups(fast: Any) -> dict[str, int]:
    return pg.explain(fast).traces[0].merged


def storages(model: nn.Module) -> dict[int, int]:
    """Storage -> bytes, of all parameters."""
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def renew(model: nn.Module) -> None:
    """Write new weights in place."""
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.3)


def agree(fast: Any, model: Any, device: torch.device, counts: Any = COUNTS) -> None:
    for count in counts:
        x = rows(count, device, WIDTH)
        assert_same(fast(x.clone()), model(x.clone()))


# --- right answers, and what is merged --------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_groups_of_a_decoder_run_as_one_linear_each(bias: bool, device: torch.device) -> None:
    layers = 3
    model = Llama(layers, bias=bias).to(device)
    fast = merged(model)
    with pg.counters.expect(
        traces=1, segments=layers + 1, compiles=3, merged_linears=layers * (3 + 2), unmerged_groups=0, tapes=2
    ):
        agree(fast, model, device)
    assert groups(fast) == {"q+k+v": layers, "gate+up": layers}
    assert f"merged: {2 * layers} groups of {5 * layers} linears (q+k+v, gate+up)" in str(pg.explain(fast))


def test_is_off_unless_asked_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Llama().to(device)
    before = storages(model)
    with pg.counters.expect(merged_linears=0):
        agree(compiled(model), model, device)
    assert storages(model) == before
    monkeypatch.setenv("PIECEWISE_GRAPH_MERGE_LINEARS", "True")
    with pg.counters.expect(merged_linears=10):
        agree(torch.compile(model, backend="piecewise", options={"compiler": "eager"}), model, device, [3, 4])


def test_option_is_a_boolean() -> None:
    with pytest.raises(ConfigError, match=r"merge_linears='yes'.*\n.*True or False"):
        compiled(Llama(), merge_linears="yes")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_segments_are_right(compiler: str, mode: Any, device: torch.device) -> None:
    model = Llama(bias=True).to(device)
    with mode(), pg.counters.expect(merged_linears=10, compiles=3):
        agree(merged(model, compiler=compiler), model, device, (1, 3, 4, 8, 9))


def test_under_inference_mode_weights_stay_ordinary_tensors(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model)
    with torch.inference_mode():
        agree(fast, model, device)
    assert not any(p.is_inference() for p in model.parameters())
    renew(model)  # refused for inference tensors
    agree(fast, model, device)


@pytest.mark.parametrize("name", models.NAMES)
def test_unmodified_models(name: str, device: torch.device) -> None:
    layers = 2
    linears = {"mixtral": 3, "bert": 3, "phi3": 0, "gpt2": 0}.get(name, 5)
    model = models.build(name, layers, device)
    fast = pg.compile(model, compiler="eager", capture_sizes=[4, 16], max_tokens=16, merge_linears=True)
    with pg.counters.expect(traces=1, segments=layers + 1, merged_linears=layers * linears, compiles=3):
        for count in (1, 3, 4, 9, 16, 20, 2):  # the first call has one token
            arguments = models.call(name, models.random_ids(count, device=device))
            found, wanted = models.rows(fast(**arguments)), models.rows(model(**arguments))
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def generated(device: torch.device, **options: Any) -> list[list[int]]:
    model = models.build("llama", 2, device)
    model.set_attn_implementation("piecewise-torch")
    fast = pg.compile(model, compiler="aot_eager", capture_sizes=[1, 2, 4, 8], max_tokens=64, **options)
    maker = Generator(fast, model.config, device=device, dtype=torch.float32, full=True)
    with pg.counters.expect(merged_linears=10 if options else 0):
        return maker.run([[5, 9, 2], [7] * 6, [3]], [6, 4, 7], stagger=1)


def test_full_graphs_of_registered_attention(device: torch.device) -> None:
    pg.register_attention("piecewise-torch", "torch")
    assert generated(device, merge_linears=True) == generated(device)
    counts = pg.counters.snapshot()
    assert counts["full_replays"] > 0
    assert counts["not_full"] == 0


def test_conditions_on_sizes_are_those_of_the_model(device: torch.device) -> None:
    contracts = []
    for merge in (False, True):
        model = models.build("llama", 2, device)
        fast = pg.compile(model, compiler="eager", capture_sizes=[4], merge_linears=merge)
        fast(**models.call("llama", models.random_ids(3, device=device)))
        contracts.append(contract(fast))
    assert [str(c.guards) for c in contracts] == [str(contracts[0].guards)] * 2
    assert contracts[0].ranges == contracts[1].ranges


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    width=st.sampled_from([4, 8, 20]),
    tokens=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    bias=st.booleans(),
)
def test_any_sizes(sizes: list[int], width: int, tokens: int, dtype: torch.dtype, bias: bool) -> None:
    torch._dynamo.reset()
    model = Parallel(*(linear(4 * size, bias=bias, width=width) for size in sizes)).to(dtype)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(tokens, width, dtype=dtype)
    wanted = model(x)
    fast = merged(model)
    for _ in range(2):
        torch.testing.assert_close(fast(x), wanted, rtol=1e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-4)
    starts = [sum(sizes[:index]) * 4 * width * dtype.itemsize for index in range(1, len(sizes))]
    starts += [sum(sizes[:index]) * 4 * dtype.itemsize for index in range(1, len(sizes))] if bias else []
    aligned = not any(start % 16 for start in starts)
    assert apart(fast) == ({} if aligned else {"unaligned": 1})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# --- what stays apart -------------------------------------------------------------------------------------


def test_shared_layers_share_their_merged_weights(device: torch.device) -> None:
    layers = 3
    model = Llama(layers, bias=True, shared=True).to(device)
    with pg.counters.expect(merged_linears=layers * 5, unmerged_groups=0):
        agree(merged(model), model, device)
    assert len(storages(model)) == 2 * (2 + 2)  # o and down; q/k/v and gate/up: weight and bias of each


def test_weights_in_another_tuple_stay_apart(device: torch.device) -> None:
    a, b, c = (linear() for _ in range(3))

    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = a, b, c

        def forward(self, x: Tensor) -> Tensor:
            x = ops.mix(self.a(x) + self.b(x))
            x = ops.mix(self.b(x) * self.c(x))
            return ops.mix(self.a(x) - self.b(x))

    model = Overlapping().to(device)
    fast = merged(model)
    with pg.counters.expect(merged_linears=4, **{"unmerged_groups:weight_used_twice": 1}):
        agree(fast, model, device)


def test_one_weight_twice_stays_apart(device: torch.device) -> None:
    model = Parallel(linear(), linear())
    model.linears[1].weight = model.linears[0].weight
    fast = merged(model.to(device))
    agree(fast, model, device)
    assert apart(fast) == {"weight_used_twice": 1}


def test_weight_that_is_read_elsewhere_stays_apart(device: torch.device) -> None:
    class Tied(Parallel):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.linears[0].weight.sum())

    model = Tied(linear(), linear()).to(device)
    fast = merged(model)
    agree(fast, model, device)
    assert apart(fast) == {"weight_read_elsewhere": 1}


def test_linear_whose_result_lies_otherwise_stays_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel of today makes one."""
    results_are_strided(monkeypatch)
    model = Parallel(linear(), linear()).to(device)
    before, fast = storages(model), merged(model)
    agree(fast, model, device)
    assert apart(fast) == {"strided_output": 1}
    assert storages(model) == before


def in_place(x: Tensor, a: nn.Linear, b: nn.Linear) -> Tensor:
    y = a(x)
    x.mul_(2)
    return ops.mix(y + b(x))


def across_a_cut(x: Tensor, a: nn.Linear, b: nn.Linear) -> Tensor:
    return ops.mix(a(x)) + b(x)


def item(x: Tensor, a: nn.Linear, b: nn.Linear) -> Tensor:
    y = a(x)
    x[:, 0] = 1.0
    return ops.mix(y + b(x))


def across_autocast(x: Tensor, a: nn.Linear, b: nn.Linear) -> Tensor:
    y = a(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        z = b(x)
    return ops.mix(y + z.float())


@pytest.mark.parametrize("forward", [in_place, item, across_a_cut, across_autocast])
def test_linears_of_two_regions_are_no_group(forward: Callable[..., Tensor], device: torch.device) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return forward(x * 1, self.a, self.b)

    model = Two().to(device)
    fast = merged(model)
    with pg.counters.expect(merged_linears=0, unmerged_groups=0):
        for count in COUNTS:
            x = rows(count, device)
            torch.testing.assert_close(fast(x.clone()), model(x.clone()), rtol=2e-2, atol=2e-2)


def test_within_an_autocast_region(device: torch.device) -> None:
    class Cast(Parallel):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                both = [linear(x) for linear in self.linears]
            return ops.mix(torch.cat(both, -1).float())

    model = Cast(linear(), linear()).to(device)
    fast = merged(model)
    with pg.counters.expect(merged_linears=2):
        for count in COUNTS:
            x = rows(count, device)
            torch.testing.assert_close(fast(x), model(x), rtol=2e-2, atol=2e-2)


def test_results_may_be_written_returned_and_asked_for_strides(device: torch.device) -> None:
    class Strides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            a, b, c = self.a(x), self.b(x), self.c(x)
            a.mul_(2)
            flat = b.view(-1) + a.as_strided((x.shape[0] * WIDTH,), (1,))
            return ops.mix(a + b), flat.view(-1, WIDTH), c, b

    model = Strides().to(device)
    fast = merged(model)
    with pg.counters.expect(merged_linears=3):
        agree(fast, model, device)


def test_linears_without_tokens_or_parameters_are_left_alone(device: torch.device) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()
            self.register_buffer("table", torch.randn(8, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.table) + F.linear(x, self.a.weight * 2) + F.linear(x, weight=self.b.weight)
            return ops.mix(y)

    model = Plain().to(device)
    with pg.counters.expect(merged_linears=0, unmerged_groups=0):
        agree(merged(model), model, device)


# --- parameters -------------------------------------------------------------------------------------------


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


def replace_data(linear: nn.Linear) -> None:
    linear.weight.data = torch.randn_like(linear.weight)


def replace_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))


@pytest.mark.parametrize("replace", [replace_data, replace_parameter])
def test_replaced_weights_raise_by_name_until_reset(
    replace: Callable[[nn.Linear], None], device: torch.device
) -> None:
    model = Llama().to(device)
    fast = merged(model)
    agree(fast, model, device)
    replace(model.layers[1].k)
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


# --- who else holds a weight ------------------------------------------------------------------------------


def state_dict(model: nn.Module) -> Any:
    return model.state_dict()


def detached(model: nn.Module) -> Any:
    return model.layers[0].k.weight.detach()


def storage(model: nn.Module) -> Any:
    return model.layers[0].k.weight.untyped_storage()


def part(model: nn.Module) -> Any:
    return model.layers[0].k.weight.data[2:]


@pytest.mark.parametrize("hold", [state_dict, detached, storage, part])
def test_weight_that_somebody_holds_is_not_moved(hold: Callable[[nn.Module], Any]) -> None:
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


def test_replaced_weight_whose_neighbour_somebody_holds_is_refused_by_name(device: torch.device) -> None:
    model = Llama().to(device)
    fast = merged(model, cuda_graphs="off")
    agree(fast, model, device, [3])
    held = model.layers[0].v.weight.detach()
    replace_data(model.layers[0].q)
    with pytest.raises(MergedWeightsError, match=r"layers\.0\.k\.weight.*shared_storage"):
        fast(rows(3, device))
    model.layers[0].v.weight.fill_(3.0)
    assert bool((held == 3.0).all())
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
    """Two models share linears; the second would merge them with one more."""
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


# --- memory -----------------------------------------------------------------------------------------------


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
    """Graphs hold the merged tensors; without them only the parameters do."""
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


# --- on a GPU ---------------------------------------------------------------------------------------------


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
