"""`generate` of what pg.compile returned: transformers' loop, its decode steps served by this model's traces.

transformers compiles the forward of a decode step by itself, where the KV cache is static: it passes
`model.__call__` to torch.compile with what a `CompileConfig` says. This one names our backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from torch.fx import GraphModule

from piecewise_graph.frontend.model_backend import ModelBackend
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.telemetry import count_fallback

# With one of these, `generate` has a cache already, or a mode that takes no static one.
_TAKE_OTHER_CACHES = (
    "past_key_values", "cache_implementation", "cache_config", "assistant_model", "prompt_lookup_num_tokens",
    "assistant_early_exit", "custom_generate", "penalty_alpha", "dola_layers",
)  # fmt: skip
# With one of these, the result holds the cache, which has no room for a next turn, or is as wide as that.
_SHOW_THE_CACHE = ("return_dict_in_generate", "output_attentions")
Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def generates(model: Any) -> bool:
    """It has the `generate` of transformers, or peft's, which hands calls on to that."""
    mixin = getattr(sys.modules.get("transformers"), "GenerationMixin", None)
    return mixin is not None and isinstance(_inner(model), mixin)


def _bears_static_cache(model: Any) -> bool:
    """Whether the model gives the same with a static cache, as far as is known.

    Where transformers says that it cannot be compiled whole, the cache may be the reason: windows of GPT-Neo,
    models of BERT's kind that are no decoders. Models with a state have no such cache. Where ALiBi is an
    option (Falcon), it is as long as the prompt, and the cache is longer.
    """
    inner = _inner(model)
    whole = getattr(inner, "_can_compile_fullgraph", False) or getattr(inner, "_is_stateful", False)
    return bool(whole) and not getattr(inner.config, "alibi", False)


def _inner(model: Any) -> Any:
    """Without peft's wrapper."""
    return getattr(model, "get_base_model", lambda: model)()


class _Steps:
    """Of one `generate`: whether a step ran that was compiled."""

    compiled = False


_steps: ContextVar[_Steps | None] = ContextVar("steps", default=None)


class CompiledGenerate:
    """`model.generate`, with decode steps compiled into the traces of `state`.

    Call it as transformers' own. A greedy or sampling call that names no cache and returns tokens alone gets
    `cache_implementation="static"`, where the model bears it. A call whose steps transformers does not
    compile (a dynamic cache, beams, a draft, one token) is answered all the same, and counted as
    `generate_not_compiled`.
    """

    def __init__(self, model: Any, state: ModelState) -> None:
        self._model, self._state = model, state
        self._backend = _backend(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from transformers import CompileConfig

        asked = self._asked(args, kwargs)
        added: dict[str, Any] = {}
        if asked("compile_config") is None:
            # transformers compiles anew where it differs from the one before: equal ones are equal.
            added["compile_config"] = compiled = CompileConfig(backend=self._backend, mode=None)  # type: ignore[arg-type]
            compiled._compile_all_devices = True  # type: ignore[assignment]
        decodes = asked("use_cache") is not False and asked("num_beams") in (None, 1)
        unchanged = not any(map(asked, _SHOW_THE_CACHE)) and _bears_static_cache(self._model)
        if decodes and unchanged and all(asked(name) is None for name in _TAKE_OTHER_CACHES):
            added["cache_implementation"] = "static"
        before = _steps.set(steps := _Steps())
        try:
            result = self._model.generate(*args, **{**kwargs, **added})
        finally:
            _steps.reset(before)
        if not steps.compiled:
            count_fallback(self._state.fallbacks, "generate_not_compiled")
        return result

    def _asked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[str], Any]:
        """What a call of `generate` asks for by a name, in its keywords or in a configuration."""
        from transformers import GenerationConfig

        given = [value for value in (*args, *kwargs.values()) if isinstance(value, GenerationConfig)]
        settings = given[0] if given else self._model.generation_config

        def asked(name: str) -> Any:
            value = kwargs.get(name)
            return getattr(settings, name, None) if value is None else value

        return asked


def _backend(state: ModelState) -> Backend:
    """A function, since transformers copies its configuration deeply: an object's graphs would be copied."""
    ours = ModelBackend(state, __file__)

    def piecewise(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        trace = ours(gm, example_inputs, **options)

        def step(*args: Any) -> Any:
            if (steps := _steps.get()) is not None:
                steps.compiled = True
            return trace(*args)

        return step

    return piecewise
