"""The functions of `_torch` that compile do what they say on the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule
from traced import Small, dynamic, first_size, placeholders, trace

import piecewise_graph as pg
from piecewise_graph import _torch

pytestmark = pytest.mark.usefixtures("no_grad")


# --- compilers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_compiled_segment_serves_all_sizes_and_returns_a_sequence(
    compiler: str, device: torch.device
) -> None:
    """The segment is compiled inside the backend call, as in the library."""
    made: list[Any] = []

    def look(gm: GraphModule) -> None:
        from piecewise_graph.splitter.split import split

        (step,) = split(gm).segments
        inputs = [_torch.example_value(n) for n in placeholders(step.gm)]
        made.append(_torch.compile_segment(step.gm, inputs, compiler))

    trace(lambda x: x.sin() * 2 + 1, dynamic(6, 8, device=device), look=look)
    for count in (6, 3, 1, 40):
        x = torch.randn(count, 8, device=device)
        (found,) = made[0](x, count)
        torch.testing.assert_close(found, x.sin() * 2 + 1)
    assert ("def call(" in (_torch.generated_code(made[0]) or "")) == (compiler == "inductor")


def test_settings_of_inductor_hold_inside_the_block_alone() -> None:
    from torch._inductor import config

    before = config.size_asserts
    with _torch.inductor_settings({"size_asserts": not before}):
        assert config.size_asserts is not before
    assert config.size_asserts is before
    with pytest.raises(AttributeError, match="no_such_option"):
        _torch.inductor_settings({"no_such_option": 1}).__enter__()


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_whole_graph_keeps_gradients(compiler: str, device: torch.device) -> None:
    model = Small().to(device)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return _torch.compile_whole(gm, inputs, compiler)

    x = torch.randn(3, 8, device=device)
    with torch.enable_grad():
        torch.compile(model, backend=backend)(x).sum().backward()
        found = model.linear.weight.grad.clone()
        model.zero_grad()
        model(x).sum().backward()
    torch.testing.assert_close(found, model.linear.weight.grad)


# --- compiled segments on disk ------------------------------------------------------------------------


def compiled_in_backend(device: torch.device, factor: float = 2.0) -> Any:
    """A compiled `x.sin() * factor + 1` for any number of rows."""
    made: list[Any] = []

    def look(gm: GraphModule) -> None:
        from piecewise_graph.splitter.split import split

        (step,) = split(gm).segments
        inputs = [_torch.example_value(n) for n in placeholders(step.gm)]
        made.append(_torch.compile_segment(step.gm, inputs, "inductor"))

    trace(lambda x: x.sin() * factor + 1, dynamic(6, 8, device=device), look=look)
    return made[0]


def test_saved_segment_loads_and_serves_all_sizes(tmp_path: Path, device: torch.device) -> None:
    from torch._inductor import config

    file = str(tmp_path / "artifact")
    compiled_in_backend(device).save(path=file, format="binary")
    with config.patch({"triton.cudagraphs": True}):  # as a user may have it; graphs are ours
        loaded = _torch.load_artifact(file)
    for count in (6, 3, 1, 40):
        x = torch.randn(count, 8, device=device)
        (found,) = loaded(x, count)
        torch.testing.assert_close(found, x.sin() * 2 + 1)


def test_bad_artifact_raises_something(tmp_path: Path) -> None:
    (tmp_path / "artifact").write_bytes(b"none")
    with pytest.raises(Exception, match=r"."):
        _torch.load_artifact(str(tmp_path / "artifact"))


def test_generated_modules_are_listed_with_the_libraries_of_their_kernels() -> None:
    """C++ kernels are builtin functions of a module; its file is the library in Inductor's cache."""
    before = len(_torch.code_modules())
    compiled_in_backend(torch.device("cpu"), factor=2.625)  # of no other test, whose cache may be gone
    added = _torch.code_modules()[before:]
    assert added
    files = [getattr(getattr(v, "__self__", None), "__file__", None) for m in added for v in vars(m).values()]
    libraries = [Path(file) for file in files if file and file.endswith(".so")]
    assert libraries
    assert all(library.is_relative_to(_torch.inductor_cache_dir()) for library in libraries)


def test_options_show_what_changes_code_and_no_address() -> None:
    from torch._inductor import config

    before = _torch.compile_options()
    assert before == _torch.compile_options()
    assert not any(" at 0x" in line for line in before)
    with config.patch({"epilogue_fusion": False}):
        assert _torch.compile_options() != before
    with config.patch({"joint_custom_pre_pass": lambda graph: None}):
        assert any(" at 0x" in line for line in _torch.compile_options())


def test_schemas_of_ops_overloads_and_functions() -> None:
    add = torch.ops.aten.add
    assert _torch.op_schemas(add.Tensor) == [str(add.Tensor._schema)]
    assert str(add.Tensor._schema) in (_torch.op_schemas(add) or [])
    assert _torch.op_schemas(torch.add) is None
    assert _torch.op_schemas(torch.ops.higher_order.cond) is None


def test_op_that_tracing_opens_has_no_schemas() -> None:
    with torch.library._scoped_library("gates", "FRAGMENT") as library:
        for name, key in (("opaque", "CompositeExplicitAutograd"), ("open", "CompositeImplicitAutograd")):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, key)
        assert _torch.op_schemas(torch.ops.gates.opaque) == ["gates::opaque(Tensor x) -> Tensor"]
        assert _torch.op_schemas(torch.ops.gates.open) is None


def test_conditions_are_tried_on_the_traced_sizes_and_then_relied_on() -> None:
    def look(gm: GraphModule) -> tuple[Any, ...]:
        shape_env = _torch.shape_env_of(gm)
        (symbol,) = _torch.expression(first_size(gm)).free_symbols
        tried = [_torch.holds(shape_env, condition) for condition in (symbol < 100, sympy.Eq(symbol, 7))]
        before = _torch.shape_guards(shape_env)
        _torch.assume(shape_env, symbol < 100)
        return _torch.size_hint(shape_env, symbol), tried, before, _torch.value_range(shape_env, symbol)

    assert trace(lambda x: x * 2, dynamic(6, 8), look=look).seen == [(6, [True, False], (), (2, 99))]


def test_size_of_an_unknown_symbol_has_no_hint() -> None:
    def look(gm: GraphModule) -> Any:
        return _torch.size_hint(_torch.shape_env_of(gm), sympy.Symbol("none"))

    assert trace(lambda x: x * 2, dynamic(6, 8), look=look).seen == [None]


def test_compile_workers_start_only_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    started: list[bool] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append(True))
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        _torch.start_compile_workers()
    assert started == [True]


def test_models_for_triton_take_inductors_assembler_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before workers start; whoever compiles with something else, or on a CPU, is left alone."""
    from torch._inductor.runtime import compile_tasks

    done: list[str] = []
    monkeypatch.setattr(compile_tasks, "_set_triton_ptxas_path", lambda: done.append("assembler"))
    monkeypatch.setattr(_torch, "start_compile_workers", lambda: done.append("workers"))
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        for compiler in ("eager", "inductor"):
            pg.compile(torch.nn.Linear(2, 2), compiler=compiler)
    assert done == ["workers", "assembler", "workers"]  # workers start on a GPU alone (see above)
    monkeypatch.delattr(compile_tasks, "_set_triton_ptxas_path")
    _torch.agree_on_assembler()  # a torch without it is left as it is
    assert len(done) == 3


# --- functions that stand in graphs -------------------------------------------------------------------


def targets(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_autocast_stands_in_graphs_as_these_functions(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            return x @ x.t()

    enter, leave = _torch.autocast_functions()
    found = targets(trace(model, torch.ones(4, 4, device=device)).gm)
    assert found.count(enter) == found.count(leave) == 1


def test_grad_switches_stand_in_graphs_as_this_function() -> None:
    def model(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    assert _torch.grad_mode_function() in targets(trace(model, torch.ones(3)).gm)
    assert _torch.grad_mode_function() in _torch.droppable_functions()


def test_bodies_of_higher_order_ops_are_found() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))

    gm = trace(model, torch.ones(3)).gm
    names = [str(node.target) for node in gm.graph.nodes if node.op == "get_attr"]
    assert len(list(_torch.inner_graphs(gm, names))) == 2
    assert [node.op for node in gm.graph.nodes if _torch.is_higher_order(node.target)] == ["call_function"]
    assert list(_torch.inner_graphs(gm, ["no_such_name"])) == []


def test_a_size_is_computed_from_its_symbols() -> None:
    found: list[tuple[int, int]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        (size,) = [_torch.example_value(n) for n in gm.graph.nodes if n.op == "call_function"][-1:]
        assert isinstance(size, torch.Tensor)
        derived, env = size.shape[0], _torch.shape_env_of(gm)
        symbols = sorted(_torch.expression(derived).free_symbols, key=str)
        graph = torch.fx.Graph()
        given = {symbol: graph.placeholder(f"p{i}") for i, symbol in enumerate(symbols)}
        for symbol, node in given.items():
            node.meta["example_value"] = _torch.size_of(env, symbol)
        last = _torch.add_size(graph, derived, given)
        assert _torch.expression(_torch.example_value(last)) == _torch.expression(derived)
        graph.output(last)
        compute = torch.fx.GraphModule({}, graph)
        sizes = {_torch.expression(value): int(value) for value in inputs if isinstance(value, torch.SymInt)}
        found.append((compute(*(sizes[symbol] for symbol in symbols)), int(derived)))
        return gm.forward

    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros((2 * x.shape[0] + y.shape[0]) // 3 + x.shape[0] % 4)

    torch.compile(model, backend=backend, dynamic=True)(torch.ones(5), torch.ones(9))
    assert found == [(7, 7)]


def test_graphs_with_which_the_forward_goes_on_are_told() -> None:
    def breaks(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    def double(x: Tensor) -> Tensor:
        return x * 2

    def cannot_be_traced(x: Tensor) -> Tensor:
        for _ in range(2):
            x = double(x)
            torch._dynamo.graph_break()
        return x

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x)

    look = _torch.returns_intermediates
    assert trace(breaks, torch.ones(3), look=look).seen == [
        True,
        True,
    ]  # the second one is called by the first
    assert trace(cannot_be_traced, torch.ones(3), look=look).seen == [True]
    assert trace(double, torch.ones(3), look=look).seen == [False]
    assert trace(Model(), torch.ones(3), look=look).seen == [False]


def test_results_of_a_graph_are_known_before_it_runs() -> None:
    def look(gm: GraphModule) -> None:
        (sizes,) = [value.shape for value in _torch.returned_values(gm) if isinstance(value, Tensor)]
        assert isinstance(sizes[0], torch.SymInt) and sizes[1] == 4

    trace(lambda x: (x[:, :4] + 1, 3), dynamic(6, 8), look=look)


def test_a_backend_hears_of_the_next_reset() -> None:
    class Backend:
        resets = 0

        def reset(self) -> None:
            self.resets += 1

    backend = Backend()
    for told in range(1, 3):
        _torch.tell_of_reset(backend)
        torch._dynamo.reset()
        torch._dynamo.reset()
        assert backend.resets == told


def test_a_size_that_guards_fix_is_found_and_the_guards_stay() -> None:
    def found(gm: GraphModule) -> tuple[list[Any], list[Any]]:
        env, size = _torch.shape_env_of(gm), _torch.expression(first_size(gm))
        given = len(_torch.guards_since(env, 0))
        with _torch.conditions_undone(env):
            _torch.assume(env, size < 7)
            assert not _torch.found_sizes(env, [size])
            _torch.assume(env, size > 5)
            return _torch.guards_since(env, given), _torch.found_sizes(env, [size])

    ((guards, equations),) = trace(lambda x: x * 2, dynamic(6, 8), look=found).seen
    assert [guard.free_symbols for guard in guards] == [equations[0].free_symbols] * 2
    assert [equation.rhs for equation in equations] == [6]
