"""vLLM on this backend: `vllm serve MODEL -cc.backend=piecewise` is all that a user sets.

vLLM finds `register` through its entry point group `vllm.general_plugins` and calls it in every process.

Note [Hooks]
One function of vLLM is wrapped, because nothing else sees a backend before vLLM refuses it:
`VllmConfig.__post_init__`. Before it runs, the settings of `configure` are made. After it, the worker class
is exchanged for `PiecewiseWorker`, as vLLM's own option `--worker-cls` does. All else is done by that class
(vllm_worker.py). An attribute that is not there raises IntegrationError, with its name and vLLM's version,
before weights are loaded.

Note [Settings]
* mode 1 (stock torch.compile): vLLM wraps nothing around the model, and its second model runner is off. The
  default, mode 3, takes vLLM's own compiler.
* cudagraph_mode FULL_DECODE_ONLY: decode batches are padded by vLLM, keep their metadata in persistent
  buffers, and are one graph each. Other batches come at their live length, and are replayed piecewise.
* additional_config "piecewise_prompt_tokens": how long the steps are that get graphs beyond vLLM's capture
  sizes (vllm_sizes.py). It is not set where the user chose capture sizes.
* additional_config "piecewise_attention": whether attention of decode batches is ours (vllm_attention.py).
* custom_ops "none", and "native" first among the implementations of vLLM's IR ops: Inductor then fuses norms,
  activations and rotary embeddings. For a backend not called "inductor", vLLM chooses opaque kernels.
* inductor_compile_config is vLLM's own: Inductor gets it for our segments too (vllm_model.py). By default it
  has one kernel do what several would do side by side, such as the rotary embeddings of queries and keys.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import Any

from piecewise_graph.integrations.errors import IntegrationError
from piecewise_graph.integrations.stacks import VLLM
from piecewise_graph.integrations.vllm_settings import settle
from piecewise_graph.integrations.vllm_sizes import configure_prompts

BACKEND = "piecewise"
ATTENTION = "piecewise_attention"  # a setting (vllm_settings.py)
WORKER = "vllm.v1.worker.gpu_worker.Worker"
OUR_WORKER = "piecewise_graph.integrations.vllm_worker.PiecewiseWorker"

log = logging.getLogger("vllm.piecewise_graph")  # vLLM shows what is logged below its own name


def register() -> None:
    """Attach to vLLM. It may be called any number of times; other backends notice nothing.

    Raises nothing: vLLM would not start, whatever backend its user asked for.
    """
    config = import_module("vllm.config").VllmConfig
    post_init = getattr(config, "__post_init__", None)
    if post_init is None:
        log.warning("%s", VLLM.missing("vllm.config.VllmConfig.__post_init__"))
    elif not hasattr(post_init, "configures_piecewise"):
        config.__post_init__ = _configuring(post_init)


def _configuring(post_init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(post_init)
    def configuring(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = is_asked_for(self)
        if asked:
            refuse(self)
            configure(self)
        post_init(self, *args, **kwargs)
        if asked:
            take_worker(self)

    configuring.configures_piecewise = True  # type: ignore[attr-defined]
    return configuring


def is_asked_for(config: Any) -> bool:
    """The user chose this backend."""
    return getattr(getattr(config, "compilation_config", None), "backend", None) == BACKEND


# --- what is refused ----------------------------------------------------------------------------------

# Of VllmConfig: setting, what the error calls it, what to do. Those of `model_config` are not asked where
# there is no model.
_LEAVE_OUT = "leave it out, or leave the backend out."
_ABOVE_ONE = (
    ("parallel_config.pipeline_parallel_size", "pipeline parallelism", _LEAVE_OUT),
    ("parallel_config.tensor_parallel_size", "tensor parallelism", _LEAVE_OUT),
    ("parallel_config.data_parallel_size", "data parallelism", "start one server per replica instead."),
    ("parallel_config.prefill_context_parallel_size", "prefill context parallelism", _LEAVE_OUT),
    ("parallel_config.decode_context_parallel_size", "decode context parallelism", _LEAVE_OUT),
)
_SET = (
    ("parallel_config.use_ubatching", "dual batch overlap or micro-batches", _LEAVE_OUT),
    ("parallel_config.enable_eplb", "expert load balancing", _LEAVE_OUT),
    ("lora_config", "LoRA adapters", _LEAVE_OUT),
    ("kv_transfer_config", "KV transfer", _LEAVE_OUT),
    ("ec_transfer_config", "encoder cache transfer", _LEAVE_OUT),
    (
        "cache_config.calculate_kv_scales",
        "KV scales calculated while serving",
        "take a checkpoint with scales, or leave calculate_kv_scales out.",
    ),
    ("model_config.enforce_eager", "enforce_eager, which compiles nothing", "leave one of the two out."),
    ("model_config.is_multimodal_model", "inputs other than text", "leave the backend out."),
    ("model_config.is_encoder_decoder", "an encoder and a decoder", "leave the backend out."),
    ("model_config.enable_prompt_embeds", "prompts given as embeddings", _LEAVE_OUT),
    ("offload_config.uva.cpu_offload_gb", "weights offloaded to the CPU", _LEAVE_OUT),
    ("offload_config.prefetch.offload_group_size", "weights offloaded to the CPU", _LEAVE_OUT),
)
_COMPILATION = "vllm.config.compilation"
_GRAPH_MODES = ("NONE", "FULL_DECODE_ONLY")


def refuse(config: Any) -> None:
    """Refuse settings that this backend does not serve.

    Raises:
        IntegrationError: with the setting and what to do.
    """
    has_model = config.model_config is not None
    for settings, harmless in ((_ABOVE_ONE, 1), (_SET, 0)):
        for name, told, remedy in settings:
            if name.startswith("model_config.") and not has_model:
                continue
            value = VLLM.required(config, name, "VllmConfig")
            if value and value != harmless:
                raise IntegrationError.unsupported(told, remedy)
    if has_model and VLLM.required(config, "model_config.runner_type", "VllmConfig") != "generate":
        raise IntegrationError.unsupported("pooling instead of generation", "leave the backend out.")
    if VLLM.imported("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER"):
        raise IntegrationError.unsupported(
            "vLLM's second model runner", "unset VLLM_USE_V2_MODEL_RUNNER; the first one serves this backend."
        )
    if VLLM.imported("vllm.envs", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        raise IntegrationError.unsupported("breakable graphs", "unset VLLM_USE_BREAKABLE_CUDAGRAPH.")
    _refuse_compilation(config.compilation_config)


def _refuse_compilation(compilation: Any) -> None:
    stock = VLLM.imported(_COMPILATION, "CompilationMode.STOCK_TORCH_COMPILE")
    if VLLM.required(compilation, "mode", "CompilationConfig") not in (None, stock):
        raise IntegrationError.unsupported(f"compilation mode {compilation.mode}", "leave the mode out.")
    graphs = VLLM.required(compilation, "cudagraph_mode", "CompilationConfig")
    if graphs is not None and graphs.name not in _GRAPH_MODES:
        raise IntegrationError.unsupported(
            f"cudagraph_mode {graphs.name}", f"leave it out, or choose one of {', '.join(_GRAPH_MODES)}."
        )


# --- what is set --------------------------------------------------------------------------------------


def configure(config: Any) -> None:
    """Make the settings that this backend needs; see Note [Settings]. What the user set stays.

    Raises:
        IntegrationError: vLLM has no such setting.
    """
    compilation = config.compilation_config
    compilation.mode = VLLM.imported(_COMPILATION, "CompilationMode.STOCK_TORCH_COMPILE")
    if compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = VLLM.imported(_COMPILATION, "CUDAGraphMode.FULL_DECODE_ONLY")
    configure_prompts(config)
    settle(config, ATTENTION, True, "give true or false.")
    custom_ops = VLLM.required(compilation, "custom_ops", "CompilationConfig")
    if not {"all", "none"} & set(custom_ops):
        custom_ops.append("none")
    priorities = VLLM.required(config, "kernel_config.ir_op_priority", "VllmConfig")
    for field in fields(priorities):
        if getattr(priorities, field.name) == []:
            setattr(priorities, field.name, ["native"])


def take_worker(config: Any) -> None:
    """Have vLLM make a `PiecewiseWorker` where it would make its own for GPUs.

    Raises:
        IntegrationError: the platform or the user chose another one.
    """
    parallel = config.parallel_config
    chosen = VLLM.required(parallel, "worker_cls", "ParallelConfig")
    if chosen not in (WORKER, OUR_WORKER):
        raise IntegrationError.unsupported(f"worker class {chosen!r}", f"use a GPU, and vLLM's own {WORKER}.")
    parallel.worker_cls = OUR_WORKER
