"""A double of vLLM 0.23.0's worker and of its first model runner: who calls the model when, and with what."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_attention_doubles import PAGE, WIDTH, Metadata
from vllm_doubles import (
    LENGTH,
    MOST_TOKENS,
    REQUESTS,
    BatchDescriptor,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    Model,
    SchedulerOutput,
    VllmConfig,
    install,
    set_forward_context,
)

from piecewise_graph.integrations import vllm as plugin

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE


class Drafter:
    def __init__(self, config: VllmConfig, hidden: Tensor) -> None:
        self.vllm_config, self.hidden = config, hidden
        self.model = Model(config, "draft", drafts=True)


class GPUModelRunner:
    """Its buffers are persistent, as vLLM's are; a request is an index and has the slots of its row."""

    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config, self.compilation_config = config, config.compilation_config
        self.speculative_config, self.uniform_decode_query_len = config.speculative_config, 1
        self.max_num_tokens = MOST_TOKENS
        self.input_ids = torch.zeros(MOST_TOKENS, dtype=torch.long)
        self.positions = torch.zeros(MOST_TOKENS, dtype=torch.long)
        self.slots = torch.full((MOST_TOKENS,), -1)
        self.starts = torch.zeros(MOST_TOKENS + 1, dtype=torch.int32)
        self.lengths = torch.zeros(MOST_TOKENS, dtype=torch.int32)
        self.tables = torch.zeros(MOST_TOKENS, LENGTH // PAGE, dtype=torch.int32)
        self.done = [0] * REQUESTS  # tokens of each request so far
        self.order: list[str] = []

    def load_model(self) -> None:
        self.order.append("load")
        torch.manual_seed(1)
        self.model = Model(self.vllm_config, "target")
        if self.speculative_config is not None:
            self.drafter = Drafter(self.vllm_config, torch.zeros(MOST_TOKENS, 8))
        if self.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
            self.model.compile(fullgraph=True, backend=self.compilation_config.backend)

    @torch.inference_mode()
    def _dummy_run(self, tokens: int, mode: CUDAGraphMode = NONE, force_attention: bool = False) -> Tensor:
        """Requests of one token that write no KV; with metadata in FULL form, or where that is forced."""
        metadata, slots = None, None
        if mode is FULL or force_attention:
            metadata, slots = self._metadata([(0, 1)] * tokens, tokens, write=False)
        descriptor = BatchDescriptor(tokens, tokens, True) if mode is FULL else BatchDescriptor(tokens)
        with self._context(metadata, slots, mode, descriptor):
            hidden = self._call(tokens)
        if self.speculative_config is not None:
            self._draft(tokens)
        return hidden

    def profile_run(self) -> None:
        self.order.append("profile")
        with torch.inference_mode():
            self.model.compute_logits(self._dummy_run(MOST_TOKENS)[:REQUESTS])

    def profile_cudagraph_memory(self) -> int:
        raise AssertionError("binds a temporary KV cache and captures; the plugin stands in its place")

    def initialize_kv_cache(self, blocks: int) -> None:
        self.order.append("bind")
        for layer in self.compilation_config.static_forward_context.values():
            layer.kv_cache = torch.zeros(blocks, 2, PAGE, 1, WIDTH)

    def capture_model(self) -> int:
        if self.compilation_config.cudagraph_mode is NONE:
            return 0
        self.order.append("capture")
        for size in sorted(self.compilation_config.cudagraph_capture_sizes, reverse=True):
            self._dummy_run(size, force_attention=True)
            self._dummy_run(size, FULL)
        return 1

    @torch.inference_mode()
    def execute_model(self, batch: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, Tensor]:
        """Serve (request, its next tokens) pairs; hidden states of all tokens, logits of the last ones."""
        tokens = [token for _, each in batch for token in each]
        live = len(tokens)
        sizes = self.compilation_config.cudagraph_capture_sizes
        fits = [size for size in sizes if size >= live]
        decodes = all(len(each) == 1 for _, each in batch)
        is_full = decodes and bool(fits) and self.compilation_config.cudagraph_mode is not NONE
        padded = min(fits) if is_full else live
        self.input_ids[:live] = torch.tensor(tokens)
        pairs = [(request, len(each)) for request, each in batch]
        places = [range(self.done[request], self.done[request] + count) for request, count in pairs]
        self.positions[:live] = torch.tensor([place for each in places for place in each])
        metadata, slots = self._metadata(pairs, padded, write=True)
        mode, count = (FULL, padded) if is_full else (NONE, len(batch))
        with self._context(metadata, slots, mode, BatchDescriptor(padded, count, is_full)):
            hidden = self._call(padded)
        for request, fresh in pairs:
            self.done[request] += fresh
        last = torch.tensor([count for _, count in pairs]).cumsum(0) - 1
        logits = self.model.compute_logits(hidden[last])
        return hidden[:live].clone(), logits.clone()

    def _call(self, tokens: int) -> Tensor:
        return self.model(
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            intermediate_tensors=None,
            inputs_embeds=None,
        )

    def _draft(self, tokens: int) -> None:
        with set_forward_context(None, self.vllm_config):
            self.drafter.model(
                input_ids=self.input_ids[:tokens],
                positions=self.positions[:tokens],
                inputs_embeds=None,
                hidden_states=self.drafter.hidden[:tokens],
            )

    def _metadata(
        self, batch: Sequence[tuple[int, int]], padded: int, write: bool
    ) -> tuple[dict[str, Metadata], dict[str, Tensor]]:
        """In the buffers; requests of the padding have no token and no length."""
        longest, live = max((count for _, count in batch), default=0), sum(count for _, count in batch)
        at, rows = 0, max(len(batch), padded // longest if padded > live else 0)
        self.slots[:padded], self.lengths[:rows] = -1, 0
        for row, (request, count) in enumerate(batch):
            first = self.done[request] if write else 0
            if write:
                self.slots[at : at + count] = torch.arange(first, first + count) + request * LENGTH
            pages = LENGTH // PAGE
            self.tables[row] = torch.arange(pages) + request * pages
            self.lengths[row] = first + count
            at += count
            self.starts[row + 1] = at
        self.starts[len(batch) + 1 : rows + 1] = at
        slots = self.slots[:padded]
        metadata = Metadata(
            at, longest, self.starts[: rows + 1], self.lengths[:rows], self.tables[:rows], slots
        )
        names = self.model.names
        return dict.fromkeys(names, metadata), dict.fromkeys(names, slots)

    @contextmanager
    def _context(self, metadata: Any, slots: Any, mode: Any, descriptor: BatchDescriptor) -> Iterator[None]:
        with set_forward_context(metadata, self.vllm_config, mode, descriptor, slots):
            yield


class Worker:
    def __init__(self, config: VllmConfig) -> None:
        self.vllm_config = config

    def init_device(self) -> None:
        self.model_runner = GPUModelRunner(self.vllm_config)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.model_runner.load_model()

    def determine_available_memory(self) -> int:
        self.model_runner.profile_run()
        self.cudagraph_memory_estimate = self.model_runner.profile_cudagraph_memory()
        return self.cudagraph_memory_estimate

    def initialize_from_config(self, kv_cache_config: int) -> None:
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> None:
        self.model_runner._dummy_run(MOST_TOKENS, force_attention=True)  # kernel_warmup
        self.model_runner.capture_model()
        self.model_runner._dummy_run(REQUESTS)  # warms up the sampler

    def execute_model(self, scheduler_output: SchedulerOutput) -> tuple[Tensor, Tensor]:
        return self.model_runner.execute_model(scheduler_output.batch)

    def sleep(self, level: int = 1) -> None:
        self.model_runner.order.append("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_runner.order.append("wake")

    def reload_weights(self) -> None:
        self.model_runner.order.append("reload")

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.model_runner.order.append("update")

    def finish_weight_update(self) -> None:
        self.model_runner.order.append("updated")

    def shutdown(self) -> None:
        self.model_runner.model = None


def started(make: type, config: VllmConfig) -> Any:
    """A worker of class `make` after vLLM's start-up, with KV for all requests."""
    worker = make(config)
    worker.init_device()
    worker.load_model()
    if isinstance(worker, Worker) and make is not Worker:
        worker.determine_available_memory()
    else:
        worker.model_runner.profile_run()
    worker.initialize_from_config(REQUESTS * LENGTH // PAGE)
    worker.compile_or_warm_up_model()
    return worker


def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doubles stand in place of vLLM for one test, and the plugin is attached to them."""
    install(monkeypatch)
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "eager")
    plugin.register()


def eagle() -> Any:
    return types.SimpleNamespace(use_eagle=lambda: True)


def config(**given: Any) -> Any:
    compilation = CompilationConfig(**{"backend": "piecewise", **given.pop("compilation", {})})
    return sys.modules["vllm.config"].VllmConfig(compilation_config=compilation, **given)


def worker(**given: Any) -> Any:
    """A started worker of the class that the configuration names."""
    made = config(**given)
    module, _, name = made.parallel_config.worker_cls.rpartition(".")
    return started(getattr(importlib.import_module(module), name), made)
