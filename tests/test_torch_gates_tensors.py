"""The functions of `_torch` that look at tensors, or mark them, do what they say on the installed torch."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor
from traced import Small, Traced, dynamic, placeholders, trace

from piecewise_graph import _torch

pytestmark = pytest.mark.usefixtures("no_grad")


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


def test_every_holder_of_a_storage_is_counted(device: torch.device) -> None:
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


def test_plain_tensors_and_parameters_are_told_from_subclasses() -> None:
    assert _torch.is_plain_tensor(torch.ones(2))
    assert _torch.is_plain_tensor(nn.Parameter(torch.ones(2)))
    assert _torch.is_plain_tensor(torch.ones(2).as_subclass(Named))
    assert not _torch.is_plain_tensor(TwoTensor(torch.ones(2), torch.ones(2)))


def test_views_of_the_same_elements_are_known() -> None:
    base = torch.arange(6).view(2, 3)
    assert _torch.is_same_view(base, base.view(2, 3)) and _torch.is_same_view(base, base.mul_(1))
    others = base.clone(), base.view(3, 2), base[1:], base.t(), base.view(torch.float64)
    assert not any(_torch.is_same_view(base, other) for other in others)


def test_marked_tensors_are_told_by_their_placeholder() -> None:
    told: dict[str, bool] = {}

    def backend(gm: GraphModule, _: Any) -> Any:
        told.update({n.name: _torch.is_marked_static(n) for n in gm.graph.nodes if n.op == "placeholder"})
        return gm.forward

    cache = torch.zeros(3)
    torch._dynamo.mark_static_address(cache)
    torch.compile(lambda x, cache: x + cache, backend=backend)(torch.ones(3), cache)
    assert told == {"l_x_": False, "l_cache_": True}


class Named(Tensor):
    """Torch's functions give it back as what it is."""


def test_traced_functions_do_not_ask_subclasses() -> None:
    named = torch.ones(2).as_subclass(Named)
    assert type(named * 2) is Named
    with _torch.traced_functions():
        assert type(named * 2) is Tensor
        with _torch.as_while_tracing():
            assert type(named * 2) is Named


def test_work_on_a_graph_happens_outside_of_inference_mode() -> None:
    """As Dynamo traces: there an op that is made of others is taken apart before anything sees it."""
    with torch.inference_mode():
        with _torch.as_while_tracing():
            assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()


# --- what runs ----------------------------------------------------------------------------------------


def test_a_profiler_is_noticed() -> None:
    assert isinstance(_torch.named_range("x"), nullcontext)
    with torch.profiler.profile():
        assert not isinstance(_torch.named_range("x"), nullcontext)
    assert isinstance(_torch.named_range("x"), nullcontext)


def test_structures_are_taken_apart_and_put_together() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    output = CausalLMOutput(logits=torch.ones(2))
    leaves, structure = _torch.flatten({"a": [1, output], "b": None})
    assert len(leaves) == 3
    rebuilt = _torch.unflatten(leaves, structure)
    assert type(rebuilt["a"][1]) is CausalLMOutput
    assert rebuilt["a"][1].logits is output.logits


@pytest.mark.gpu
def test_a_capture_under_way_is_seen() -> None:
    assert not _torch.capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert _torch.capturing()
        torch.zeros(1, device="cuda")


# --- the proof's view ---------------------------------------------------------------------------------


def test_real_tensors_run_inside_of_a_fake_mode(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    seen: list[Any] = []
    with FakeTensorMode(), _torch.observe_ops(lambda *call: seen.append(call)):
        with _torch.outside_of_modes():
            real = torch.ones(2, device=device) * 2
        fake = torch.ones(2, device=device)
    assert not isinstance(real, FakeTensor) and real.sum() == 4
    assert isinstance(fake, FakeTensor)
    assert all(isinstance(result, FakeTensor) for *_, result in seen)


def test_source_of_the_module_that_called(device: torch.device) -> None:
    found: list[str] = []

    def look(gm: GraphModule) -> None:
        found.extend(_torch.module_source(node) for node in gm.graph.nodes if node.op == "call_function")

    trace(nn.Sequential(nn.Sequential(nn.ReLU())), torch.randn(4), look=look)
    assert found == ["L['fn'].0.0"]
    assert _torch.module_source(torch.fx.Graph().placeholder("x")) == ""


@pytest.mark.gpu
def test_streams_have_addresses_of_their_own() -> None:
    device = torch.device("cuda")
    assert _torch.stream_address(device) == 0
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert _torch.stream_address(device) == torch.cuda.current_stream().cuda_stream != 0


def test_tensors_inside_of_vmap_are_told(device: torch.device) -> None:
    seen: list[bool] = []

    def row(x: Tensor) -> Tensor:
        seen.append(_torch.is_wrapped(x))
        return x * 2

    torch.vmap(row)(torch.ones(3, 2, device=device))
    assert seen == [True] and not _torch.is_wrapped(torch.ones(2))


def test_symbol_that_a_trace_fixed_is_told() -> None:
    found: list[bool] = []

    def look(gm: GraphModule) -> None:
        (x,) = [n for n in placeholders(gm) if isinstance(_torch.example_value(n), Tensor)]
        fake, shape_env = _torch.example_value(x), _torch.shape_env_of(gm)
        symbol = _torch.expression(fake.shape[0])
        found.append(_torch.is_fixed(shape_env, symbol))
        int(fake.shape[0])  # guards on the number
        found.append(_torch.is_fixed(shape_env, symbol))

    with pytest.raises(Exception, match="specialized it to be a constant"):
        trace(lambda x: x * 2, dynamic(6, 8), look=look)
    assert found == [False, True]


# --- marks and guards ---------------------------------------------------------------------------------


def test_marked_dimension_is_traced_once_for_all_sizes() -> None:
    traced = Traced()
    fast = torch.compile(lambda x: x * 2, backend=traced)
    for count in (5, 6, 7):
        x = torch.ones(count, 8)
        _torch.maybe_mark_dynamic(x, 0)
        _torch.maybe_mark_dynamic(x, 0)
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
            _torch.maybe_mark_dynamic(x, 0)
        torch.testing.assert_close(fast(x), model(x))
    assert len(traced.graphs) == 1
    fast(torch.randn(5, 8, dtype=torch.float32).requires_grad_())
    model.train(not model.training)
    fast(torch.randn(5, 8))
    assert len(traced.graphs) > 1


@pytest.mark.parametrize("mended", [False, True])
def test_an_array_is_guarded_under_a_filter_where_its_tensors_are_forgotten(mended: bool) -> None:
    def keep(guards: Any) -> list[bool]:
        if mended:
            _torch.forget_guarded_tensors(guards)
        return [True] * len(guards)

    options = {"guard_filter_fn": keep}
    doubled = torch.compile(lambda array: torch.from_numpy(array) * 2, backend="eager", options=options)
    with nullcontext() if mended else pytest.raises(RuntimeError, match="ambiguous"):
        assert doubled(np.ones(2)).tolist() == [2, 2]


def test_tensors_that_share_a_storage_are_told(device: torch.device) -> None:
    x = torch.zeros(4, 2, device=device)
    assert _torch.share_storage(x, x[1:])
    assert not _torch.share_storage(x, x.clone())
    assert not _torch.share_storage(x, 3)


def test_the_host_is_one_device() -> None:
    at_index = torch.ones(2).to("cpu:0")
    assert _torch.device_of(at_index) == _torch.device_of(torch.ones(2)) == torch.device("cpu")
    assert _torch.device_of(torch.ones(2, device="meta")) == torch.device("meta")


def test_work_on_a_graph_waits_for_a_trace_of_another_thread() -> None:
    from torch._dynamo.convert_frame import compile_lock

    worked = threading.Event()

    def work() -> None:
        with _torch.as_while_tracing():
            worked.set()

    other = threading.Thread(target=work)
    with compile_lock:
        other.start()
        assert not worked.wait(0.2)
    other.join()
    assert worked.is_set()
