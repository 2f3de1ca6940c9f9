"""Implementations by name: which one serves an attention call, chosen once for all equal calls of a batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakKeyDictionary

from ..errors import AttentionError
from ..kv_cache import PagedKVCache
from .batch import AttentionBatch
from .call import AttentionCall, Traits
from .joined_batch import served_apart
from .modes import Mode

# Imported when asked for. Each module has a MODE; the preferred one stands first.
_MODULES = {
    "triton": (".triton_attention",),
    "flash_attn": (".flash_attention",),
    "flashinfer": (".flashinfer_xqa", ".flashinfer_planned"),
    "torch": (".torch_attention",),
}
NAMES = tuple(_MODULES)
# Rows of one request from which on flash-attn's tiles pay (benchmarks/results/bench_attention.json: prefill
# of 512 rows 16 us against 18 of ours, of 4096 rows 258 against 413; decode and verify are ours).
_MANY_ROWS = 256


@dataclass(frozen=True)
class Implementation:
    """The modes of an implementation, the preferred one first.

    Attributes:
        missing: why it cannot be used on this machine, or None.
    """

    modes: tuple[Mode, ...] = ()
    missing: str | None = None


def serve(batch: AttentionBatch, call: AttentionCall, captured: bool) -> None:
    """Serve one attention call with the implementation that it asks for.

    Args:
        captured: the call is, or will be, part of a graph.

    Raises:
        AttentionError: the call is not of this batch, or its implementation cannot serve it.
    """
    if batch.num_tokens not in call.rows:
        raise AttentionError.wrong_rows(call.rows[1], batch.num_tokens)
    # The rows of a full graph that is being captured include padding; the core has compared the tokens
    # (check_tokens). Everywhere else the rows are the tokens.
    expected = batch.expected_tokens
    if expected is not None and expected != call.rows[1] and not (captured and call.live is None):
        raise AttentionError.wrong_rows(call.rows[1], expected)
    if not 0 <= call.layer < batch.kv_cache.num_layers:  # layers share their traits, and so their step
        raise AttentionError.wrong_layer(call.layer, batch.kv_cache.num_layers)
    attend = batch.served_by.get((call.traits, captured))
    if attend is None:
        if served_apart(batch, call.traits):
            attend = batch.served_by[call.traits, captured] = partial(_serve_parts, batch.parts, captured)
        else:
            attend = use(choose(call, batch, captured), batch, call, captured)
    attend(call)


def _serve_parts(parts: Sequence[AttentionBatch], captured: bool, call: AttentionCall) -> None:
    """Serve the rows of each part alone. Those of padding stand behind the last one."""
    start = 0
    for part in parts:
        stop = None if part is parts[-1] else start + part.num_tokens
        serve(part, call.of_rows(start, stop), captured)
        start += part.num_tokens


def use(
    mode: Mode, batch: AttentionBatch, call: AttentionCall, captured: bool
) -> Callable[[AttentionCall], None]:
    """Prepare a batch for all calls like this one, and have `mode` serve them."""
    attend = partial(mode.attend, batch, mode.prepare(batch, call))
    batch.served_by[call.traits, captured] = attend
    if not captured:
        _expected(batch.kv_cache).call(call.traits)
    return attend


def compile_ahead(batch: AttentionBatch, *, captured: bool = False) -> None:
    """Have compiled, in other threads, what the calls of a batch will launch that will be served soon.

    That begins when it is known which kinds of calls there are: when a trace that is compiled has one, or one
    is served, of any batch of the same cache.

    Args:
        captured: the calls will be part of a graph.
    """
    _expected(batch.kv_cache).expect(batch, captured)


def expect_call(batch: AttentionBatch, traits: Traits, captured: bool) -> None:
    """Have compiled, in other threads, what calls of this kind launch, of `batch` and all announced ones.

    Args:
        captured: the calls of `batch` will be part of a graph.
    """
    expected = _expected(batch.kv_cache)
    expected.expect(batch, captured)
    expected.call(traits)


class _Expected:
    """The batches of one cache that will be served, and the kinds of calls that there are."""

    def __init__(self) -> None:
        self._traits = set[Traits]()
        self._batches = WeakKeyDictionary[AttentionBatch, bool]()

    def call(self, traits: Traits) -> None:
        """There are calls of this kind."""
        if traits not in self._traits:
            self._traits.add(traits)
            for batch, captured in list(self._batches.items()):
                self._compile(traits, batch, captured)

    def expect(self, batch: AttentionBatch, captured: bool) -> None:
        if self._batches.get(batch) is captured:
            return
        self._batches[batch] = captured
        for traits in self._traits:
            self._compile(traits, batch, captured)

    def _compile(self, traits: Traits, batch: AttentionBatch, captured: bool) -> None:
        with suppress(AttentionError):  # it is raised where the batch is served
            call = traits.example(batch.kv_cache.device)
            if call.traits is not traits:
                return  # deterministic algorithms have been switched on or off since
            compile_call(call, batch, captured)


def compile_call(call: AttentionCall, batch: AttentionBatch, captured: bool) -> None:
    """Have compiled, in other threads, what calls like this one will launch.

    Raises:
        AttentionError: as `choose` does.
    """
    mode = choose(call, batch, captured)
    if mode.compile_ahead is not None:
        mode.compile_ahead(batch, mode.prepare(batch, call), call)


def _expected(kv_cache: PagedKVCache) -> _Expected:
    found: _Expected = kv_cache.memo.setdefault("expected", _Expected())
    return found


def choose(call: AttentionCall, batch: AttentionBatch, captured: bool) -> Mode:
    """The mode that serves `call`.

    Raises:
        AttentionError: the implementation asked for is unknown, missing or incapable; it names one that can.
    """
    _check_call(call, batch)
    name = call.implementation
    check_name(name)
    # One after another: an implementation that is not needed is not imported either.
    for candidate in fastest_first(batch, call.traits) if name == "auto" else (name,):
        for mode in load(candidate).modes:
            if mode.reason(call, batch, captured) is None:
                return mode
    implementation = load("torch" if name == "auto" else name)
    able = able_implementations(call, batch, captured)
    if implementation.missing is not None:
        raise AttentionError.not_installed(name, implementation.missing, able)
    reasons = sorted([*mode.reasons(call, batch, captured)] for mode in implementation.modes)
    nearest = min(reasons, key=len)
    raise AttentionError.incapable(name, "; ".join(nearest), able)


def check_name(name: str) -> None:
    """Refuse what no implementation is called.

    Raises:
        AttentionError: there is none of that name.
    """
    if name not in ("auto", *NAMES):
        raise AttentionError.unknown(name, ("auto", *NAMES))


def fastest_first(batch: AttentionBatch, traits: Traits) -> tuple[str, ...]:
    """Every name, in the order in which `auto` tries them for this kind of batch."""
    if batch.max_query_len < _MANY_ROWS or traits.deterministic:  # then one kernel serves all batches: ours
        return NAMES
    return ("flash_attn", "triton", "flashinfer", "torch")


def able_implementations(call: AttentionCall, batch: AttentionBatch, captured: bool) -> tuple[str, ...]:
    """Names of the implementations that can serve `call` here, fastest first."""
    return tuple(
        name
        for name in fastest_first(batch, call.traits)
        if any(mode.reason(call, batch, captured) is None for mode in load(name).modes)
    )


@cache
def load(name: str) -> Implementation:
    """Import an implementation; a package that is missing or does not load is a reason, not an error."""
    try:
        modules = [importlib.import_module(module, __package__) for module in _MODULES[name]]
    except ImportError as error:
        return Implementation(missing=f"{error}")
    except Exception as error:  # an installation that does not fit this machine
        return Implementation(missing=f"it does not load: {error}")
    return Implementation(tuple(module.MODE for module in modules))


def _check_call(call: AttentionCall, batch: AttentionBatch) -> None:
    traits, cache, mask = call.traits, batch.kv_cache, batch.tree_mask
    model, cached = (traits.kv_heads, traits.head_dim), (cache.kv_heads, cache.head_dim)
    if model != cached:
        raise AttentionError.wrong_heads(model, cached)
    if traits.dtype != cache.dtype:
        raise AttentionError.wrong_dtype(traits.dtype, cache.dtype)
    if mask is not None and call.window is not None and call.window < mask.shape[2]:
        raise AttentionError.window_below_tree(call.window, mask.shape[2])
