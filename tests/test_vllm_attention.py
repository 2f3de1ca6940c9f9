"""Attention of vLLM's decode batches by our kernel: what vLLM's computes, and whose turn it is."""

from __future__ import annotations

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
from vllm_worker_doubles import FULL, config, worker

from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.integrations import vllm as plugin
from piecewise_graph.integrations.errors import IntegrationError

DECODE = [(0, [8]), (1, [9]), (2, [10])]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch)
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "eager")
    plugin.register()


def attention() -> Any:
    return importlib.import_module("piecewise_graph.integrations.vllm_attention").DecodeAttention(
        doubles.SIZES
    )


def noting_theirs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes calls of vLLM's attention that have metadata."""
    found: list[str] = []
    forward = FlashAttentionImpl.forward

    def noting(self: Any, layer: Any, *args: Any, **given: Any) -> Any:
        if args[4] is not None:
            found.append(layer.name.value)
        return forward(self, layer, *args, **given)

    monkeypatch.setattr(FlashAttentionImpl, "forward", noting)
    return found


def hidden_and_pages(runner: Any, lengths: list[int], padded: int, own: Any) -> tuple[Tensor, Tensor]:
    """Of a decode batch of requests with so many tokens, on a random cache, without any graph."""
    torch.manual_seed(0)
    for layer in runner.compilation_config.static_forward_context.values():
        layer.kv_cache.normal_()
    runner.done[: len(lengths)] = lengths
    metadata, slots = runner._metadata([(request, 1) for request in range(len(lengths))], padded, write=True)
    ids, positions = torch.arange(padded), torch.zeros(padded, dtype=torch.long)
    positions[: len(lengths)] = torch.tensor(lengths)
    with ExitStack() as block:
        block.enter_context(torch.inference_mode())
        block.enter_context(runner._context(metadata, slots, FULL, doubles.BatchDescriptor(padded)))
        if own is not None:
            block.enter_context(own.instead(doubles.get_forward_context()))
        hidden = doubles.Model.forward(runner.model, ids, positions)
    layers = runner.compilation_config.static_forward_context.values()
    return hidden[: len(lengths)], torch.stack([layer.kv_cache.clone() for layer in layers])


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, doubles.LENGTH - 1), min_size=1, max_size=doubles.REQUESTS),
    padding=st.integers(0, 3),
    windows=st.lists(st.none() | st.integers(1, 12), min_size=doubles.LAYERS, max_size=doubles.LAYERS),
    softcap=st.sampled_from([0, 2.5]),
)
def test_it_computes_and_writes_what_vllm_would(
    lengths: list[int], padding: int, windows: list[int | None], softcap: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        doubles.install(patch)
        runner = worker().model_runner
        for layer, window in zip(runner.model.layers, windows, strict=True):
            layer.impl = FlashAttentionImpl(window, softcap)
        padded, own = len(lengths) + padding, attention()
        wanted = hidden_and_pages(runner, lengths, padded, None)
        theirs = noting_theirs(patch)
        found = hidden_and_pages(runner, lengths, padded, own)
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
    import piecewise_graph as pg

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
    hidden_and_pages(runner, [3, 5], 2, own)
    assert own.served == (runner.model.names[0],)
    assert set(theirs) == ({runner.model.names[1]} if name != "forward" else set())


@pytest.mark.parametrize("change", ["causal", "cascade", "pages", "tables", "no metadata"])
def test_batches_that_are_not_ours_have_vllms(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, own = worker().model_runner, attention()
    metadata, slots = runner._metadata([(0, 1)], 1, write=True)
    each = metadata[runner.model.names[0]]
    if change == "causal":
        each.causal = False
    elif change == "cascade":
        each.use_cascade = True
    elif change == "tables":
        each.block_table = each.block_table.long()
    elif change == "pages":  # HND: heads before tokens
        for layer in runner.model.layers:
            layer.kv_cache = torch.zeros(8, 2, 2, PAGE, WIDTH).transpose(2, 3)
    context = doubles.ForwardContext(
        runner.compilation_config.static_forward_context,
        None if change == "no metadata" else metadata,
        slots,
    )
    with own.instead(context) as kept_alive:
        assert (own.served, kept_alive) == ((), ())


def test_layers_of_other_metadata_are_batches_of_their_own() -> None:
    """As hybrid models have it: each group of layers has its own pages."""
    runner, own = worker().model_runner, attention()
    (first, slots), (second, others) = (runner._metadata([(0, 1)], 1, write=True) for _ in "ab")
    names = runner.model.names
    context = doubles.ForwardContext(
        runner.compilation_config.static_forward_context,
        {names[0]: first[names[0]], names[1]: second[names[1]]},
        {names[0]: slots[names[0]], names[1]: others[names[1]]},
    )
    with own.instead(context) as batches:
        assert own.served == tuple(names)
    assert [batch.kv_cache.num_layers for batch in batches] == [1, 1]


def test_a_user_keeps_vllms_attention() -> None:
    runner = worker(additional_config={plugin.ATTENTION: False}).model_runner
    assert "attention of 0 layers" in runner.model._compiled_call_impl.report()
    assert f"attention of {doubles.LAYERS} layers" in worker().model_runner.model._compiled_call_impl.report()


@pytest.mark.parametrize("value", ["no", 1, None])
def test_another_value_is_refused(value: Any) -> None:
    with pytest.raises(IntegrationError, match="give true or false"):
        config(additional_config={plugin.ATTENTION: value})


def test_kernels_of_smaller_batches_are_compiled_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, own, expected = worker().model_runner, attention(), list[int]()
    layers = runner.compilation_config.static_forward_context

    def note(batch: Any, *_: Any, **__: Any) -> None:
        expected.append(batch.num_requests)

    monkeypatch.setattr(sys.modules[type(own).__module__], "expect_graph_calls", note)
    for tokens, smaller in ((8, {1, 2, 4}), (4, set())):  # the largest come first
        pairs = [(request % doubles.REQUESTS, 1) for request in range(tokens)]
        context = doubles.ForwardContext(layers, *runner._metadata(pairs, tokens, write=False))
        with own.instead(context):
            assert set(expected) == {tokens} | smaller
        expected.clear()


def test_kv_caches_go_when_vllm_drops_them() -> None:
    served = worker()
    layer = served.model_runner.model.layers[0]
    gone = weakref.ref(layer.kv_cache.untyped_storage())
    served.initialize_from_config(16)
    gc.collect()
    assert gone() is None
