"""SGLang on this backend: its prefill batches are replayed piecewise by us.

    python -m sglang.launch_server ... \
        --cuda-graph-config '{"prefill": {"backend": "tc_piecewise", "tc_compiler": "piecewise"}}'

SGLang finds `register` through its entry point group `sglang.srt.plugins` and calls it in every process.

Note [SGLang's hook]
One function is wrapped, through SGLang's own `HookRegistry`: the one by which the prefill runner chooses what
captures and replays for it. The runner imports it by name, so the hook is on the name in the runner's module.
For the compiler "piecewise", which SGLang itself refuses, it makes a `PiecewisePrefillBackend`
(sglang_backend.py), and for all else what SGLang would. Decode steps stay SGLang's: one graph each.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from piecewise_graph.integrations.errors import IntegrationError
from piecewise_graph.integrations.stacks import SGLANG

COMPILER = "piecewise"
CHOICE = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.resolve_prefill_backend"
_HOOKS = "sglang.srt.plugins.hook_registry"

# Of ServerArgs: setting, the value that is harmless, what the error calls it.
_UNSUPPORTED = (
    ("tp_size", 1, "tensor parallelism"),
    ("pp_size", 1, "pipeline parallelism"),
    ("dp_size", 1, "data parallelism"),
    ("enable_lora", False, "LoRA adapters"),
    ("enable_memory_saver", False, "the memory saver"),
)


def register() -> None:
    """Attach to SGLang; other settings than ours notice nothing."""
    registry = SGLANG.imported(_HOOKS, "HookRegistry")
    registry.register(CHOICE, choose, SGLANG.imported(_HOOKS, "HookType.AROUND"))


def choose(original: Callable[[Any], Any], runner: Any) -> Any:
    """What captures and replays for a prefill runner.

    Raises:
        IntegrationError: it is ours, and does not serve these settings, or does not fit this SGLang.
    """
    server = SGLANG.required(runner, "model_runner.server_args", "PrefillCudaGraphRunner")
    if not is_asked_for(server):
        return original(runner)
    refuse(server)
    module = import_module("piecewise_graph.integrations.sglang_backend")
    module.check_hooks()
    return module.PiecewisePrefillBackend(runner)


def is_asked_for(server: Any) -> bool:
    """The user chose our compiler for piecewise graphs of prefill batches."""
    prefill = getattr(getattr(server, "cuda_graph_config", None), "prefill", None)
    piecewise = getattr(prefill, "backend", None) == "tc_piecewise"
    return piecewise and getattr(prefill, "tc_compiler", None) == COMPILER


def refuse(server: Any) -> None:
    """Refuse settings that this backend does not serve.

    Raises:
        IntegrationError: with the setting and what to do.
    """
    for name, harmless, told in _UNSUPPORTED:
        if SGLANG.required(server, name, "ServerArgs") != harmless:
            remedy = "leave it out, or choose another compiler."
            raise IntegrationError.unsupported(told, remedy, f"tc_compiler={COMPILER!r}")
