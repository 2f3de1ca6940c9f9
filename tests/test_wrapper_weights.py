"""Weights that are made of other tensors (torchao's, DTensor) are captured by what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from toys import WIDTH, Blocks, assert_same, compiled, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


class Quantised(Tensor):
    """A weight of 8-bit integers and a scale per row, as torchao has them.

    Args:
        whole: quantise what the linear is given by its largest element, over all tokens; else leave it.
    """

    def __new__(cls, data: Tensor, scale: Tensor, whole: bool) -> Quantised:
        kind: Any = Tensor
        made: Quantised = kind._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)
        return made

    def __init__(self, data: Tensor, scale: Tensor, whole: bool) -> None:
        self.data_, self.scale_, self.whole = data, scale, whole

    @classmethod
    def of(cls, weight: Tensor, whole: bool = False) -> Quantised:
        scale = weight.abs().amax(1) / 127
        return cls((weight / scale[:, None]).round().to(torch.int8), scale, whole)

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["data_", "scale_"], self.whole

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], whole: bool, size: Any, stride: Any) -> Quantised:
        return cls(inner["data_"], inner["scale_"], whole)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return cls.linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].data_, args[0].scale_, args[0].whole)
        raise NotImplementedError(f"{func} of a quantised weight")

    @staticmethod
    def linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
        if weight.whole:
            step = x.abs().amax() / 7
            x = (x / step).round() * step
        return functional.linear(x, weight.data_.to(x.dtype) * weight.scale_[:, None], bias)


class Marked(Quantised):
    """What it does depends on the type of its mark, and on what a list of marks holds."""

    @staticmethod
    def linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
        mark: Any = weight.whole
        by = sum(mark) if isinstance(mark, list) else {bool: 2.0, int: 3.0, float: 4.0}[type(mark)]
        return functional.linear(x, weight.data_.to(x.dtype) * weight.scale_[:, None], bias) * by


class Pair(Tensor):
    """A wrapper of wrappers: a weight in two halves of rows."""

    def __new__(cls, upper: Tensor, lower: Tensor) -> Pair:
        kind: Any = Tensor
        shape = (upper.shape[0] + lower.shape[0], upper.shape[1])
        made: Pair = kind._make_wrapper_subclass(cls, shape, dtype=upper.dtype, device=upper.device)
        return made

    def __init__(self, upper: Tensor, lower: Tensor) -> None:
        self.upper, self.lower = upper, lower

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["upper", "lower"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["upper"], inner["lower"])

    __torch_function__ = classmethod(Quantised.__torch_function__.__func__)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Pair(args[0].upper, args[0].lower)
        raise NotImplementedError(f"{func} of a pair")

    @staticmethod
    def linear(x: Tensor, weight: Pair, bias: Tensor | None = None) -> Tensor:
        halves = [Quantised.linear(x, half) for half in (weight.upper, weight.lower)]  # type: ignore[arg-type]
        return torch.cat(halves, -1) if bias is None else torch.cat(halves, -1) + bias


def pair(weight: Tensor) -> Pair:
    upper, lower = weight.chunk(2)
    return Pair(Quantised.of(upper), Quantised.of(lower))


def per_tensor(weight: Tensor) -> Quantised:
    return Quantised.of(weight, whole=True)


KINDS = {"rows": Quantised.of, "nested": pair, "whole": per_tensor}


def quantise(model: nn.Module, kind: Callable[[Tensor], Tensor]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()), requires_grad=False)
    return model


def blocks(kind: str, device: torch.device, layers: int = 2) -> nn.Module:
    return quantise(Blocks(layers=layers).to(device), KINDS[kind])


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["rows", "nested"])
def test_layers_share_one_structure_and_are_replayed(kind: str, compiler: str, device: torch.device) -> None:
    model = blocks(kind, device, layers=4)
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler)
    with pg.counters.expect(traces=1, compiles=3, tapes=2, replays=3, fallbacks=0, unpadded_segments=0):
        for n in (5, 3, 5, 7, 8):
            x = rows(n, device)
            same(fast(x), model(x))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_proof_sees_the_ops_of_the_wrapper(compiler: str, device: torch.device) -> None:
    """A maximum over all tokens must not see the rows of padding."""
    model = blocks("whole", device)
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler)
    for n in (5, 3, 5, 7, 8, 1):
        x = rows(n, device)
        same(fast(x), model(x))
    assert pg.counters.snapshot()["unpadded_segments"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_weight_is_made_of_is_read_where_it_lies(kind: str, device: torch.device) -> None:
    model = blocks(kind, device)
    fast, x = compiled(model, token_dim={"x": 0}), rows(5, device)
    fast(x)
    weight: Any = model.linears[1].weight  # type: ignore[index, union-attr]
    inner = weight.upper.scale_ if kind == "nested" else weight.scale_
    inner.mul_(3.0)
    with pg.counters.expect(captures=0, replays=1):
        same(fast(x), model(x))


def test_another_weight_gets_graphs_of_its_own(device: torch.device) -> None:
    model = blocks("rows", device)
    fast, x = compiled(model, token_dim={"x": 0}), rows(5, device)
    fast(x)
    linear: Any = model.linears[0]  # type: ignore[index]
    linear.weight = nn.Parameter(Quantised.of(torch.randn(linear.weight.shape, device=device)), False)
    with pg.counters.expect(tapes=1, replays=2, fallbacks=0):
        for _ in range(3):
            same(fast(x), model(x))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_marks_that_are_equal_to_python_are_told_apart(compiler: str, device: torch.device) -> None:
    model = Blocks(layers=3).to(device)
    for linear, mark in zip(model.linears, (1, True, 1.0), strict=True):
        weight: Any = Marked.of(linear.weight.detach(), mark)  # type: ignore[arg-type]
        linear.weight = nn.Parameter(weight, requires_grad=False)
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler)
    for n in (5, 3, 5, 8):
        x = rows(n, device)
        same(fast(x), model(x))


def test_a_mark_that_is_changed_in_place_is_compiled_anew(device: torch.device) -> None:
    model, marks = Blocks(layers=2).to(device), ([1], [2])
    for linear, mark in zip(model.linears, marks, strict=True):
        weight: Any = Marked.of(linear.weight.detach(), mark)  # type: ignore[arg-type]
        linear.weight = nn.Parameter(weight, requires_grad=False)
    fast = compiled(model, token_dim={"x": 0}, compiler="aot_eager")
    for n, first in ((5, 1), (3, 1), (5, 7), (3, 7)):
        marks[0][0], x = first, rows(n, device)
        same(fast(x), model(x))


def test_models_of_wrappers_alone_keep_their_own(device: torch.device) -> None:
    models = [
        quantise(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()).to(device), Quantised.of)
        for _ in range(3)
    ]
    fast = [compiled(model, token_dim={"input": 0}) for model in models]
    for n in (5, 7, 5):
        for run, model in zip(fast, models, strict=True):
            x = rows(n, device)
            same(run(x), model(x))
    assert pg.counters.snapshot()["fallbacks"] == 0


def test_all_that_a_compiled_model_can_do_goes_on(device: torch.device) -> None:
    model = blocks("rows", device)
    fast, x = compiled(model, token_dim={"x": 0}), rows(5, device)
    fast(x)
    assert pg.plan(fast, [8]).buckets
    assert pg.bisect(fast, x).departure is None
    frozen = pg.freeze(fast, x)
    pg.capture(fast, lambda n: rows(n, device), progress=False)
    for n in (5, 3, 8):
        x = rows(n, device)
        assert_same(frozen(x), fast(x))


class Crossing(nn.Module):
    """The weight of its linear is a value that an op stands between."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach()
        x = ops.mix(functional.linear(x, weight))
        return functional.linear(x, weight)


def test_wrappers_that_cannot_be_taken_apart_are_named(device: torch.device) -> None:
    """One that the caller passes, and one that crosses a cut."""
    weight = Quantised.of(torch.randn(WIDTH, WIDTH, device=device))
    crossing = Crossing(weight)
    linear = compiled(lambda x, w: functional.relu(functional.linear(x, w)), token_dim={"x": 0})
    cut = compiled(crossing, token_dim={"x": 0})
    for n in (5, 5, 8):
        x = rows(n, device)
        same(linear(x, weight), functional.linear(x, weight).relu())
        same(cut(x), crossing(x))
    assert pg.counters.snapshot()["fallbacks:tensor_subclass"] == 6


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_tensor_parallel_weights_are_captured(compiler: str, mesh: DeviceMesh) -> None:
    """Weights are DTensors, which hold a device mesh, and a row-parallel linear ends with an all-reduce."""
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert isinstance(model[0].weight, DTensor)
    fast = compiled(model, token_dim={"input": 0}, compiler=compiler)
    with pg.counters.expect(traces=1, tapes=2, replays=3, fallbacks=0, unpadded_segments=0):
        for n in (5, 3, 6, 4, 8):
            x = torch.randn(n, WIDTH)
            same(fast(x), model(x))
