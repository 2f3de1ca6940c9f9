"""pg.compile: one trace for every token count, and the checks that make that safe.

Note [One trace]
A size that Dynamo marks dynamic is assumed to be at least 2, and the guards that it puts on sizes make a
call at T = 1 trace again. Unmodified transformers models cannot be traced with an unbacked size (their
masks branch on it), and their graphs are right at T = 1. So pg.compile marks the token dimension dynamic,
drops the SHAPE_ENV guards, and the runtime checks on every call what they would have checked: sizes that
have to be equal, conditions on sizes, ranges (`ShapeContract`). A call that a trace is not valid for raises
ShapeMiss before anything ran, and another trace answers it: first with the same marks, and where dimensions
that were equal no longer are, one under Dynamo's own guards. The runtime sees the arguments of the graph
alone. Where another size, a number or a layout steered the trace (`if mask.shape[0] > 3`), and where it is
whole, SHAPE_ENV stays too. It also stays where a part of the call runs before the graph: behind a graph break
and inside of a skipped frame. A call that is made for its trace alone may not break the graph.

A batch that varies too (`batch_dim`) is left to Dynamo's own guards: a model may do something else with one
request than with several, and nothing here would check that. So are models with forward pre-hooks.

The one thing relaxed is T >= 2. Models of transformers ask whether T > 1 to see whether a mask is causal or
can be skipped, which for one token is the same either way (held by tests on eight of them). Any other
model's calls at T = 1 are traced once more, without compiling or running them, and served by the same
trace only if the graphs agree (one_token.py), unless its caller says that they do (`one_token`).

Note [Weights keep their guards]
Dynamo's guards on dtype, shape and strides of weights (TENSOR_MATCH) could be dropped too, were the runtime
to compare them beside the addresses. Of the time that a model of 32 layers spends in guards they take a
quarter, and the comparison would take a third of that again; the rest is the walk through the modules, which
only pg.freeze leaves out. And they see what no comparison of arguments does: a weight that is asked for its
dtype only, one that became None, one that left the parameters (pruning). So they stay.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules

from piecewise_graph import _torch
from piecewise_graph.compiler.segments import prepare
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.errors import InputError, PiecewiseError, TokenDimError, TraceError
from piecewise_graph.frontend.generate import CompiledGenerate, generates
from piecewise_graph.frontend.model_attributes import ModelAttributes
from piecewise_graph.frontend.model_backend import ModelBackend
from piecewise_graph.frontend.one_token import OneTokenTraces, Signature, is_of_transformers
from piecewise_graph.frontend.strides import with_plain_strides
from piecewise_graph.frontend.token_dims import BatchDims, TokenDims
from piecewise_graph.frontend.untraced import untraced
from piecewise_graph.frontend.whole_heads import with_whole_kv_heads
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.side_channel import Purpose, TracedOnly
from piecewise_graph.sizes import ShapeMiss
from piecewise_graph.telemetry import count_fallback

_MAX_TRACES = 8
_HINT_TOKENS = 16


def compile(
    model: Callable[..., Any],
    *,
    token_dim: Mapping[str, int] | None = None,
    batch_dim: Mapping[str, int] | None = None,
    **options: Any,
) -> CompiledModel:
    """Compile `model` so that one trace serves every token count from 1 up.

    Args:
        model: a module or function that returns tensors, run under torch.no_grad() or inference_mode.
        token_dim: the dimension that counts tokens, per tensor argument, such as {"input_ids": 1}. Other
            tensor arguments with a dimension of the same size follow it. None: found by the names that
            transformers uses, or from a lone tensor argument of one dimension.
        batch_dim: the dimension that counts requests, per tensor argument, such as {"input_ids": 0}, where it
            varies too. Other tensor arguments with as many elements in that dimension follow it. Option
            `batch_sizes` lists the batches to capture.
        options: fields of PiecewiseConfig.

    Returns:
        a callable with the model's signature and attributes; `generate` of a transformers model runs it.

    Raises:
        ConfigError: unknown option or impossible value.
        TokenDimError: at a call, where the token dimension cannot be told.
    """
    return CompiledModel(model, token_dim, PiecewiseConfig.from_options(options), batch_dim)


class CompiledModel(ModelAttributes):
    """What pg.compile returns. Attributes that it does not have itself are the model's, read or set."""

    def __init__(
        self,
        model: Callable[..., Any],
        token_dim: Mapping[str, int] | None,
        config: PiecewiseConfig,
        batch_dim: Mapping[str, int] | None = None,
    ) -> None:
        _torch.raise_recompile_limit()
        with_whole_kv_heads(model)
        prepare(config.compiler, config.cache_dir)
        self._given = model, token_dim, config, batch_dim
        config = replace(config, one_token="trusted") if is_of_transformers(model) else config
        self._finder = TokenDims(model, token_dim)
        self._batch_dims = None if batch_dim is None else BatchDims(batch_dim)
        self.model_state = ModelState(config)
        self._traces: tuple[Callable[..., Any], ...] = ()  # replaced as a whole: other threads go through it
        self._guarded: Callable[..., Any] | None = None
        self._untraced: Callable[..., Any] | None = None  # the latest trace, until its first call
        self._one_token: OneTokenTraces | None = None
        self._answered = False
        self._untraced_call = untraced()
        if generates(model):
            self.generate = CompiledGenerate(model, self.model_state)
        # Dynamo's cache lives as long as the code it compiled; graphs should not.
        weakref.finalize(self, ModelState.drop_graphs, self.model_state)
        self._model = model  # last: what is set after it is the model's

    def __reduce__(self) -> tuple[Any, ...]:
        """What was given is pickled, and copied. A copy has traces and graphs of its own.

        Raises:
            TypeError, AttributeError: pickle's, where a pool was given, which belongs to its process.
        """
        return CompiledModel, self._given

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        return CompiledModel(copy.deepcopy(self._model, memo), *self._given[1:])  # in the same pool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._untraced_call(self, args, kwargs)
        args, kwargs = with_plain_strides(args, kwargs)
        tensors = self._finder.tensors(args, kwargs)
        dims = self._finder.find(tensors, self._batch_dims.named(tensors) if self._batch_dims else {})
        leader = next(iter(dims))
        count = tensors[leader].shape[dims[leader][0]]
        misplaced = self._misplaced(tensors) if tensors[leader].is_meta else None
        if misplaced is not None:  # torch would answer with shapes and no values
            raise misplaced
        if count == 0:
            return self._without_tokens(leader, args, kwargs)
        guarded = self._batch_dims is not None or _has_hooks(self._model)
        if self._batch_dims is not None:
            _mark(tensors, self._batch_dims.find(tensors, dims))
        elif not self._traces and not guarded:
            self._traces = (self._new_trace(guards="relaxed"),)
            if count == 1:
                self._trace_longer(args, kwargs, tensors, dims)
        if count > 1:
            _mark(tensors, dims)
        known = len(self.model_state.signatures)
        try:
            if guarded or (count == 1 and not self._serves_one_token(args, kwargs)):
                result = self._answer_guarded(args, kwargs)
            else:
                result = self._answer(args, kwargs, count)
        except Exception as error:
            # A trace that has never answered may have failed because it cannot take these inputs; one that
            # began to run takes them, and the error is of its ops: no memory, or one of the caller's own.
            new = not self._answered or len(self.model_state.signatures) > known
            untried = new and not self.model_state.channel.graphs_run
            raised = self._plain_error(error, tensors, untried)
            if raised is None:
                raise
            raise raised from error
        if not self._answered:  # setting an attribute asks whose it is
            self._answered = True
        return result

    def _without_tokens(self, leader: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An empty batch is the model's own business; most models of transformers refuse it."""
        self._count_fallback("no_tokens")
        try:
            return self._model(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            raise InputError.no_tokens(leader, _first_line(error)) from error

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
        """Ask each trace in turn; a miss has no effect, because it is raised before anything ran."""
        miss: ShapeMiss | None = None
        for index, trace in enumerate(self._traces):
            try:
                result = self._call(trace, args, kwargs)
            except ShapeMiss as error:
                if self.model_state.channel.graphs_run:  # a part ran already, behind a graph break
                    raise
                miss = error
                continue
            if index:  # who answered is asked first next time
                self._traces = (trace, *(other for other in self._traces if other is not trace))
            return result
        assert miss is not None
        return self._answer_anew(miss, args, kwargs, count)

    def _answer_anew(self, miss: ShapeMiss, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
        if miss.sizes_differ or count == 1 or len(self._traces) >= _MAX_TRACES:
            return self._answer_guarded(args, kwargs)
        self._traces = (trace := self._new_trace(guards="relaxed"), *self._traces)
        return self._call(trace, args, kwargs)

    def _answer_guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under all of Dynamo's own guards: right for any shapes, with as many traces as Dynamo wants."""
        if self._guarded is None:
            self._guarded = self._new_trace(guards="all")
        self._answered = False  # what cannot be traced here either is the call's fault
        return self._call(self._guarded, args, kwargs)

    def _serves_one_token(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The dynamic trace is right for one token too. With several traces, none is trusted with it."""
        return self.agrees_at_one_token(self.model_state.signatures, args, kwargs)

    def agrees_at_one_token(
        self, traces: Sequence[Signature], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether these traces of more tokens are one, and this call of one token would give the same."""
        if self.model_state.config.one_token == "trusted":
            return True
        self._one_token = self._one_token or OneTokenTraces(self._model)
        return len(traces) == 1 and self._one_token.signature(args, kwargs) == traces[0]

    def _call(self, trace: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.model_state.channel.begin_call()
        result = self._traced(trace, args, kwargs)
        if not self.model_state.channel.graphs_run:
            self._count_fallback("not_traced_by_dynamo")
        return result

    def _traced(self, trace: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if trace is not self._untraced:
            return trace(*args, **kwargs)
        self._untraced = None
        with _torch.floats_stay_constants():
            return trace(*args, **kwargs)

    def _count_fallback(self, reason: str) -> None:
        count_fallback(self.model_state.fallbacks, reason)

    def _new_trace(self, guards: str) -> Callable[..., Any]:
        _torch.note_layout_questions()
        backend = ModelBackend(self.model_state, __file__)
        options: Any = {"guard_filter_fn": backend.kept_guards} if guards == "relaxed" else None
        self._untraced = torch.compile(self._model, backend=backend, options=options)
        return self._untraced

    def _trace_longer(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Mapping[str, Tensor],
        dims: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Trace on the single row repeated, executing nothing. What cannot be traced so is left to Dynamo."""
        longer = {id(tensors[name]): _repeated(tensors[name], dims[name]) for name in dims}
        _mark({name: longer[id(tensors[name])] for name in dims}, dims)
        # A model that cannot take the repeated row is traced at T = 1 by the call itself.
        traced_only = self.model_state.channel.calls_for(Purpose.TRACE)
        with traced_only, suppress(TracedOnly, RuntimeError), _torch.no_graph_breaks():
            self._traced(
                self._traces[0],
                tuple(longer.get(id(value), value) for value in args),
                {name: longer.get(id(value), value) for name, value in kwargs.items()},
            )

    def _plain_error(
        self, error: Exception, tensors: Mapping[str, Tensor], untried: bool
    ) -> PiecewiseError | None:
        """The catalogue's version of what torch raised, where there is one."""
        cause = _torch.backend_error(error)
        if cause is not error or isinstance(cause, PiecewiseError):  # a backend's own error says enough
            return cause if cause is not error and isinstance(cause, PiecewiseError) else None
        if _torch.is_specialization_error(error):
            return TokenDimError.specialized(_first_line(error))
        untried &= isinstance(error, (RuntimeError, IndexError, TypeError, ValueError))
        if not _torch.is_trace_error(error) and not untried:
            return None
        misplaced = self._misplaced(tensors)
        if misplaced is not None:
            return misplaced
        described = ", ".join(
            f"{n}: {str(t.dtype)[6:]}{list(t.shape)} on {t.device}" for n, t in tensors.items()
        )
        return TraceError.failed(described, _first_line(error))

    def _misplaced(self, tensors: Mapping[str, Tensor]) -> TraceError | None:
        weights = self._model.parameters() if isinstance(self._model, torch.nn.Module) else ()
        places = {weight.device for weight in weights}
        for name, tensor in tensors.items():
            if len(places) == 1 and tensor.device not in places:
                return TraceError.wrong_device(name, str(tensor.device), str(*places))
        return None


def _has_hooks(model: Callable[..., Any]) -> bool:
    """Something runs before the forward that is traced: a trace that finds it is not valid comes too late."""
    return bool(getattr(model, "_forward_pre_hooks", None) or modules._global_forward_pre_hooks)


def _mark(tensors: Mapping[str, Tensor], dims: Mapping[str, tuple[int, ...]]) -> None:
    for name, places in dims.items():
        for dim in places:
            _torch.maybe_mark_dynamic(tensors[name], dim)


def _repeated(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """The one row of each of `dims`, repeated; a size that gives the compiler a realistic hint."""
    for dim in dims:
        tensor = tensor.repeat_interleave(_HINT_TOKENS, dim)
    return tensor


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
