"""Gates to what Inductor makes of a segment: code for exact sizes, kernels that are dependents."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from toys import ops

import piecewise_graph as pg
from piecewise_graph import _torch


def small_graph() -> GraphModule:
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    scaled = graph.call_method("mul", (x, 2.0))
    graph.output((graph.call_function(torch.nn.functional.linear, (scaled, weight)),))
    return GraphModule({}, graph)


def test_code_for_exact_sizes_computes_the_same() -> None:
    gm, x, weight = small_graph(), torch.randn(3, 8), torch.nn.Parameter(torch.randn(4, 8))
    with torch.no_grad():
        run = _torch.compile_exact(gm, [x, weight])
        for _ in range(2):
            x = torch.randn(3, 8)
            torch.testing.assert_close(run(x, weight)[0], gm(x, weight)[0])


@pytest.mark.parametrize("exact", [True, False])
def test_kernels_are_dependents_unless_one_is_of_the_user(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[bool]()

    def standalone_compile(*args: Any, options: Any, **others: Any) -> None:
        asked.append(options["config_patches"]["triton.enable_pdl"])

    monkeypatch.setattr(torch._inductor, "standalone_compile", standalone_compile)
    gm, inputs = small_graph(), [torch.randn(3, 8), torch.randn(4, 8)]
    compile_ = _torch.compile_exact if exact else partial(_torch.compile_segment, compiler="inductor")
    compile_(gm, inputs)
    with gm.graph.inserting_before(list(gm.graph.nodes)[-1]):
        gm.graph.call_function(torch.ops.higher_order.triton_kernel_wrapper_mutation, ())
    compile_(gm, inputs)
    assert asked == [True, False]


def test_kernels_wait_first_only_inside_of_the_block() -> None:
    """test_closed_holes.py looks at the generated code."""
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


@pytest.mark.parametrize(("mebibytes", "before_it_runs"), [(256, True), (257, False)])
def test_kernels_are_not_tuned_on_samples_as_large_as_a_table(
    mebibytes: int, before_it_runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor

    asked = list[Any]()
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *args, **kwargs: asked.append(kwargs))
    inputs = [torch.empty(2**20, mebibytes, dtype=torch.uint8, device="meta"), 3]
    _torch.compile_segment(torch.fx.symbolic_trace(lambda table, size: (table + size,)), inputs, "inductor")
    read_by_an_op = torch.fx.symbolic_trace(lambda table, size: (ops.mix.default(table) + size,))
    _torch.compile_segment(read_by_an_op, inputs, "inductor")
    tuned = [each["options"]["config_patches"]["triton.autotune_at_compile_time"] for each in asked]
    assert tuned == [before_it_runs, True]


@pytest.mark.gpu
def test_compiling_takes_no_memory_for_a_table(device: torch.device) -> None:
    from torch._inductor import config

    table = torch.randn(2**19, 512, dtype=torch.float16, device=device)  # 512 MiB
    scale = torch.rand(1, device=device).item()  # in no cache
    fast = pg.compile(lambda ids: torch.softmax(table[ids].float() * scale, -1), cuda_graphs="off")
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with config.patch({"force_disable_caches": True}):
        fast(torch.arange(7, device=device))
    assert torch.cuda.max_memory_allocated() - held < 2**28
