"""What a frozen forward costs the host beyond its graph launches and its attention calls.

    python -m benchmarks.bench_host

Timed in one process, the sides taking turns, each turn from an idle device: the frozen call with inputs to
copy, with inputs written in place, and with outputs that the caller owns; the same call captured in place
(pg.capture_in_place), where it is one graph; then, bare, the very calls that its tape makes: all of them, the
graph launches alone, the attention calls alone. Two accounts follow:

    over_bare   the frozen call less the bare calls
    beyond      the frozen call less 3 us per graph launch and less the attention calls, as measured

Limits hold for the second. The layers are small, because a device that lags behind makes the host wait for
room in its queue; a model of real size is there for comparison. The forward context is entered outside of
what is timed: it is entered for the bare calls too.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, Timing, alternate_host, table, without_out, write
from benchmarks.llama import SHAPES
from benchmarks.paged import PagedModel
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.recorder.tape import LateCall

LAUNCH_US = 3.0  # what one graph launch may cost
COPIED_US, IN_PLACE_US, OWNED_US = 15.0, 5.0, 12.0
LIMITED = ("deep",)
_COLUMNS = ("shape", "mode", "stream", "tokens", "graphs", "attention_calls", "launch_us", "attention_us",
            "copied_us", "copied_beyond_us", "in_place_beyond_us", "owned_more_us",
            "copied_over_bare_us", "in_place_over_bare_us", "graph_in_place_over_bare_us")  # fmt: skip


class Frozen:
    """One model, frozen with static and with owned outputs."""

    def __init__(self, shape: str, counts: Sequence[int], options: argparse.Namespace) -> None:
        self.paged = PagedModel(SHAPES[shape], counts, options.implementation)
        self.paged.touch()
        self.compiled = {outputs: self._compile(outputs, options) for outputs in ("static", "copy")}
        self.calls = {outputs: self._freeze(made) for outputs, made in self.compiled.items()}

    def _compile(self, outputs: str, options: argparse.Namespace) -> Any:
        counts = self.paged.counts
        compiled = pg.compile(
            self.paged.model,
            capture_sizes=counts,
            max_tokens=max(counts),
            outputs=outputs,
            compiler=options.compiler,
        )
        for full in (True, False):
            fields = partial(self.paged.fields, full=full)
            pg.capture(compiled, self.paged.inputs, context=fields, progress=False)
        return compiled

    def _freeze(self, compiled: Any) -> Callable[..., Any]:
        largest = max(self.paged.counts)
        with self.paged.context(largest, False):
            return pg.freeze(compiled, **self.paged.inputs(largest))

    def forwards(self, tokens: int, full: bool) -> dict[str, Callable[[], Any]]:
        """The frozen call in its three forms, and one graph in place. Call inside of the forward context."""
        given, static = self.paged.inputs(tokens), self.calls["static"]
        written = given | static.static_inputs(tokens)
        found: dict[str, Callable[[], Any]] = {
            "copied": partial(static, **given),
            "in_place": partial(static, **written),
            "owned": partial(self.calls["copy"], **given),
        }
        if full:
            found["graph_in_place"] = pg.capture_in_place(self.compiled["static"], **given)
        return found

    def tape(self, tokens: int) -> tuple[list[Callable[[], Any]], list[bool]]:
        """What the static frozen call makes between copy and return, and which of it are graph launches."""
        state = state_of(self.compiled["static"])
        assert state is not None
        replay = state.traces[0].replay_for(tokens, pg.get_forward_context())  # type: ignore[attr-defined]
        assert replay is not None and replay.not_full is None
        entries = replay.captured.tape.entries
        return list(replay.bound.calls), [not isinstance(entry, LateCall) for entry in entries]


def _all(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _rows(
    frozen: Frozen, shape: str, tokens: int, full: bool, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One mode, for callers on a stream of their own and on the default one.

    Each has a loop of its own: the first call after one on another stream waits for it, which is no part of
    what a frozen call costs. The bare calls never run on the default stream: the library does not run them
    there either.
    """
    gpu = frozen.paged.device.type == "cuda"
    own = torch.cuda.Stream() if gpu else None
    callers = {"own": own, "default": None} if gpu else {"none": None}
    with frozen.paged.context(tokens, full), pg.counters.expect(fallbacks=0):
        calls, is_graph = frozen.tape(tokens)
        graphs = [call for call, graph in zip(calls, is_graph, strict=True) if graph]
        attention = [call for call, graph in zip(calls, is_graph, strict=True) if not graph]
        parts = {"bare": calls, "graphs": graphs, "attention": attention}
        bare: dict[str, Callable[[], Any]] = {name: partial(_all, part) for name, part in parts.items()}
        forwards = frozen.forwards(tokens, full)
        times = {
            caller: alternate_host(
                bare | forwards,
                rounds=options.rounds,
                streams=dict.fromkeys(bare, own) | dict.fromkeys(forwards, stream),
            )
            for caller, stream in callers.items()
        }
    row = {"shape": shape, "mode": "full" if full else "piecewise", "tokens": tokens}
    row |= {"graphs": len(graphs), "attention_calls": len(attention)}
    return [
        row | {"stream": caller} | _accounts(times[caller], len(graphs), len(attention)) for caller in callers
    ]


def _accounts(times: Mapping[str, Timing], graphs: int, attention_calls: int) -> dict[str, Any]:
    us = {name: timing.median * 1e6 for name, timing in times.items()}
    found: dict[str, Any] = {f"{name}_us": value for name, value in us.items()}
    for name, timing in times.items():
        found[f"{name}_quartiles_us"] = [timing.low * 1e6, timing.high * 1e6]
    found["launch_us"] = us["graphs"] / graphs
    found["attention_call_us"] = us["attention"] / attention_calls if attention_calls else None
    for name in set(us) - {"bare", "graphs", "attention"}:
        found[f"{name}_over_bare_us"] = us[name] - us["bare"]
        found[f"{name}_beyond_us"] = us[name] - LAUNCH_US * graphs - us["attention"]
    found["owned_more_us"] = us["owned"] - us["copied"]
    return found


def _marks(row: Mapping[str, Any]) -> list[Mark]:
    where = f"{row['shape']}, {row['mode']}, {row['tokens']} tokens, {row['stream']} stream: host us"
    return [
        Mark(f"{where} beyond launches and attention, inputs copied", row["copied_beyond_us"], COPIED_US),
        Mark(f"{where} beyond launches and attention, in place", row["in_place_beyond_us"], IN_PLACE_US),
        Mark(f"{where} more with owned outputs", row["owned_more_us"], OWNED_US),
    ]


@torch.inference_mode()
def bench_shape(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one shape: both modes at each token count."""
    counts = [int(count) for count in options.tokens.split(",")]
    frozen = Frozen(shape, counts, options)
    return [
        row
        for tokens in counts
        for full in (True, False)
        for row in _rows(frozen, shape, tokens, full, options)
    ]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="deep,1b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--tokens", default="1,4")
    parser.add_argument("--implementation", help="of attention; None = triton on a GPU")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_host.json")
    options = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        rows += bench_shape(shape, options)
        torch._dynamo.reset()
        gc.collect()
    # A stand-in computes what a graph would launch: its host time says nothing.
    limited = [row for row in rows if row["shape"] in LIMITED and torch.cuda.is_available()]
    marks = [mark for row in limited for mark in _marks(row)]
    command = " ".join(["python -m benchmarks.bench_host", *without_out(given)])
    write(options.out, command, rows, marks)
    print(table(rows, _COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
