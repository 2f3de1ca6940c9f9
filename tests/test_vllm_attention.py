"""Attention of vLLM's decode batches by our kernel: what vLLM's computes, and whose turn it is."""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import vllm_doubles as doubles
from hypothesis import given, settings, strategies as st
from torch import Tensor
from vllm_attention_doubles import PAGE, WIDTH, FlashAttentionImpl
from vllm_worker_doubles import FULL, config, registered, worker

import piecewise_graph as pg
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.integrations import vllm as plugin
from piecewise_graph.integrations.errors import IntegrationError

DECODE = [(0, [8]), (1, [9]), (2, [10])]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)


def attention() -> Any:
    return importlib.import_module("piecewise_graph.integrations.vllm_attention").DecodeAttention(
        doubles.SIZES
    )


def noting_theirs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes calls of vLLM's attention that have metadata, and what it writes for them."""
    found: list[str] = []
    forward, update = FlashAttentionImpl.forward, FlashAttentionImpl.do_kv_cache_update

    def noting(self: Any, layer: Any, *args: Any, **given: Any) -> Any:
        if args[4] is not None:
            found.append(layer.name.value)
        return forward(self, layer, *args, **given)

    def noting_update(self: Any, layer: Any, *args: Any) -> None:
        found.append(layer.name.value)
        update(self, layer, *args)

    monkeypatch.setattr(FlashAttentionImpl, "forward", noting)
    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", noting_update)
    return found


def hidden_and_pages(
    runner: Any, lengths: list[int], padding: int, own: Any, rows: int = 1
) -> tuple[Tensor, Tensor]:
    """Of a decode batch of requests with so many tokens before, on a random cache, without any graph.

    Args:
        padding: requests.
        own: DecodeAttention; None = vLLM's.
        rows: new tokens of each request.
    """
    torch.manual_seed(0)
    layers = [*runner.compilation_config.static_forward_context.values()]
    for layer in layers:
        layer.kv_cache.normal_()
    live, padded = len(lengths) * rows, (len(lengths) + padding) * rows
    runner.done[: len(lengths)] = lengths
    metadata, slots = runner._metadata([(r, rows) for r in range(len(lengths))], padded, write=True)
    for each in metadata.values():
        each.slot_mapping = torch.full_like(each.slot_mapping, 3)  # what counts is the context's
    ids, positions = torch.arange(padded), torch.zeros(padded, dtype=torch.long)
    positions[:live] = torch.cat([torch.arange(length, length + rows) for length in lengths])
    with ExitStack() as block:
        block.enter_context(torch.inference_mode())
        block.enter_context(runner._context(metadata, slots, FULL, doubles.BatchDescriptor(padded)))
        if own is not None:
            block.enter_context(own.instead(doubles.get_forward_context()))
        hidden = doubles.Model.forward(runner.model, ids, positions)
    return hidden[:live], torch.stack([layer.kv_cache.clone() for layer in layers])


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, doubles.LENGTH - 3), min_size=1, max_size=doubles.REQUESTS),
    padding=st.integers(0, 1),
    rows=st.integers(1, 3),
    windows=st.lists(st.none() | st.integers(1, 12), min_size=doubles.LAYERS, max_size=doubles.LAYERS),
    softcap=st.sampled_from([0, 2.5]),
)
def test_it_computes_and_writes_what_vllm_would(
    lengths: list[int], padding: int, rows: int, windows: list[int | None], softcap: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        doubles.install(patch)
        runner = worker().model_runner
        for layer, window in zip(runner.model.layers, windows, strict=True):
            layer.impl = FlashAttentionImpl(window, softcap)
        own = attention()
        wanted = hidden_and_pages(runner, lengths, padding, None, rows)
        theirs = noting_theirs(patch)
        found = hidden_and_pages(runner, lengths, padding, own, rows)
    assert not theirs and own.served == tuple(runner.model.names)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)


def test_decode_batches_alone_are_captured_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    captured = noting_theirs(monkeypatch)
    module = importlib.import_module("piecewise_graph.integrations.vllm_attention")
    attend = module.attend_in_graph
    monkeypatch.setattr(module, "attend_in_graph", lambda *a, **k: calls.append("ours") or attend(*a, **k))
    capture, during = doubles_of_capture(captured, calls)
    monkeypatch.setattr("piecewise_graph.capture_in_place", capture)
    runner = worker().model_runner
    assert during and all(ours and not theirs for theirs, ours in during)
    assert all("forward" not in vars(layer.impl) for layer in runner.model.layers)
    captured.clear()
    calls.clear()
    runner.execute_model([(0, [3, 4, 5])])
    assert captured and not calls


def doubles_of_capture(theirs: list[str], ours: list[str]) -> tuple[Any, list[tuple[int, int]]]:
    """`pg.capture_in_place`, and how many calls of attention each capture made: vLLM's, ours."""
    original, during = pg.capture_in_place, list[tuple[int, int]]()

    def capture(*args: Any, **given: Any) -> Any:
        before = len(theirs), len(ours)
        graph = original(*args, **given)
        during.append((len(theirs) - before[0], len(ours) - before[1]))
        return graph

    return capture, during


def refuse_three_heads(batch: Any, heads: int, **_: Any) -> None:
    if heads == 3:
        raise AttentionError("no", "leave it")


OTHERS: dict[str, Any] = {
    "alibi_slopes": torch.ones(1),
    "sinks": torch.ones(1),
    "kv_sharing_target_layer_name": "target.0",
    "kv_cache_dtype": "fp8",
    "attn_type": "encoder_only",
    "dcp_world_size": 2,
    "batch_invariant_enabled": True,
}


@pytest.mark.parametrize("name", [*OTHERS, "another class", "forward", "no such attribute", "refused"])
def test_layers_that_ask_for_more_have_vllms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, own = worker().model_runner, attention()
    impl = runner.model.layers[1].impl
    if name in OTHERS:
        setattr(impl, name, OTHERS[name])
    elif name == "another class":
        runner.model.layers[1].impl = type("Other", (FlashAttentionImpl,), {})()
    elif name == "forward":
        impl.forward = impl.forward
    elif name == "no such attribute":
        monkeypatch.delattr(FlashAttentionImpl, "sinks")
        runner.model.layers[0].impl.sinks = None
    else:
        impl.num_heads = 3
        monkeypatch.setattr(sys.modules[type(own).__module__], "expect_graph_calls", refuse_three_heads)
    theirs = noting_theirs(monkeypatch)
    hidden_and_pages(runner, [3, 5], 0, own)
    assert own.served == (runner.model.names[0],)
    assert set(theirs) == {runner.model.names[1]}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that are made."""
    module, found = sys.modules[type(attention()).__module__], list[Any]()
    make = module.AttentionBatch

    def noting(*args: Any, **given: Any) -> Any:
        found.append(make(*args, **given))
        return found[-1]

    monkeypatch.setattr(module, "AttentionBatch", noting)
    return found


CHANGES: dict[str, Any] = {
    "causal": lambda each, _: setattr(each, "causal", False),
    "cascade": lambda each, _: setattr(each, "use_cascade", True),
    "tables": lambda each, _: setattr(each, "block_table", each.block_table.long()),
    "heads first": lambda _, layer: set_pages(layer, (8, 2, 2, PAGE, WIDTH), (2, 3)),
    "three planes": lambda _, layer: set_pages(layer, (8, 3, PAGE, 1, WIDTH)),
    "two heads": lambda _, layer: set_pages(layer, (8, 2, PAGE, 2, WIDTH)),
    "wide heads": lambda _, layer: set_pages(layer, (8, 2, PAGE, 1, 2 * WIDTH)),
}


def set_pages(layer: Any, shape: tuple[int, ...], swapped: tuple[int, int] = (0, 0)) -> None:
    layer.kv_cache = torch.zeros(shape).transpose(*swapped)
    if swapped != (0, 0):
        layer.impl.num_heads = layer.impl.num_kv_heads = layer.kv_cache.shape[3]


def context_of(runner: Any, metadata: Any, slots: Any) -> Any:
    return doubles.ForwardContext(runner.compilation_config.static_forward_context, metadata, slots)


@pytest.mark.parametrize("change", [*CHANGES, "no metadata"])
def test_batches_that_are_not_ours_have_vllms(change: str, made: list[Any]) -> None:
    runner, own = worker().model_runner, attention()
    metadata, slots = runner._metadata([(0, 1)], 1, write=True)
    made.clear()
    for name, layer in runner.compilation_config.static_forward_context.items():
        if change in CHANGES:
            CHANGES[change](metadata[name], layer)
    with own.instead(context_of(runner, metadata if change in CHANGES else None, slots)):
        assert (own.served, made) == ((), [])


@pytest.mark.parametrize("differ", ["metadata", "head size", "block size"])
def test_layers_that_differ_are_batches_of_their_own(differ: str, made: list[Any]) -> None:
    """As hybrid models have it; their layers may share memory."""
    runner, own = worker().model_runner, attention()
    first, second = runner.model.layers
    metadata, slots = runner._metadata([(0, 1)], 1, write=True)
    made.clear()
    if differ == "metadata":
        metadata[second.name.value] = copy.copy(metadata[second.name.value])
    elif differ == "head size":
        second.impl.head_size = 2 * WIDTH
        second.kv_cache = torch.zeros(8, 2, PAGE, 1, 2 * WIDTH)
    else:
        second.kv_cache = first.kv_cache.view(-1, 2, 2 * PAGE, 1, WIDTH)
    with own.instead(context_of(runner, metadata, slots)):
        assert own.served == tuple(runner.model.names)
    for batch, layer in zip(made, (first, second), strict=True):
        cache = batch.kv_cache
        assert cache.num_layers == 1 and cache.k[0].shape == layer.kv_cache[:, 0].shape
        assert cache.v[0].data_ptr() == layer.kv_cache[:, 1].data_ptr()


def test_a_user_keeps_vllms_attention() -> None:
    runner = worker(additional_config={plugin.ATTENTION: False}).model_runner
    assert "4 decode batches, one graph each; 0 with" in runner.model._compiled_call_impl.report()
    runner = worker().model_runner
    assert "4 decode batches, one graph each; 4 with" in runner.model._compiled_call_impl.report()


def test_where_ours_cannot_be_captured_vllms_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise AttentionError("no such kernel.", "leave it")

    monkeypatch.setattr(sys.modules[type(attention()).__module__], "attend_in_graph", fails)
    runner = worker().model_runner
    assert "4 decode batches, one graph each; 0 with" in runner.model._compiled_call_impl.report()
    assert "its attention is vLLM's: no such kernel" in caplog.text


@pytest.mark.parametrize("new", ["new", "resumed"])
@pytest.mark.parametrize("own", [True, False])
def test_a_request_that_is_new_may_share_pages_that_the_step_writes(new: str, own: bool) -> None:
    """vLLM writes all K and V before it reads any; one launch of ours does both."""
    served = worker(additional_config={plugin.ATTENTION: own})
    given = {"scheduled_new_reqs": ["b"]} if new == "new" else {}
    cached = doubles.CachedRequestData({"b"} if new == "resumed" else set())
    admits = doubles.SchedulerOutput(DECODE, scheduled_cached_reqs=cached, **given)
    with pg.counters.expect(full_replays=0 if own else 1):
        served.execute_model(admits)
    with pg.counters.expect(full_replays=1):
        served.execute_model(doubles.SchedulerOutput(DECODE))


@pytest.mark.parametrize("value", ["no", 1, None])
def test_another_value_is_refused(value: Any) -> None:
    with pytest.raises(IntegrationError, match="give true or false"):
        config(additional_config={plugin.ATTENTION: value})


def test_kernels_of_smaller_batches_are_compiled_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, own, expected = worker().model_runner, attention(), list[int]()
    layers = runner.compilation_config.static_forward_context

    def note(batch: Any, *_: Any, **__: Any) -> None:
        expected.append(batch.num_requests)
        shapes = batch.block_table.shape[0], *batch.slot_mapping.shape, batch.qo_indptr.shape[0] - 1
        assert shapes == (batch.num_requests,) * 3 and batch.slot_mapping.dtype == torch.int64

    monkeypatch.setattr(sys.modules[type(own).__module__], "expect_graph_calls", note)
    for tokens, smaller in ((8, {1, 2, 4}), (4, set())):  # the largest come first
        pairs = [(request % doubles.REQUESTS, 1) for request in range(tokens)]
        context = doubles.ForwardContext(layers, *runner._metadata(pairs, tokens, write=False))
        with own.instead(context):
            assert set(expected) == {tokens} | smaller
        expected.clear()


def test_kv_caches_go_when_vllm_drops_them() -> None:
    """At once: vLLM freezes the garbage collector after its warm-up."""
    served = worker()
    gone = weakref.ref(served.model_runner.model.layers[0].kv_cache.untyped_storage())
    gc.collect()
    gc.disable()
    try:
        served.initialize_from_config(16)
        assert gone() is None
    finally:
        gc.enable()
