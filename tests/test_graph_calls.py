"""attend_in_graph: attention in a graph of an engine's own, over its own pages and metadata."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, check_cache, expected, make_case

from piecewise_graph.custom_ops.attention import (
    AttentionBatch,
    attend_in_graph,
    expect_graph_calls,
    graph_calls,
)
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.kernels import early_reads
from piecewise_graph.kernels.launch import kernels_serve

pytestmark = pytest.mark.usefixtures("no_grad")
SHAPES = {
    "ours": Shape(((5, 1), (0, 1), (33, 1), (0, 0)), uniform=True),
    "vLLM": Shape(((5, 1), (0, 1), (33, 1), (0, 0)), uniform=True, as_vllm=True),
    "verify of few": Shape(((20, 4), (0, 4)), uniform=True, as_vllm=True),
    "verify": Shape(((20, 4), (0, 4), (0, 0)), uniform=True, as_vllm=True, window=9, softcap=3.0),
}


def case_of(name: str, device: torch.device) -> Case:
    implementation = "triton" if kernels_serve(torch.empty(0, device=device)) else "torch"
    return make_case(SHAPES[name], dtype=torch.float32, device=device, implementation=implementation)


def attend(case: Case) -> None:
    call = case.call
    attend_in_graph(
        case.batch, call.q, call.k, call.v, call.out, layer=call.layer, scale=call.scale,
        window=call.window, softcap=call.softcap, implementation=call.implementation,
    )  # fmt: skip


def assert_right(case: Case) -> None:
    live = int(case.batch.qo_indptr[-1])
    found = case.call.out[:live].double().cpu()
    torch.testing.assert_close(found, expected(case)[:live], rtol=1e-4, atol=1e-5)
    check_cache(case)


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_op(name: str, device: torch.device) -> None:
    case = case_of(name, device)
    attend(case)
    assert_right(case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_a_replay_reads_what_lies_in_the_batch_by_then(name: str, device: torch.device) -> None:
    case, later = case_of(name, device), case_of(name, device)
    fields = dataclasses.fields(AttentionBatch)
    tensors = [f.name for f in fields if isinstance(getattr(case.batch, f.name), torch.Tensor)]
    for field in ("seq_lens", "qo_indptr"):  # captured with other lengths
        getattr(case.batch, field).zero_()
    attend(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case)
    for field in tensors:
        getattr(case.batch, field).copy_(getattr(later.batch, field))
    for _ in range(2):  # counters are left at zero
        case.call.out.fill_(777.0)
        graph.replay()
        assert_right(case)


def test_only_within_the_call_its_metadata_may_be_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    case, found = case_of("vLLM", torch.device("cpu")), list[bool]()
    monkeypatch.setattr(early_reads, "_is_capturing", lambda: True)
    metadata = case.batch.unwritten_in_forward()
    serve = graph_calls.serve

    def note(*args: Any, **given: Any) -> None:
        found.append(early_reads.may_read_early(metadata))
        serve(*args, **given)

    monkeypatch.setattr(graph_calls, "serve", note)
    attend(case)
    assert found == [True] and not early_reads.may_read_early(metadata)


def test_what_cannot_be_served_is_refused_beforehand() -> None:
    case = case_of("vLLM", torch.device("cpu"))
    expect_graph_calls(case.batch, 4, implementation="torch")
    with pytest.raises(AttentionError, match="triton"):
        expect_graph_calls(case.batch, 4, implementation="triton")
    with pytest.raises(AttentionError, match="multiple"):
        expect_graph_calls(case.batch, 3, implementation="torch")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["flash_attn", "flashinfer"])
def test_libraries_that_want_pages_side_by_side_say_so(implementation: str, device: torch.device) -> None:
    shape = dataclasses.replace(SHAPES["vLLM"], head_dim=128)
    case = make_case(shape, dtype=torch.float16, device=device, implementation=implementation)
    with pytest.raises(AttentionError, match=r"pages that lie side by side|is not usable here"):
        attend(case)
