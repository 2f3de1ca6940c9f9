"""Each function of `_torch.py` does what it says on the torch that is installed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor

from piecewise_graph import _torch


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Traced:
    """A graph as Dynamo hands it to a backend, kept with what is only known inside of the call."""

    def __init__(self, look: Callable[[GraphModule], Any] = lambda gm: None) -> None:
        self.look, self.graphs, self.inputs, self.seen = look, [], [], []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs.append(gm)
        self.inputs.append(list(inputs))
        self.seen.append(self.look(gm))
        return gm.forward

    @property
    def gm(self) -> GraphModule:
        return self.graphs[-1]


def trace(
    model: Any, *args: Any, look: Callable[[GraphModule], Any] = lambda gm: None, **options: Any
) -> Traced:
    traced = Traced(look)
    torch.compile(model, backend=traced, **options)(*args)
    return traced


def dynamic(*shape: int, device: torch.device | None = None) -> Tensor:
    x = torch.randn(*shape, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def placeholders(gm: GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table


TABLE = torch.ones(8)


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


def test_graph_without_tensors_has_no_fake_mode() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    assert _torch.fake_mode_of(gm) is None
    assert _torch.shape_env_of(gm) is None


def range_of(gm: GraphModule) -> Any:
    (symbol,) = _torch.expression(_size(gm)).free_symbols
    return _torch.value_range(_torch.shape_env_of(gm), symbol)


def _size(gm: GraphModule) -> Any:
    tensors = [_torch.example_value(n) for n in placeholders(gm)]
    return next(t for t in tensors if isinstance(t, Tensor)).shape[0]


def test_value_range_starts_at_two_and_is_open() -> None:
    assert trace(lambda x: x * 2, dynamic(6, 8), look=range_of).seen == [(2, None)]


def test_value_range_follows_a_bound_of_the_mark() -> None:
    x = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(x, 0, min=3, max=40)
    assert trace(lambda x: x * 2, x, look=range_of).seen == [(3, 40)]


def test_value_range_of_an_integer_argument_is_a_pair() -> None:
    """A plain int that varies has no bounds at all; its range must be readable all the same."""

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


def test_original_callable_of_what_torch_compile_returns() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    module = Small()
    assert _torch.original_callable(torch.compile(module, backend="eager")) is module
    assert _torch.original_callable(torch.compile(function, backend="eager")) is function
    assert _torch.original_callable(3) is None


# --- errors -------------------------------------------------------------------------------------------


def test_restarts_are_control_flow_and_other_errors_are_not() -> None:
    from torch._dynamo import exc

    assert issubclass(exc.RestartAnalysis, exc.TorchDynamoException)
    assert _torch.is_dynamo_control_flow(exc.TensorifyScalarRestartAnalysis(restart_reason="r"))
    assert not _torch.is_dynamo_control_flow(RuntimeError("r"))


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


# --- marks and guards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [_torch.mark_dynamic, _torch.maybe_mark_dynamic])
def test_marked_dimension_is_traced_once_for_all_sizes(mark: Callable[[Tensor, int], None]) -> None:
    traced = Traced()
    fast = torch.compile(lambda x: x * 2, backend=traced)
    for count in (5, 6, 7):
        x = torch.ones(count, 8)
        mark(x, 0)
        mark(x, 0)
        fast(x)
    assert len(traced.graphs) == 1


def test_weak_mark_may_be_fixed_by_the_model() -> None:
    x = torch.ones(6, 8)
    _torch.maybe_mark_dynamic(x, 0)
    trace(lambda x: x.view(6, 8) + torch.ones(6, 8), x)


def test_without_shape_guards_one_trace_serves_one_token_and_other_guards_stay() -> None:
    traced = Traced()
    model = Small()
    fast = torch.compile(model, backend=traced, options={"guard_filter_fn": _torch.drop_shape_guards})
    for count in (5, 1, 9):
        x = torch.randn(count, 8)
        if count > 1:
            _torch.mark_dynamic(x, 0)
        torch.testing.assert_close(fast(x), model(x))
    assert len(traced.graphs) == 1
    fast(torch.randn(5, 8, dtype=torch.float32).requires_grad_())
    model.train(not model.training)
    fast(torch.randn(5, 8))
    assert len(traced.graphs) > 1


# --- compilers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_compiled_segment_serves_all_sizes_and_returns_a_sequence(
    compiler: str, device: torch.device
) -> None:
    """Compiled inside of the backend call, as the library does it."""
    made: list[Any] = []

    def look(gm: GraphModule) -> None:
        from piecewise_graph.splitter.split import split

        (step,) = split(gm).segments
        inputs = [_torch.example_value(n) for n in placeholders(step.gm)]
        made.append(_torch.compile_segment(step.gm, inputs, compiler))

    trace(lambda x: x.sin() * 2 + 1, dynamic(6, 8, device=device), look=look)
    for count in (6, 3, 1, 40):
        x = torch.randn(count, 8, device=device)
        (found,) = made[0](x)
        torch.testing.assert_close(found, x.sin() * 2 + 1)


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


def compiled_in_backend(device: torch.device) -> Any:
    """A compiled `x.sin() * 2 + 1` for any number of rows."""
    made: list[Any] = []

    def look(gm: GraphModule) -> None:
        from piecewise_graph.splitter.split import split

        (step,) = split(gm).segments
        inputs = [_torch.example_value(n) for n in placeholders(step.gm)]
        made.append(_torch.compile_segment(step.gm, inputs, "inductor"))

    trace(lambda x: x.sin() * 2 + 1, dynamic(6, 8, device=device), look=look)
    return made[0]


def test_saved_segment_loads_and_serves_all_sizes(tmp_path: Path, device: torch.device) -> None:
    from torch._inductor import config

    file = str(tmp_path / "artifact")
    compiled_in_backend(device).save(path=file, format="binary")
    with config.patch({"triton.cudagraphs": True}):  # as a user may have it; graphs are ours
        loaded = _torch.load_artifact(file)
    for count in (6, 3, 1, 40):
        x = torch.randn(count, 8, device=device)
        (found,) = loaded(x)
        torch.testing.assert_close(found, x.sin() * 2 + 1)


def test_bad_artifact_raises_something(tmp_path: Path) -> None:
    (tmp_path / "artifact").write_bytes(b"none")
    with pytest.raises(Exception, match=r"."):
        _torch.load_artifact(str(tmp_path / "artifact"))


def test_generated_modules_are_listed_with_the_libraries_of_their_kernels() -> None:
    """C++ kernels are builtin functions of a module whose file is the library, in Inductor's cache."""
    before = len(_torch.code_modules())
    compiled_in_backend(torch.device("cpu"))
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
        (symbol,) = _torch.expression(_size(gm)).free_symbols
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


# --- looking at segments ------------------------------------------------------------------------------


def test_observer_sees_every_op_its_arguments_and_its_result(device: torch.device) -> None:
    seen: list[Any] = []
    with _torch.observe_ops(lambda op, args, kwargs, result: seen.append((op, args, kwargs, result))):
        y = torch.ones(3, device=device) * 2
    names = [op._schema.name for op, *_ in seen]
    assert "aten::mul" in names
    assert seen[-1][3] is y
    with _torch.observe_ops(lambda *_: seen.append(None)):
        pass
    assert None not in seen


def test_unknown_sizes_are_told_from_symbolic_ones() -> None:
    found: list[tuple[bool, bool]] = []

    def look(gm: GraphModule) -> None:
        (x,) = [n for n in placeholders(gm) if isinstance(_torch.example_value(n), Tensor)]
        fake = _torch.example_value(x)
        with fake.fake_mode:
            found.append((_torch.has_unknown_size(fake), _torch.has_unknown_size(fake.nonzero())))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        trace(lambda x: x * 2 + x.nonzero().sum(), dynamic(6, 8), look=look)
    assert found == [(False, True)]


def test_storage_identity_follows_views(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake, other = torch.empty(4, 4), torch.empty(4, 4)
        assert _torch.storage_id(fake) == _torch.storage_id(fake[1:].t()) != _torch.storage_id(other)
    real = torch.empty(4, 4, device=device)
    assert _torch.storage_id(real) == _torch.storage_id(real.view(-1)[3:])


def test_everybody_who_holds_a_storage_is_counted(device: torch.device) -> None:
    alone = nn.Parameter(torch.randn(8, 8, device=device))
    assert _torch.storage_holders(alone) == _torch.storage_holders(alone) == 1
    for hold in (Tensor.detach, lambda t: t.data, lambda t: t[2:], Tensor.untyped_storage, Tensor.t):
        held = hold(alone)
        assert _torch.storage_holders(alone) > 1
        del held
        assert _torch.storage_holders(alone) == 1
    other = torch.empty(0, device=device).set_(alone.untyped_storage(), 0, (64,))
    assert _torch.storage_holders(alone) == _torch.storage_holders(other) == 2
    del alone
    assert _torch.storage_holders(other) == 1


def test_holders_are_counted_inside_of_a_backend(device: torch.device) -> None:
    model, found = Small().to(device), []
    trace(model, torch.ones(3, 8, device=device), look=lambda _: found.append(holders(model)))
    held = model.linear.weight.detach()
    assert found == [[1, 1]]
    assert holders(model) == [2, 1]
    del held


def holders(model: nn.Module) -> list[int]:
    return [_torch.storage_holders(p) for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_weak_alias_is_the_same_memory_without_owning_it(dtype: torch.dtype, device: torch.device) -> None:
    base = torch.zeros(6, 8, device=device, dtype=dtype)
    view = base[1:, ::2].t()
    alias = _torch.weak_alias(view)
    assert (alias.shape, alias.stride(), alias.dtype, alias.device) == (
        view.shape,
        view.stride(),
        view.dtype,
        view.device,
    )
    assert alias.data_ptr() == view.data_ptr()
    base.fill_(1)
    assert bool((alias == 1).all())
    assert _torch.storage_id(alias) != _torch.storage_id(view)


@pytest.mark.gpu
def test_weak_alias_lets_the_memory_be_reused(device: torch.device) -> None:
    torch.cuda.empty_cache()
    tensor = torch.zeros(1 << 22, device=device)
    before = torch.cuda.memory_allocated()
    alias = _torch.weak_alias(tensor)
    address = tensor.data_ptr()
    assert torch.cuda.memory_allocated() == before
    del tensor
    assert torch.cuda.memory_allocated() < before
    assert torch.zeros(1 << 22, device=device).data_ptr() == address == alias.data_ptr()


@pytest.mark.gpu
def test_pool_bytes_counts_one_pool_only(device: torch.device) -> None:
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    assert _torch.pool_bytes(pool.id) == 0
    with torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(8 << 20, dtype=torch.uint8, device=device)
    assert _torch.pool_bytes(pool.id) >= kept.nbytes
    assert _torch.pool_bytes(other.id) == 0


@pytest.mark.gpu
def test_cublas_workspaces_can_be_cleared(device: torch.device) -> None:
    a = torch.randn(256, 256, device=device)
    wanted = a @ a
    _torch.clear_cublas_workspaces()
    torch.testing.assert_close(a @ a, wanted)


def test_plain_tensors_and_parameters_are_told_from_subclasses() -> None:
    assert _torch.is_plain_tensor(torch.ones(2))
    assert _torch.is_plain_tensor(nn.Parameter(torch.ones(2)))
    assert not _torch.is_plain_tensor(TwoTensor(torch.ones(2), torch.ones(2)))


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


# --- code for exact sizes -----------------------------------------------------------------------------


def small_graph() -> GraphModule:
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    scaled = graph.call_method("mul", (x, 2.0))
    graph.output((graph.call_function(torch.nn.functional.linear, (scaled, weight)),))
    return GraphModule({}, graph)


@pytest.mark.parametrize("dependent_launches", [False, True])
def test_code_for_exact_sizes_computes_the_same(dependent_launches: bool) -> None:
    gm, x, weight = small_graph(), torch.randn(3, 8), torch.nn.Parameter(torch.randn(4, 8))
    with torch.no_grad():
        run = _torch.compile_exact(gm, [x, weight], dependent_launches=dependent_launches)
        for _ in range(2):
            x = torch.randn(3, 8)
            torch.testing.assert_close(run(x, weight)[0], gm(x, weight)[0])


def test_kernels_wait_first_only_inside_of_the_block() -> None:
    """What they then look like is in test_closed_holes.py."""
    from torch._inductor.codegen.triton import TritonKernel

    theirs = TritonKernel._filter_pdl
    with _torch.kernels_wait_first():
        assert TritonKernel._filter_pdl is not theirs
        assert TritonKernel.GDC_WAIT != TritonKernel.GDC_LAUNCH
    assert TritonKernel._filter_pdl is theirs


def test_propagation_gives_every_node_its_fake_value() -> None:
    gm = small_graph()
    _torch.propagate(gm, [torch.randn(3, 8), torch.randn(4, 8)])
    values = [_torch.example_value(node) for node in gm.graph.nodes if node.op != "output"]
    assert [tuple(value.shape) for value in values] == [(3, 8), (4, 8), (3, 8), (3, 4)]
    assert all(isinstance(value, torch._subclasses.FakeTensor) for value in values)


# --- completeness -------------------------------------------------------------------------------------


def test_every_function_is_held_by_a_test_here() -> None:
    public = {
        name
        for name, value in vars(_torch).items()
        if callable(value)
        and getattr(value, "__module__", "") == _torch.__name__
        and not name.startswith("_")
    }
    source = inspect.getsource(sys.modules[__name__])
    assert not {name for name in public if f"_torch.{name}" not in source}


def test_a_profiler_is_noticed() -> None:
    assert isinstance(_torch.named_range("x"), nullcontext)
    with torch.profiler.profile():
        assert not isinstance(_torch.named_range("x"), nullcontext)
    assert isinstance(_torch.named_range("x"), nullcontext)


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
    """Without it, it would be a symbol: an argument of the graph."""
    traced = Traced()
    for number in (0.5, 0.25):
        compiled = torch.compile(Times(number), backend=traced)
        with _torch.floats_stay_constants() if constant else nullcontext():
            assert compiled(torch.ones(2))[0] == number
    assert [len(inputs) for inputs in traced.inputs] == ([1, 1] if constant else [1, 2])


def test_dynamo_looks_at_every_weight() -> None:
    """Guards of a trace that was made since see a weight of another dtype in an unchanged module."""
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


def test_structures_are_taken_apart_and_put_together() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    output = CausalLMOutput(logits=torch.ones(2))
    leaves, structure = _torch.flatten({"a": [1, output], "b": None})
    assert len(leaves) == 3
    rebuilt = _torch.unflatten(leaves, structure)
    assert type(rebuilt["a"][1]) is CausalLMOutput
    assert rebuilt["a"][1].logits is output.logits


@pytest.mark.gpu
def test_streams_are_told_apart() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert _torch.on_default_stream(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not _torch.on_default_stream(device)


@pytest.mark.gpu
def test_a_capture_under_way_is_seen() -> None:
    assert not _torch.capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert _torch.capturing()
        torch.zeros(1, device="cuda")
