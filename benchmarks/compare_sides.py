"""The sides of bench_compare: ways to run one and the same forward, each as its authors mean it to be used.

Every side runs transformers' module with our attention op; only what is around it differs. A step copies its
inputs where the side needs them copied, and returns logits that the next step of the side may overwrite,
except for eager and torch.compile, which return new tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.paged import PagedModel
from piecewise_graph.custom_ops.attention import attention_op
from piecewise_graph.custom_ops.attention.call import AttentionCall
from piecewise_graph.custom_ops.attention.implementations import serve

Step = Callable[[], Any]


class Eager:
    """The module as it is.

    Attributes:
        needs_cuda: the side is nothing without graphs.
        in_graph: attention is a part of a graph.
        capture_seconds: spent capturing so far, as far as the side allows to tell it from compiling.
    """

    needs_cuda = False
    in_graph = False

    def __init__(self, paged: PagedModel, cache_dir: Path | None, compiler: str) -> None:
        self.paged, self.cache_dir, self.compiler = paged, cache_dir, compiler
        self.capture_seconds = 0.0
        self.call = self.build()

    def build(self) -> Callable[..., Any]:
        return self.paged.model

    def first(self) -> None:
        """The first forward, at the largest token count: the model is traced and compiled here."""
        self.run(self.paged.inputs(max(self.paged.counts)))

    def run(self, inputs: dict[str, Any]) -> None:
        with self.context(inputs["input_ids"].shape[1]):
            self.call(**inputs)

    def ready(self, tokens: int) -> Step:
        """Do whatever has to be done once for this token count; the step that is timed."""
        step = self.in_context(tokens, partial(self.call, **self.paged.inputs(tokens)))
        step()
        return step

    def facts(self) -> dict[str, Any]:
        """What else there is to say, once all token counts are ready."""
        return {"capture_s": self.capture_seconds or None}

    def context(self, tokens: int) -> Any:
        return self.paged.context(tokens, self.in_graph)

    def in_context(self, tokens: int, call: Callable[[], Any]) -> Step:
        fields = self.paged.fields(tokens, self.in_graph)

        def step() -> Any:
            with pg.forward_context(**fields):
                return call()

        return step


@cache
def _compiled(model: Any) -> Callable[..., Any]:
    """torch.compile's default mode; several sides capture what it makes."""
    return torch.compile(model)


class Compile(Eager):
    """torch.compile, its token dimension marked dynamic; it compiles once more for one token."""

    def build(self) -> Callable[..., Any]:
        return _compiled(self.paged.model)

    def run(self, inputs: dict[str, Any]) -> None:
        for name in ("input_ids", "position_ids"):
            torch._dynamo.mark_dynamic(inputs[name], 1)
        super().run(inputs)


class ReduceOverhead(Compile):
    """torch.compile(mode="reduce-overhead"): the op is opaque to it, and captured with the rest."""

    needs_cuda = True
    in_graph = True

    def build(self) -> Callable[..., Any]:
        return torch.compile(self.paged.model, mode="reduce-overhead")

    def ready(self, tokens: int) -> Step:
        """A first call of a size warms up, the second records, the third replays."""
        step = super().ready(tokens)
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        self.capture_seconds += time.perf_counter() - began
        step()
        return step

    def facts(self) -> dict[str, Any]:
        counters = torch._dynamo.utils.counters["inductor"]
        return super().facts() | {"cudagraph_skips_so_far": counters["cudagraph_skips"]}


class Partition(ReduceOverhead):
    """Inductor's graph partition with CUDA graphs, told to cut at our attention op."""

    in_graph = False

    def build(self) -> Callable[..., Any]:
        options: dict[str, Any] = {
            "triton.cudagraphs": True,
            "graph_partition": True,
            "custom_should_partition_ops": ["piecewise::attention", "piecewise::attention.default"],
        }
        return torch.compile(self.paged.model, options=options)


class Raw(Compile):
    """torch.cuda.graph around the torch.compiled model, attention included, one graph per exact size."""

    needs_cuda = True
    in_graph = True

    def build(self) -> Callable[..., Any]:
        self.pool = torch.cuda.graph_pool_handle()
        return super().build()

    def ready(self, tokens: int) -> Step:
        given, static = self.paged.inputs(tokens), self.paged.inputs(tokens)
        self._warm(tokens, static)
        began = time.perf_counter()
        replay, output = self.capture(tokens, static)
        torch.cuda.synchronize()
        self.capture_seconds += time.perf_counter() - began
        return self._stepped(given, static, replay, output)

    def capture(self, tokens: int, static: dict[str, Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        with self.context(tokens), torch.cuda.graph(graph, pool=self.pool):
            output = self.call(**static)
        return graph.replay, output

    def _warm(self, tokens: int, static: dict[str, Any]) -> None:
        """On a side stream, as torch.cuda.graph wants it."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with self.context(tokens), torch.cuda.stream(stream):
            for _ in range(2):
                self.call(**static)
        current.wait_stream(stream)

    def _stepped(
        self, given: dict[str, Any], static: dict[str, Any], replay: Callable[[], None], output: Any
    ) -> Step:
        names = "input_ids", "position_ids"
        sources, targets = [given[name] for name in names], [static[name] for name in names]

        def step() -> Any:
            torch._foreach_copy_(targets, sources)
            replay()
            return output

        return step


class Meta(Raw):
    """Meta's piecewise-cuda-graphs around the torch.compiled model, with attention as the eager break."""

    in_graph = False

    def build(self) -> Callable[..., Any]:
        from piecewise_cuda_graphs import no_graph

        self.attend = no_graph(_attend)
        return super().build()

    def capture(self, tokens: int, static: dict[str, Any]) -> tuple[Callable[[], None], Any]:
        from piecewise_cuda_graphs import CUDAGraphSequence, piecewise_graph

        sequence = CUDAGraphSequence(pool=self.pool)
        with (
            patch.object(attention_op, "serve", self._break),
            self.context(tokens),
            piecewise_graph(sequence),
        ):
            output = self.call(**static)
        return sequence.replay, output

    def _break(self, batch: Any, call: AttentionCall, captured: bool) -> None:
        """Stands in for `serve` while Meta's package captures: the op's work becomes a break."""
        where = call.layer, call.scale, call.implementation
        self.attend(batch, call.q, call.k, call.v, call.out, *where)


def _attend(
    batch: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, scale: float, implementation: str
) -> None:
    """What our op does with its arguments, as a function that takes the batch too."""
    call = AttentionCall(q, k, v, out, layer, scale, implementation=implementation)
    serve(batch, call, captured=False)


@cache
def _ours(paged: PagedModel, cache_dir: Path | None, compiler: str) -> Any:
    return pg.compile(
        paged.model,
        capture_sizes=paged.counts,
        max_tokens=max(paged.counts),
        capture="explicit",
        outputs="static",
        cache_dir=cache_dir,
        compiler=compiler,
    )


class Piecewise(Eager):
    """Ours, frozen: graphs between the attention calls."""

    frozen: Callable[..., Any] | None = None

    def build(self) -> Callable[..., Any]:
        return _ours(self.paged, self.cache_dir, self.compiler)

    def ready(self, tokens: int) -> Step:
        if self.frozen is None:
            self.frozen = self.freeze()
        step = self.in_context(tokens, partial(self.frozen, **self.paged.inputs(tokens)))
        step()
        return step

    def freeze(self) -> Callable[..., Any]:
        """Capture all token counts, and freeze."""
        fields = partial(self.paged.fields, full=self.in_graph)
        report = pg.capture(self.call, self.paged.inputs, context=fields, progress=False)
        if report.failed:
            raise RuntimeError(f"not captured: {report.failed}")
        self.capture_seconds += report.seconds
        largest = max(self.paged.counts)
        with self.context(largest):
            return pg.freeze(self.call, **self.paged.inputs(largest))

    def facts(self) -> dict[str, Any]:
        report = pg.explain(self.call)
        trace = report.traces[0]
        return super().facts() | {
            "segments": trace.segments,
            "distinct_segments": trace.distinct,
            "compile_s": trace.compile_seconds + trace.load_seconds,
            "from_cache": trace.from_cache,
            "pool_bytes": report.pool_bytes,
            "buffer_bytes": report.buffer_bytes,
            "traces": len(report.traces),
        }


class Full(Piecewise):
    """Ours, frozen: one graph, attention included."""

    in_graph = True


class Unfrozen(Piecewise):
    """Ours through Dynamo: graphs between the attention calls, Dynamo's guards before them."""

    def freeze(self) -> Callable[..., Any]:
        super().freeze()
        return self.call

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"capture_s": None}  # it shares piecewise's graphs


SIDES: dict[str, type[Eager]] = {
    "eager": Eager,
    "compile": Compile,
    "reduce-overhead": ReduceOverhead,
    "partition": Partition,
    "meta": Meta,
    "raw": Raw,
    "piecewise": Piecewise,
    "full": Full,
    "unfrozen": Unfrozen,
}
OURS = ("piecewise", "full", "unfrozen")
# Side -> the start that it shares: sides that capture the same compiled model start alike.
STARTS = {
    "compile": "compile", "raw": "compile", "meta": "compile", "reduce-overhead": "reduce-overhead",
    "partition": "partition", **dict.fromkeys(OURS, "ours"),
}  # fmt: skip


def label(side: str) -> str:
    """A side's name where it stands beside others'."""
    return f"ours, {side}" if side in OURS else side
