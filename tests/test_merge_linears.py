"""merge_linears: which parallel linears run as one, and which stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import (
    contract,
    results_are_strided,
)
from merge_cases import WIDTH, Llama, Parallel, agree, apart, groups, linear, merged, renew, storages
from paged_generation import Generator
from torch import Tensor, nn
from torch.nn import functional as F
from toys import COUNTS, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- right answers, and what is merged ----------------------------------------------------------------


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
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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


# --- what stays apart ---------------------------------------------------------------------------------


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
    """No kernel of today returns such a result."""
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
