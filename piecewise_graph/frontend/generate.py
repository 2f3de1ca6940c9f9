"""`generate` of what pg.compile returned: transformers' loop, its decode steps served by this model's traces.

transformers compiles the forward of a decode step by itself, where the KV cache is static: it passes
`model.__call__` to torch.compile with what a `CompileConfig` says. This one names our backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from piecewise_graph.frontend.model_backend import ModelBackend
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.telemetry import count_fallback

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def generates(model: Any) -> bool:
    """It has the `generate` of transformers, or peft's, which hands calls on to that."""
    mixin = getattr(sys.modules.get("transformers"), "GenerationMixin", None)
    inner = getattr(model, "get_base_model", lambda: model)()
    return mixin is not None and isinstance(inner, mixin)


class CompiledGenerate:
    """`model.generate`, with decode steps compiled into the traces of `state`.

    Call it as transformers' own. Unless the call names a cache, it is `cache_implementation="static"`. A call
    whose steps transformers does not compile (a dynamic cache, one token) is answered all the same, and
    counted as `generate_not_compiled`.
    """

    def __init__(self, model: Any, state: ModelState) -> None:
        self._model, self._state = model, state
        self._backend = _backend(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from transformers import CompileConfig

        # transformers compiles anew where the configuration differs from the one before: equal ones are.
        compiled = CompileConfig(backend=self._backend, mode=None)  # type: ignore[arg-type]
        compiled._compile_all_devices = True  # type: ignore[assignment]
        if self._names_no_cache(kwargs):
            kwargs = {"cache_implementation": "static", **kwargs}
        self._state.channel.begin_call()
        result = self._model.generate(*args, **{"compile_config": compiled, **kwargs})
        if not self._state.channel.graphs_run:
            count_fallback(self._state.fallbacks, "generate_not_compiled")
        return result

    def _names_no_cache(self, kwargs: dict[str, Any]) -> bool:
        settings = kwargs.get("generation_config") or self._model.generation_config
        named = (kwargs.get(name) for name in ("past_key_values", "cache_implementation", "cache_config"))
        return all(value is None for value in (*named, settings.cache_implementation))


def _backend(state: ModelState) -> Backend:
    """A function, since transformers copies its configuration deeply: an object's graphs would be copied."""
    ours = ModelBackend(state)

    def piecewise(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        return ours(gm, example_inputs, **options)

    return piecewise
