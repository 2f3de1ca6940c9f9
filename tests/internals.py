"""Where tests look behind the API: every such look goes through a function of this file.

When the core changes inside, this file follows and the tests stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler import specialize
from piecewise_graph.custom_ops.metadata.op_signature import Call as CheckedCall
from piecewise_graph.frontend import frozen_call
from piecewise_graph.frontend.frozen_call import FrozenCall
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.inspection import differences
from piecewise_graph.recorder import mode
from piecewise_graph.recorder.memory_plan import _TrialPool
from piecewise_graph.recorder.static_buffers import FlatBuffers
from piecewise_graph.runtime import runtime
from piecewise_graph.sizes import TensorSpec, same_layout
from piecewise_graph.splitter import merge_linears, merged_weights, splitting_ops

# --- what a compiled model holds ------------------------------------------------------------------------


def state(fast: Any) -> Any:
    """What the traces of a compiled model share."""
    found = state_of(fast)
    assert found is not None
    return found


def traces(fast: Any) -> tuple[Any, ...]:
    """The live traces of a compiled model, oldest first."""
    return tuple(state(fast).traces)


def trace(fast: Any) -> Any:
    """The only trace of a compiled model."""
    (found,) = traces(fast)
    return found


def pool_of(fast: Any) -> GraphPool:
    return state(fast).pool


def is_sealed(fast: Any) -> bool:
    """`pg.capture` is done: no further bucket is captured."""
    return state(fast).sealed


def tape(fast: Any, bucket: int) -> Any:
    """The piecewise recording of `bucket` in the only trace."""
    return _tape(trace(fast), bucket)


def replays(fast: Any, num_tokens: int) -> int:
    """How often the only trace replayed the bucket that serves `num_tokens` tokens piecewise."""
    ready = trace(fast).all_tapes()[0].ready.get(num_tokens)
    return 0 if ready is None else ready.captured.replays


def contract(fast: Any) -> Any:
    """The conditions on sizes under which the only trace holds: `.guards` and `.ranges`."""
    return trace(fast).program.contract


def exact_codes(fast: Any) -> list[tuple[int, Any]]:
    """(token count, code compiled for exactly that count) of every distinct segment."""
    return [(size, code) for segment in state(fast).compiled.values() for size, code in segment.exact.items()]


def static_tails(fast: Any, bucket: int, live: int) -> Iterator[Tensor]:
    """Static tensors of `bucket` past the `live` tokens: input buffers, outputs of graphs, bridge buffers."""
    for one in traces(fast):
        program = one.program
        for slot, value in _tape(one, bucket).values.items():
            given = program.split.inputs[slot] if slot < len(program.split.inputs) else None
            spec = program.split.specs[slot]
            if spec is None or (given is not None and given.bound):
                continue
            for dim in spec.token_dims(program.token):
                yield value.narrow(dim, live, bucket - live)


def _tape(one: Any, bucket: int) -> Any:
    return one.all_tapes()[0].buckets[bucket].tape


# --- frozen calls ---------------------------------------------------------------------------------------


def check_weights(frozen: Any) -> None:
    """Raise AddressMovedError where a weight of a frozen call is not where it was."""
    frozen._trace.runtime.addresses.check(frozen._trace.template)


def count_frozen_plans(objects: Iterable[object]) -> int:
    """How many of `objects` are the replay of one token count of a frozen call."""
    return sum(type(thing) is FrozenCall for thing in objects)


def count_checked_calls(objects: Iterable[object]) -> int:
    """How many of `objects` are calls of metadata ops that a check has passed; the ops keep the last 512."""
    return sum(type(thing) is CheckedCall for thing in objects)


def refuse_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no capture of a whole forward succeeds."""
    monkeypatch.setattr(mode, "record_forward", Mock(side_effect=RuntimeError("not permitted in a capture")))


def forbid_dynamo(monkeypatch: pytest.MonkeyPatch, fast: Any) -> None:
    """From now on a call of the compiled model that reaches Dynamo fails the test."""

    def reached(*args: Any, **kwargs: Any) -> Any:
        pytest.fail("Dynamo was reached")

    monkeypatch.setattr(fast, "_traces", [reached])
    monkeypatch.setattr(fast, "_guarded", reached)


# --- captures that fail ---------------------------------------------------------------------------------


def fail_capture(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    *,
    at: int | None = None,
    of: Literal["piecewise", "full", "plan"] = "piecewise",
) -> None:
    """Let captures raise `error`.

    Args:
        at: only those of `at` tokens; None: all of them.
        of: segments, whole forwards, or the trial runs of `pg.plan`.
    """
    pool_class = _TrialPool if of == "plan" else GraphPool
    original = pool_class.capture

    def capture(self: Any, run: Any, inputs: Any, **options: Any) -> Any:
        warm = options.get("warm")
        wanted = type(self) is pool_class and (warm is not None) == (of == "full")
        tensors = [x for x in (warm if of == "full" else inputs) if isinstance(x, Tensor)] if wanted else []
        if wanted and (at is None or any(x.shape[:1] == (at,) for x in tensors)):
            raise error
        return original(self, run, inputs, **options)

    monkeypatch.setattr(pool_class, "capture", capture)


def after_capture(monkeypatch: pytest.MonkeyPatch, look: Callable[[Sequence[Tensor]], None]) -> None:
    """Call `look` with the outputs of every capture; what it raises, the capture raises."""
    original = GraphPool.capture

    def capture(self: Any, run: Any, inputs: Any, **options: Any) -> Any:
        replay, outputs = original(self, run, inputs, **options)
        look(outputs)
        return replay, outputs

    monkeypatch.setattr(GraphPool, "capture", capture)


# --- compiling ------------------------------------------------------------------------------------------


def replace_compile(monkeypatch: pytest.MonkeyPatch, replacement: Callable[..., Any]) -> None:
    """Compile segments with `replacement(original, gm, inputs, compiler)`."""
    _wrap(monkeypatch, _torch, "compile_segment", replacement)


def replace_exact_compile(monkeypatch: pytest.MonkeyPatch, replacement: Callable[..., Any]) -> None:
    """Compile segments for an exact size with `replacement(original, gm, inputs, **options)`."""
    _wrap(monkeypatch, _torch, "compile_exact", replacement)


def replace_linear_choice(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., Any]) -> None:
    """Kernel -> microseconds of a linear with few rows, as `choose(tokens, weight, bias, cache_dir)` says."""
    monkeypatch.setattr(specialize, "choose", choose)


def replace_segment_timing(monkeypatch: pytest.MonkeyPatch, microseconds: Callable[..., float]) -> None:
    """Time whole segments with `microseconds(call)`."""
    monkeypatch.setattr(specialize, "graph_microseconds", microseconds)


def _wrap(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args, **options: replacement(original, *args, **options))


# --- merged linears, splitting ops ----------------------------------------------------------------------


def merged_parameters() -> set[int]:
    """Ids of the parameters that lie in a merged tensor, over all live models."""
    return set(merged_weights._placed)


def merged_tensors() -> set[Any]:
    """Keys of the live merged tensors."""
    return set(merged_weights._over.keys())


def no_memory_for_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A merged weight of `rows` rows does not fit into memory."""
    original = merged_weights._allocate

    def scarce(shape: Any, like: Tensor) -> Tensor:
        if shape[0] == rows:
            raise torch.OutOfMemoryError("out of memory")
        return original(shape, like)

    monkeypatch.setattr(merged_weights, "_allocate", scarce)


def results_are_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every linear returned a tensor that is not contiguous."""
    monkeypatch.setattr(merge_linears, "_is_plain", lambda value: False)


def registered_names() -> tuple[str, ...]:
    """Names of all splitting ops."""
    return tuple(splitting_ops._registry)


def unregister_splitting_op(name: str) -> None:
    splitting_ops._registry.pop(name)
    splitting_ops._undefined.discard(name)
    for function in [f for f, n in splitting_ops._builtins.items() if n == name]:
        splitting_ops._builtins.pop(function)


def decision(fast: Any, num_tokens: int) -> Any:
    """What the only trace would do with a call of `num_tokens` tokens; asking does nothing."""
    return trace(fast).decide(num_tokens)


def no_memory_for_input(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The allocation of static buffer `number`, counted from 0, fails once."""
    original, taken = FlatBuffers.take, [0]

    def take(self: Any, *layout: Any) -> Tensor:
        taken[0] += 1
        if taken[0] == number + 1:
            raise torch.OutOfMemoryError("wanted 12 GiB")
        return original(self, *layout)

    monkeypatch.setattr(FlatBuffers, "take", take)


# --- pg.bisect ------------------------------------------------------------------------------------------


def difference(found: Tensor, wanted: Tensor) -> Any:
    """How far a tensor lies from the reference's: `.error`, `.at`, `.departs(eager's)`."""
    return differences.difference(found, wanted)


def call_replaced(monkeypatch: pytest.MonkeyPatch, fast: Any, model: Callable[..., Any]) -> None:
    """As if the traces of a compiled model were of another model than `model`."""
    monkeypatch.setattr(fast, "_model", model)


# --- streams and captures of the caller -----------------------------------------------------------------


@contextmanager
def caller_captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the caller were capturing a graph, on any device."""
    with monkeypatch.context() as patch:
        for module in (runtime, frozen_call):
            patch.setattr(module, "capturing_elsewhere", lambda device: True)
        yield


class FakeStream:
    def __init__(self, number: int, waits: list[tuple[int, int]]) -> None:
        self.number, self.waits = number, waits

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append((self.number, other.number))


def follow_streams(
    monkeypatch: pytest.MonkeyPatch, pool: GraphPool
) -> tuple[Callable[..., AbstractContextManager[None]], list[tuple[int, int]]]:
    """(`on(number)`: the caller is on that stand-in of a stream, which stream waited for which) of a pool."""
    waits: list[tuple[int, int]] = []
    pool.using()._device = torch.device("cuda", 0)

    @contextmanager
    def on(number: int, capturing: bool = False) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(pool.using(), "_address_of", lambda device: number)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
            patch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(number, waits))
            yield

    return on, waits


def require_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments refuse inputs of other strides than they were compiled for, as Inductor's code does."""

    def compile_segment(original: Any, gm: Any, inputs: Sequence[Any], compiler: str) -> Any:
        run = original(gm, inputs, compiler)
        specs = [TensorSpec.of(value) if isinstance(value, Tensor) else None for value in inputs]

        def strict(*given: Any) -> Any:
            for index, (spec, value) in enumerate(zip(specs, given, strict=True)):
                if spec is not None:
                    sizes = dict(zip(spec.shape, value.shape, strict=True))
                    sizes |= {
                        _torch.expression(s): n for s, n in zip(inputs, given, strict=True) if type(n) is int
                    }
                    wanted = spec.stride_at(sizes)
                    found = tuple(value.stride())
                    assert same_layout(value, wanted), f"input {index}: strides {found} instead of {wanted}"
            return run(*given)

        return strict

    replace_compile(monkeypatch, compile_segment)
