"""The functions of `_torch` that read Dynamo graphs do what they say on the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from traced import TABLE, Small, Traced, dynamic, first_size, placeholders, trace

from piecewise_graph import _torch

pytestmark = pytest.mark.usefixtures("no_grad")


# --- Dynamo's graphs ----------------------------------------------------------------------------------


def test_fake_values_shape_environment_and_expressions_of_a_graph() -> None:
    gm = trace(lambda x: x * x.shape[0] + (x.shape[0] // 2), dynamic(6, 8)).gm
    (x,) = [n for n in placeholders(gm) if isinstance(_torch.example_value(n), Tensor)]
    size = _torch.example_value(x).shape[0]
    assert isinstance(size, torch.SymInt)
    symbol = _torch.expression(size)
    assert symbol.is_Symbol
    assert _torch.expression(size // 2).free_symbols == {symbol}
    assert _torch.expression(7) == sympy.Integer(7)
    assert _torch.shape_env_of(gm) is size.node.shape_env
    assert _torch.fake_mode_of(gm) is _torch.example_value(x).fake_mode
    assert any(value is _torch.example_value(x) for value in _torch.argument_values(gm))


def test_graph_without_tensors_has_no_fake_mode() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert _torch.fake_mode_of(gm) is None
    assert _torch.shape_env_of(gm) is None


def range_of(gm: GraphModule) -> Any:
    (symbol,) = _torch.expression(first_size(gm)).free_symbols
    return _torch.value_range(_torch.shape_env_of(gm), symbol)


def test_value_range_starts_at_two_and_is_open() -> None:
    assert trace(lambda x: x * 2, dynamic(6, 8), look=range_of).seen == [(2, None)]


def test_value_range_follows_a_bound_of_the_mark() -> None:
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0, min=3, max=40)
    assert trace(lambda x: x * 2, x, look=range_of).seen == [(3, 40)]


def test_value_range_of_an_integer_argument_is_a_pair() -> None:
    """A plain int that varies has no bounds, and its range is readable."""

    def ranges(gm: GraphModule) -> list[Any]:
        symbols = [_torch.example_value(n) for n in placeholders(gm)]
        integers = [_torch.expression(s) for s in symbols if isinstance(s, torch.SymInt)]
        return [_torch.value_range(_torch.shape_env_of(gm), symbol) for symbol in integers]

    traced = trace(lambda x, n: x * n, torch.ones(4), 5, look=ranges, dynamic=True)
    assert traced.seen
    for low, high in traced.seen[-1]:
        assert low is None or isinstance(low, int)
        assert high is None or isinstance(high, int)


def test_shape_guards_show_a_branch_on_the_size() -> None:
    def guards(gm: GraphModule) -> tuple[Any, ...]:
        return _torch.shape_guards(_torch.shape_env_of(gm))

    assert trace(lambda x: x * 2, dynamic(6, 8), look=guards).seen == [()]
    (found,) = trace(lambda x: x * 2 if x.shape[0] % 4 == 2 else x, dynamic(6, 8), look=guards).seen
    assert any(guard.free_symbols for guard in found)


def test_sources_tell_weights_and_globals_from_arguments() -> None:
    def model(x: Tensor) -> Tensor:
        return x * TABLE

    def sources(gm: GraphModule) -> dict[bool, list[str]]:
        found: dict[bool, list[str]] = {True: [], False: []}
        for node in placeholders(gm):
            name, of_module = _torch.placeholder_source(node)
            found[of_module].append(name)
        return found

    (of_model,) = trace(Small(), torch.ones(2, 8), look=sources).seen  # known inside of the call only
    assert len(of_model[False]) == 1
    assert all(any(part in name for name in of_model[True]) for part in ("weight", "bias", "table"))
    (of_function,) = trace(model, torch.ones(2, 8), look=sources).seen
    assert of_function[False] == ["L['x']"]
    assert len(of_function[True]) == 1
    assert "TABLE" in of_function[True][0]


def test_source_of_a_node_that_dynamo_did_not_make_is_its_name() -> None:
    (node,) = placeholders(torch.fx.symbolic_trace(lambda x: x + 1))
    assert _torch.placeholder_source(node) == ("x", False)


def test_code_of_the_frame_is_known_inside_of_a_backend_only() -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2

    assert trace(model, torch.ones(3), look=lambda gm: _torch.current_root_code()).seen == [model.__code__]
    assert _torch.current_root_code() is None


def test_attributes_that_the_traced_code_assigns_are_named() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.kept = torch.zeros(3), torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.state + x * self.kept
            made = SimpleNamespace()
            made.value = x * 2  # belongs to an object that has no source
            return made.value + self.state

    seen = trace(Model(), torch.ones(3), look=lambda gm: _torch.assigned_attributes()).seen
    assert set().union(*seen) == {"L['self'].state"}
    assert _torch.assigned_attributes() == frozenset()
    found = trace(Model(), torch.ones(3), look=lambda gm: _torch.changed_objects()).seen
    assert set().union(*found) == {"L['self']"}
    assert _torch.changed_objects() == ()


def test_shape_env_is_found_where_a_graph_gets_sizes_alone() -> None:
    def model(x: Tensor) -> tuple[int, Tensor]:
        count = x.shape[0]
        torch._dynamo.graph_break()
        return count * 2, x

    seen = trace(model, dynamic(6, 3), look=_torch.shape_env_of).seen
    assert seen
    assert None not in seen


def test_original_callable_of_what_torch_compile_returns() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    module = Small()
    assert _torch.original_callable(torch.compile(module, backend="eager")) is module
    assert _torch.original_callable(torch.compile(function, backend="eager")) is function
    assert _torch.original_callable(3) is None


# --- errors -------------------------------------------------------------------------------------------


def test_a_module_that_is_compiled_in_place_is_told() -> None:
    model = nn.Linear(2, 2)
    assert not _torch.is_compiled_in_place(model)
    assert not _torch.is_compiled_in_place(torch.compile(model, backend="eager").forward)
    model.compile(backend="eager")
    assert _torch.is_compiled_in_place(model)


def raised_by(function: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as raised:
        function()
    return raised.value


def test_size_that_a_model_fixes_is_a_specialization_error() -> None:
    def fixed(x: Tensor) -> Tensor:
        return x.view(6, 8) + torch.ones(6, 8)

    error = raised_by(lambda: trace(fixed, dynamic(6, 8)))
    assert _torch.is_specialization_error(error)
    assert not _torch.is_specialization_error(RuntimeError("something else"))


def test_error_of_a_backend_is_found_inside_of_dynamos() -> None:
    def broken(gm: GraphModule, inputs: Any) -> Any:
        raise ZeroDivisionError("mine")

    error = raised_by(lambda: torch.compile(lambda x: x * 2, backend=broken)(torch.ones(3)))
    assert isinstance(_torch.backend_error(error), ZeroDivisionError)
    plain = ValueError()
    assert _torch.backend_error(plain) is plain


def test_shapes_that_do_not_fit_are_a_trace_error_and_running_is_not() -> None:
    error = raised_by(lambda: trace(lambda x: x @ torch.ones(3, 3), torch.ones(4, 8), fullgraph=True))
    assert _torch.is_trace_error(error)
    assert not _torch.is_trace_error(RuntimeError("while running"))


# --- completeness -------------------------------------------------------------------------------------


def test_every_function_is_held_by_a_test_here() -> None:
    public = {
        name
        for name, value in vars(_torch).items()
        if callable(value)
        and getattr(value, "__module__", "").startswith(_torch.__name__)
        and not name.startswith("_")
    }
    assert public
    files = Path(__file__).parent.glob("test_torch_gates*.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    assert not {name for name in public if f"_torch.{name}" not in source}


def test_a_number_is_told_from_a_size() -> None:
    seen: list[bool] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        size = next(value for value in inputs if isinstance(value, torch.SymInt))
        seen.append(_torch.is_constant(size))
        return gm.forward

    torch.compile(lambda x: x + x.shape[0], backend=backend, dynamic=True)(torch.ones(5))
    assert seen == [False]


def test_a_server_may_hold_more_models_of_a_class_than_dynamo_allows_for() -> None:
    _torch.raise_recompile_limit()
    assert torch._dynamo.config.recompile_limit >= 64


class Times(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


@pytest.mark.parametrize("constant", [False, True])
def test_a_number_that_differs_between_modules_is_traced_as_it_is(constant: bool) -> None:
    """Otherwise the number would be a symbol, an argument of the graph."""
    traced = Traced()
    for number in (0.5, 0.25):
        compiled = torch.compile(Times(number), backend=traced)
        with _torch.floats_stay_constants() if constant else nullcontext():
            assert compiled(torch.ones(2))[0] == number
    assert [len(inputs) for inputs in traced.inputs] == ([1, 1] if constant else [1, 2])


def test_dynamo_looks_at_every_weight() -> None:
    """Guards of a new trace notice a weight of another dtype in an unchanged module."""
    _torch.guard_every_weight()
    traced: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced.append(gm)
        return gm.forward

    model = torch.nn.Sequential(torch.nn.Embedding(4, 3))
    compiled, ids = torch.compile(model, backend=backend), torch.tensor([1, 2])
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float64):
            model[0].weight.data = model[0].weight.data.to(dtype)
            for _ in range(3):
                assert compiled(ids).dtype == dtype
    assert len(traced) == 2


def test_published_graphs_go_through_the_function_that_depyf_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(torch._dynamo.utils, "lazy_format_graph_code", lambda name, gm: shown.append(name))
    _torch.publish_graph("segment_0", torch.fx.symbolic_trace(torch.nn.ReLU()))
    assert shown == ["segment_0"]


@pytest.mark.parametrize(
    ("steered", "taken"),
    [(lambda x, k: x * k, True), (lambda x, k: x * (2 if k > 3 else 1), False), (lambda x, k: x * 2, True)],
    ids=["in the graph", "steers it", "unused"],
)
def test_sizes_that_the_graph_does_not_take_are_found(
    steered: Callable[[Tensor, int], Tensor], taken: bool
) -> None:
    found: list[bool] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(_torch.takes_all_sizes(gm))
        return gm.forward

    fast = torch.compile(steered, backend=backend, dynamic=True)
    fast(torch.ones(5), 4), fast(torch.ones(6), 3)
    assert found[-1] is taken


def test_propagation_of_fake_values_keeps_sizes_symbols() -> None:
    seen: list[tuple[Any, ...]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        env, mode = _torch.shape_env_of(gm), _torch.fake_mode_of(gm)
        (x,) = [value for value in _torch.argument_values(gm) if isinstance(value, Tensor)]
        rows, columns = map(_torch.expression, x.shape)
        with mode:
            given = torch.empty(_torch.size_of(env, sympy.Integer(3)), _torch.size_of(env, columns))
        values = [given if isinstance(v, Tensor) else v for v in _torch.argument_values(gm)]
        _torch.propagate_fake(gm, values, mode)
        (made,) = _torch.returned_values(gm)
        seen.append((rows.is_Symbol, made.shape[0], _torch.expression(made.shape[1]) == columns))
        return gm.forward

    torch.compile(lambda x: x * 2, backend=backend, dynamic=True)(torch.ones(5, 7))
    assert seen == [(True, 3, True)]


def test_conditions_on_sizes_are_undone() -> None:
    def undone(gm: GraphModule) -> tuple[bool, bool]:
        env, size = _torch.shape_env_of(gm), first_size(gm)
        before = _torch.shape_guards(env), range_of(gm)
        with _torch.conditions_undone(env):
            is_assumed = size < 40 and (_torch.shape_guards(env), range_of(gm)) != before
        return is_assumed, (_torch.shape_guards(env), range_of(gm)) == before

    assert trace(lambda x: x * 2, dynamic(6, 8), look=undone).seen == [(True, True)]
