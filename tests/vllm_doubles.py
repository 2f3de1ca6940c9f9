"""A double of the parts of vLLM 0.23.0 that the plugin is attached to, in the order in which vLLM calls them.

The modules go into `sys.modules` for one test. Ops have vLLM's schemas, with opaque layer names; KV is really
written and read, through the forward context, so that a stale cache or a wrong length shows in the tokens.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.opaque_object import OpaqueBase, get_opaque_type_name, register_opaque_type
from vllm_attention_doubles import WIDTH, FlashAttentionImpl

LAYERS, VOCABULARY = 2, 50
SIZES, MOST_TOKENS, REQUESTS, LENGTH = [1, 2, 4, 8], 16, 4, 32


class CompilationMode(enum.IntEnum):
    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)


@dataclass
class CompilationConfig:
    backend: str = "inductor"
    mode: CompilationMode | None = None
    cudagraph_mode: CUDAGraphMode | None = None
    custom_ops: list[str] = field(default_factory=list)
    cudagraph_capture_sizes: list[int] | None = None
    max_cudagraph_capture_size: int | None = None
    inductor_compile_config: dict[str, Any] = field(default_factory=dict)
    static_forward_context: dict[str, Any] = field(default_factory=dict)
    _attention_ops = ("vllm::unified_attention_with_output", "vllm::mamba_mixer2")


@dataclass
class ParallelConfig:
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    use_ubatching: bool = False
    enable_eplb: bool = False
    worker_cls: str = "auto"


@dataclass
class ModelConfig:
    enforce_eager: bool = False
    is_multimodal_model: bool = False
    is_encoder_decoder: bool = False
    enable_prompt_embeds: bool = False
    runner_type: str = "generate"
    hidden_size: int = 2048

    def get_hidden_size(self) -> int:
        return self.hidden_size


@dataclass
class IrOpPriorityConfig:
    rms_norm: list[str] = field(default_factory=list)


@dataclass
class VllmConfig:
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    model_config: ModelConfig | None = field(default_factory=ModelConfig)
    cache_config: Any = field(default_factory=lambda: types.SimpleNamespace(calculate_kv_scales=False))
    kernel_config: Any = field(
        default_factory=lambda: types.SimpleNamespace(ir_op_priority=IrOpPriorityConfig())
    )
    offload_config: Any = field(
        default_factory=lambda: types.SimpleNamespace(
            uva=types.SimpleNamespace(cpu_offload_gb=0.0),
            prefetch=types.SimpleNamespace(offload_group_size=0),
        )
    )
    lora_config: Any = None
    kv_transfer_config: Any = None
    ec_transfer_config: Any = None
    speculative_config: Any = None
    additional_config: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.compilation_config.cudagraph_capture_sizes is None:
            self.compilation_config.cudagraph_capture_sizes = list(SIZES)
        if self.compilation_config.mode is None:
            self.compilation_config.mode = CompilationMode.VLLM_COMPILE
        if self.compilation_config.cudagraph_mode is None:
            self.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        if self.parallel_config.worker_cls == "auto":  # check_and_update_config of the CUDA platform
            self.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"


# --- the forward context and the ops that read it -------------------------------------------------------


@dataclass
class CachedRequestData:
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class SchedulerOutput:
    batch: Any  # of the double of the model runner
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)


@dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


@dataclass
class ForwardContext:
    no_compile_layers: dict[str, Any]
    attn_metadata: Any
    slot_mapping: dict[str, Tensor]
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None


_context: ForwardContext | None = None


def get_forward_context() -> ForwardContext:
    assert _context is not None, "Forward context is not set."
    return _context


@contextmanager
def set_forward_context(
    attn_metadata: Any,
    vllm_config: VllmConfig,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    slot_mapping: dict[str, Tensor] | None = None,
) -> Iterator[None]:
    global _context  # noqa: PLW0603
    before, layers = _context, vllm_config.compilation_config.static_forward_context
    _context = ForwardContext(
        layers, attn_metadata, slot_mapping or {}, cudagraph_runtime_mode, batch_descriptor
    )
    try:
        yield
    finally:
        _context = before


class LayerName(OpaqueBase):
    """As vLLM passes names of layers with torch >= 2.11."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


register_opaque_type(LayerName, typ="value", hoist=True)
NAME = get_opaque_type_name(LayerName)
LIBRARY = torch.library.Library("vllm", "FRAGMENT")
LIBRARY.define(f"unified_kv_cache_update(Tensor key, Tensor value, {NAME} layer_name) -> Tensor")
LIBRARY.define(
    "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, "
    f"{NAME} layer_name, Tensor? output_scale=None, Tensor(b!)? output_block_scale=None, "
    "Tensor? kv_cache_dummy_dep=None) -> ()"
)


def update(key: Tensor, value: Tensor, layer_name: LayerName) -> Tensor:
    context = get_forward_context()
    slots, layer = context.slot_mapping.get(layer_name.value), context.no_compile_layers[layer_name.value]
    if slots is not None:
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    return torch.empty(0, dtype=torch.float8_e4m3fn)  # of the cache's dtype, whatever the fake says


def attend(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: LayerName, *_: Any) -> None:
    context = get_forward_context()
    layer, metadata = context.no_compile_layers[layer_name.value], context.attn_metadata
    found = metadata[layer_name.value] if isinstance(metadata, dict) else metadata
    given = {"output_scale": None, "output_block_scale": None}
    layer.impl.forward(layer, query, key, value, layer.kv_cache, found, output=output, **given)


LIBRARY.impl("unified_kv_cache_update", update, "CompositeExplicitAutograd")
LIBRARY.impl("unified_attention_with_output", attend, "CompositeExplicitAutograd")
torch.library.register_fake(
    "vllm::unified_kv_cache_update", lambda key, value, layer_name: key.new_empty(0), lib=LIBRARY
)
torch.library.register_fake("vllm::unified_attention_with_output", lambda *_, **__: None, lib=LIBRARY)


# --- the model ----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, name: str, config: VllmConfig) -> None:
        super().__init__()
        self.name, self.kv_cache, self.impl = LayerName(name), torch.tensor([]), FlashAttentionImpl()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        config.compilation_config.static_forward_context[name] = self

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.view(-1, 1, WIDTH) for each in self.qkv(x).chunk(3, -1))
        output = torch.empty(x.shape[0], WIDTH, dtype=x.dtype, device=x.device).view(-1, 1, WIDTH)
        written = torch.ops.vllm.unified_kv_cache_update(key, value, self.name)
        torch.ops.vllm.unified_attention_with_output(
            query, key, value, output, self.name, kv_cache_dummy_dep=written
        )
        return output.view(-1, WIDTH)


class TorchCompileWithNoGuardsWrapper:
    """vLLM makes it a base of the classes that it compiles."""


class Model(nn.Module):
    """A decoder; with `drafts`, one that takes hidden states too, as EAGLE heads do."""

    def __init__(self, config: VllmConfig, prefix: str, drafts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention(f"{prefix}.{i}", config) for i in range(LAYERS))
        self.names = [layer.name.value for layer in self.layers]
        if drafts:
            self.forward = self.draft  # type: ignore[method-assign]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
    ) -> Tensor:
        x = self.embed(input_ids) + self.place(positions)
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return x

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.embed.weight.t()

    def draft(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Any = None
    ) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids) + self.place(positions) + hidden_states
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return x, x * 2


def modules() -> dict[str, dict[str, Any]]:
    """Module name -> its attributes. The worker and the runner stand in vllm_worker_doubles.py."""
    from vllm_worker_doubles import GPUModelRunner, Worker

    compilation = {"CompilationMode": CompilationMode, "CUDAGraphMode": CUDAGraphMode}
    return {
        "vllm": {"__version__": "0.23.0"},
        "vllm.envs": {"VLLM_USE_V2_MODEL_RUNNER": None, "VLLM_USE_BREAKABLE_CUDAGRAPH": False},
        "vllm.config": {
            "VllmConfig": type("VllmConfig", (VllmConfig,), {})
        },  # the plugin wraps a method of it
        "vllm.config.compilation": compilation,
        "vllm.compilation": {},
        "vllm.compilation.wrapper": {"TorchCompileWithNoGuardsWrapper": TorchCompileWithNoGuardsWrapper},
        "vllm.forward_context": {
            "ForwardContext": ForwardContext,
            "get_forward_context": get_forward_context,
            "set_forward_context": set_forward_context,
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.flash_attn": {"FlashAttentionImpl": FlashAttentionImpl},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.output": {
            "SchedulerOutput": SchedulerOutput,
            "CachedRequestData": CachedRequestData,
        },
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": GPUModelRunner},
    }


def install(monkeypatch: pytest.MonkeyPatch, without: Sequence[str] = ()) -> None:
    """Put the doubles in place of vLLM, without the attributes named ("module:attribute")."""
    for name, attributes in modules().items():
        module = types.ModuleType(name)
        module.__path__ = []
        for attribute, value in attributes.items():
            if f"{name}:{attribute}" not in without:
                setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    # it derives from the double of this test
    monkeypatch.delitem(sys.modules, "piecewise_graph.integrations.vllm_worker", raising=False)
