"""The prefill graphs of one SGLang model runner; imported where SGLang is, and our compiler was chosen.

Note [SGLang's calls]
The runner pads a batch to one of its sizes, and calls the model while a flag says so; the inner model is
compiled for these calls alone. First come a call without us and one per size to compile. Then each size is
captured inside of SGLang's capture session. Attention runs between the graphs: it narrows itself to the live
tokens and sets the other rows to zero.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.integrations.captures import capture_sizes
from piecewise_graph.integrations.stacks import SGLANG

_MODULE = "sglang.srt.model_executor.runner_backend.tc_piecewise_cuda_graph_backend"
try:
    from sglang.srt.model_executor.runner_backend.tc_piecewise_cuda_graph_backend import (
        TcPiecewiseCudaGraphBackend,
    )
except ImportError as error:
    raise SGLANG.missing(f"{_MODULE}.TcPiecewiseCudaGraphBackend") from error

log = logging.getLogger(__name__)

_METHODS = ("build_compilation_config", "install_compile", "capture_session", "capture_one", "cleanup")
_FLAG = "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph"
# Arguments of SGLang's inner models, with the dimension that counts tokens.
_TOKEN_DIM = {"input_ids": 0, "positions": -1, "input_embeds": 0}


def check_hooks() -> None:
    """Refuse an SGLang that does not have what this class overrides.

    Raises:
        IntegrationError: with the name of the first thing that is missing.
    """
    for name in _METHODS:
        SGLANG.required(TcPiecewiseCudaGraphBackend, name, f"{_MODULE}.TcPiecewiseCudaGraphBackend")
    SGLANG.imported(_FLAG, "is_in_tc_piecewise_cuda_graph")


class PiecewisePrefillBackend(TcPiecewiseCudaGraphBackend):
    """SGLang's order of calls, with our compiler and our graphs."""

    _served: ServedModel

    @staticmethod
    def build_compilation_config(server_args: Any) -> Any:
        """What SGLang makes for Inductor: it then takes its ops in torch's code, which can be fused."""
        prefill = server_args.cuda_graph_config.prefill
        before, prefill.tc_compiler = prefill.tc_compiler, "inductor"
        try:
            return TcPiecewiseCudaGraphBackend.build_compilation_config(server_args)
        finally:
            prefill.tc_compiler = before

    def install_compile(self, language_model: nn.Module, *, compile_config: Any, **_: Any) -> None:
        self._served = ServedModel(
            language_model, compile_config.split_ops, compile_config.get_capture_sizes()
        )

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        with super().capture_session(stream):
            yield
        for line in self._served.report().splitlines():
            log.info("prefill: %s", line)

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], *args: Any, **options: Any) -> None:
        with self._served.capturing():
            super().capture_one(shape_key, forward_fn, *args, **options)

    def cleanup(self) -> None:
        super().cleanup()
        self._served.close()


class ServedModel:
    """Stands in the place of the forward of SGLang's inner model.

    Args:
        module: the model.
        split_ops: names of SGLang's ops that graphs are cut at, as `namespace.op`.
        sizes: token counts that batches are padded to.
    """

    def __init__(self, module: nn.Module, split_ops: list[str], sizes: list[int]) -> None:
        for name in split_ops:
            pg.register_splitting_op(name.replace(".", "::"), padded=True)
        self._module, self._forward = module, module.forward
        self._is_in_graph = SGLANG.imported(_FLAG, "is_in_tc_piecewise_cuda_graph")
        self._signature, self._sizes = inspect.signature(module.forward), sorted(sizes)
        self._compiled: Any = None
        self._captures = False
        self._captured: set[int] = set()
        module.forward = self  # `module(...)` finds it there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_in_graph():
            return self._forward(*args, **kwargs)
        inputs = self._named(args, kwargs)
        if self._compiled is None:
            self._compile(inputs)
        if self._captures:
            self._capture(inputs)
        return self._compiled(**inputs)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Sizes that are called in the block are captured."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def report(self) -> str:
        """What became of the model, in a few lines."""
        return pg.explain(self._compiled).summary() if self._compiled is not None else "never called"

    def close(self) -> None:
        """The module has its own forward again; graphs go with the last reference to this."""
        vars(self._module).pop("forward", None)
        self._compiled = None

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments, all of them as keywords."""
        named = dict(self._signature.bind(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(parameter.name, {})
        return named

    def _compile(self, inputs: dict[str, Any]) -> None:
        dims = {name: dim for name, dim in _TOKEN_DIM.items() if isinstance(inputs.get(name), Tensor)}
        options: dict[str, Any] = {"capture_sizes": self._sizes, "max_tokens": self._sizes[-1]}
        # SGLang is done with a result before the next forward.
        options |= {"capture": "explicit", "outputs": "static"}
        self._compiled = pg.compile(self._forward, token_dim=dims, **options)

    def _capture(self, inputs: dict[str, Any]) -> None:
        """Once per size: SGLang calls each one twice."""
        leader = next(inputs[name] for name in _TOKEN_DIM if isinstance(inputs.get(name), Tensor))
        size = leader.shape[0]
        if size not in self._captured:
            self._captured.add(size)
            capture_sizes(self._compiled, "prefill", [size], lambda _: dict(inputs), log, progress=False)
