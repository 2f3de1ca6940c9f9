"""Calls that once gave a wrong answer."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from internals import replace_linear_choice, replace_segment_timing
from torch import Tensor, nn
from torch.nn import functional as F
from toys import assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.errors import MergedWeightsError

pytestmark = pytest.mark.usefixtures("no_grad")
CPU = torch.device("cpu")


class Calls(nn.Module):
    """Two linears and the given `forward`."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.run = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def exact(model: nn.Module, *, compiler: str = "inductor", **options: Any) -> Any:
    return pg.compile(
        model, capture_sizes=[1, 4], max_tokens=4, token_dim={"x": 0}, compiler=compiler, **options
    )


def agrees(call: Any, model: nn.Module, counts: tuple[int, ...] = (3, 1, 1, 4, 1)) -> None:
    for count in counts:
        x = rows(count, CPU)
        given = x.clone()
        torch.testing.assert_close(call(x=given), model(x.clone()), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(given, x, msg="the caller's tensor was written")


@pytest.mark.slow
def test_exact_code_keeps_a_clone_that_is_written() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        y = torch.clone(torch.narrow(x, -1, 0, 4))
        y.add_(100.0)
        h = ops.mix_padded(torch.cat([y, y], -1))
        return self.a(x) + h

    model = Calls(run)
    agrees(exact(model, specialize=[1]), model)


def test_exact_code_does_not_hand_inputs_to_ops_that_write() -> None:
    def run(self: Any, x: Tensor) -> Any:
        y = ops.mix_padded(self.a(x))
        z = torch.clone(torch.narrow(x, -1, 0, 4))
        torch.ops.toy.halve(z)
        return y + x, z

    model = Calls(run)
    agrees(exact(model, specialize=[1]), model)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "positional": lambda x: F.relu(x, True),
    "silu": nn.SiLU(inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, -0.1, 0.1, True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1, True),
}


@pytest.mark.parametrize("write", IN_PLACE)
def test_linears_are_not_drawn_over_a_write(write: str) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        x = x * 1.0
        first = self.a(x)
        IN_PLACE[write](x)
        return ops.mix_padded(first + 2 * self.b(x))

    model = Calls(run)
    agrees(exact(model, compiler="eager", merge_linears=True), model)


def test_a_segment_that_only_writes_in_place_is_run() -> None:
    def run(self: Any, x: Tensor) -> Any:
        h = self.a(x)
        y = ops.mix_padded(h)
        F.hardtanh(h, -0.1, 0.1, True)
        return y, h

    model = Calls(run)
    agrees(exact(model, compiler="eager"), model)


@pytest.mark.parametrize("merge", [False, True])
def test_rebind_after_one_parameter_was_replaced(merge: bool) -> None:
    model = nn.Sequential(*(Calls(lambda self, x: ops.mix(self.a(x) * self.b(x))) for _ in range(2)))
    fast = pg.compile(
        model, token_dim={"input": 0}, compiler="eager", capture_sizes=[4], max_tokens=4, merge_linears=merge
    )
    fast(rows(4, CPU)), fast(rows(4, CPU))
    call = pg.freeze(fast, rows(4, CPU))
    model[0].b.weight = nn.Parameter(torch.randn(8, 8))
    call.rebind()
    x = rows(4, CPU)
    torch.testing.assert_close(call(x), model(x))


def test_third_model_of_a_trace_that_shares_a_layer_is_refused_by_name() -> None:
    """The shared weight lies in the first model's merged tensor; the trace expects it in another."""
    models = [Calls(_pair) for _ in range(3)]
    models[2].a = models[0].a
    options = {"capture_sizes": [1, 4], "max_tokens": 4, "compiler": "eager", "merge_linears": True}
    calls = [torch.compile(model, backend="piecewise", options=options) for model in models]
    agrees(calls[0], models[0])
    agrees(calls[1], models[1])
    with pytest.raises(MergedWeightsError, match=r"(?s)a\.weight.*merge_linears=False"):
        calls[2](x=rows(4, CPU))
    agrees(calls[0], models[0])


def _pair(self: Any, x: Tensor) -> Tensor:
    return ops.mix(self.a(x) * self.b(x))


def test_strided_bias_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    replace_linear_choice(monkeypatch, lambda *given: asked.append(given))
    model = Calls(lambda self, x: ops.mix_padded(F.linear(x, self.a.weight, self.bias)))
    model.register_buffer("bias", torch.zeros(16)[::2])
    agrees(exact(model, specialize=[1]), model)
    assert not asked


def test_traces_of_fixed_shapes_are_specialized_too() -> None:
    """Plain torch.compile traces one token and the first size with fixed shapes."""
    model = Calls(lambda self, x: ops.mix_padded(self.a(x)) + x)
    options = {"capture_sizes": [1, 4], "max_tokens": 4, "specialize": [1]}
    call = torch.compile(model, backend="piecewise", options=options)
    agrees(call, model, (4, 3, 1, 1))
    fixed = [trace for trace in pg.explain(call).traces if trace.sizes == "fixed shapes" and trace.exact]
    assert [list(trace.exact) for trace in fixed] == [[1]]


def test_segments_that_write_what_they_are_given_are_timed_and_specialized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def microseconds(call: Callable[[], Any]) -> float:
        call()
        return 1.0

    replace_linear_choice(monkeypatch, lambda *_: {"16 16 2 4 1": 1.0, "library": 1.0})
    replace_segment_timing(monkeypatch, microseconds)

    def run(self: Any, x: Tensor) -> Tensor:
        h = ops.mix_padded(self.a(x))
        h.add_(1.0)
        return ops.mix_padded(self.b(h)) + h

    model = Calls(run)
    call = exact(model, specialize=[4])
    with pg.counters.expect(not_specialized=0):
        agrees(call, model)


# --- dependent launches: Inductor's Triton code, generated for a CPU that it is told launches dependents ----


@pytest.fixture
def triton_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    pytest.importorskip("triton")
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.graph import GraphLowering

    honest, found = GraphLowering.codegen, []

    class Enough(Exception):
        pass

    def codegen(self: Any) -> Any:
        found.append(honest(self)[0].value)
        raise Enough

    monkeypatch.setattr(TritonKernel, "_enable_pdl_codegen", staticmethod(lambda: True))
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda: "none")
    monkeypatch.setattr(GraphLowering, "codegen", codegen)

    def make(run: Callable[..., Any], *args: Tensor) -> list[str]:
        torch._dynamo.reset()
        with (
            config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1, size_asserts=False),
            _torch.kernels_wait_first(),
            pytest.raises(Exception, match="Enough"),
        ):
            torch.compile(run)(*args)
        return re.split(r"\ndef (?=triton_)", found.pop())[1:]

    yield make
    torch._dynamo.reset()


def _scatter(x: Tensor, index: Tensor, value: Tensor) -> Tensor:
    return torch.cos(torch.sin(x).scatter(1, index, value))


def _argmax_of_one(x: Tensor) -> Any:
    return torch.cumsum(torch.sin(x), 1), x.argmax(0)


def _reused(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Any:
    """The last kernel writes in a loop to memory of a dead buffer, which the kernel before it reads."""
    first = torch.sin((z @ w).view(64, 128)).transpose(0, 1).contiguous().cumsum(1)[:, -1]
    total = x + y
    return first, total @ w, (total * torch.rsqrt((total * total).mean(-1, keepdim=True) + 1e-6)) @ w


@pytest.mark.parametrize("case", ["scatter", "argmax", "reuse"])
def test_kernels_wait_before_they_touch_memory(case: str, triton_code: Callable[..., list[str]]) -> None:
    if case == "scatter":
        sources = triton_code(_scatter, torch.randn(4, 64), torch.randint(0, 64, (4, 3)), torch.randn(4, 3))
        sources = sources[2:]  # those before it may read early: inputs, and nothing that was just written
    elif case == "argmax":
        sources = triton_code(_argmax_of_one, torch.randn(1, 64))
    else:
        sources = triton_code(_reused, *(torch.randn(n, 8192) for n in (1, 1, 1, 8192)))
    assert sources
    for source in sources:
        start, wait = source.find("gdc_launch_dependents"), source.find("gdc_wait")
        assert 0 <= start < wait < min(m.start() for m in re.finditer(r"tl\.(load|store|atomic)", source))


class Scaled(nn.Module):
    """A splitting op takes a number of the module, as attention takes its scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[None]
        return F.scaled_dot_product_attention(q, q, q, scale=self.scale)[0] + x


def test_models_of_a_class_that_differ_in_a_number_are_each_captured() -> None:
    """Dynamo makes a symbol of a number that differed before; a symbolic float cannot cross a cut."""
    for scale in (0.5, 0.25, 0.125):
        model = Scaled(scale)
        fast = pg.compile(model, compiler="eager", capture_sizes=[4], max_tokens=4, token_dim={"x": 0})
        with pg.counters.expect(traces=1, tapes=1, replays=2, fallbacks=0):
            agrees(fast, model, counts=(4, 3, 4))


def as_strided(h: torch.Tensor) -> Any:
    return torch.as_strided_(h, (8, 8), (1, 8))


SHAPES_CHANGED: dict[str, Any] = {
    "method": lambda h: h.t_(),
    "swapped": lambda h: h.swapaxes_(0, 1),
    "packet": torch.ops.aten.t_,
    "overload": torch.ops.aten.transpose_.default,
    "function": as_strided,
}


@pytest.mark.parametrize(
    "before", [lambda x: x * 2, lambda x: ops.mix(x) + 1, ops.mix], ids=["own", "sum", "op"]
)
@pytest.mark.parametrize("name", SHAPES_CHANGED)
def test_a_shape_that_is_changed_in_place(name: str, before: Any, device: torch.device) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        h = before(x)
        change(h, 0, 1) if name == "overload" else change(h)
        return ops.mix(h.flip(1).contiguous()) + h

    change = SHAPES_CHANGED[name]
    fast = compiled(model)
    for count in (8, 8, 8, 8) if name == "function" else (8, 5, 8, 5, 8, 8):
        x = rows(count, device)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("change", SHAPES_CHANGED.values(), ids=SHAPES_CHANGED)
def test_a_shape_that_is_changed_in_place_on_a_view_of_an_argument(change: Any, device: torch.device) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.view(-1, 4, 2)[:, :, 0]
        change(h, 0, 1) if change is SHAPES_CHANGED["overload"] else change(h)
        return ops.mix(x * 2), h

    fast = compiled(model)
    for count in (8, 8) if change is as_strided else (8, 5, 8, 5):
        x = rows(count, device)
        made, view = fast(x)
        assert_same((made, view), model(x))
        x.mul_(2)
        assert_same(view, model(x)[1])


def test_methods_of_operators_are_no_changes_of_shape(device: torch.device) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.mix(x.__ne__(x[:1]).__and__(operator.eq(x, x)) * x)

    fast = compiled(model)
    with pg.counters.expect(traces=1, fallbacks=0):
        agrees(fast, model, counts=(4, 3, 8))
