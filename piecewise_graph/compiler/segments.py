"""What runs the segments of a SplitGraph: one compile per distinct structure (segment_key.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.analysis import SegmentFacts
from piecewise_graph.compiler.choosing_linears import choosing_linears, compile_kernels_ahead
from piecewise_graph.compiler.deferred_norms import compile_norms_ahead, with_deferred_norms
from piecewise_graph.compiler.disk_cache import Folder, Made, is_filled, load_or_compile
from piecewise_graph.compiler.product_choice import kept_products
from piecewise_graph.compiler.segment_key import (
    Conditions,
    Key,
    accept,
    conditions_since,
    portable_key,
)
from piecewise_graph.compiler.separate_results import separated
from piecewise_graph.compiler.summed_norms import with_summed_norms
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.splitter.split_graph import SegmentStep, SplitGraph
from piecewise_graph.telemetry import counters

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExactCode:
    """A segment for one size (specialize.py).

    Attributes:
        run: like the segment's own; None where it is not to be used.
        linears: which kernels serve its linear layers, for people.
        seconds: what compiling and measuring took.
        reason: why it is not used, or None.
    """

    run: Callable[..., Sequence[Tensor]] | None
    linears: tuple[str, ...]
    seconds: float
    reason: str | None = None


@dataclass(frozen=True)
class CompiledSegment:
    """One distinct structure.

    Attributes:
        key: hash of the structure (Note [Structure, not weights] in segment_key.py).
        run: takes the segment's inputs, returns a sequence of tensors. For a segment without compute
            it is the graph itself.
        seconds: what compiling or loading took.
        conditions: on sizes, for any trace that uses it (Note [Conditions that come with code]).
        gm: kept so that the constants whose identity is in the key live as long as the key does.
        from_cache: loaded from cache_dir rather than compiled.
        cache_reason: why a file of cache_dir was not used, or none was written; or None.
        exact: token count -> code for exactly that many.
    """

    key: str
    gm: GraphModule
    run: Callable[..., Sequence[Tensor]]
    facts: SegmentFacts
    seconds: float
    conditions: Conditions | None = ()
    from_cache: bool = False
    cache_reason: str | None = None
    exact: Mapping[int, ExactCode] = field(default_factory=dict)

    def at(self, num_tokens: int | None) -> Callable[..., Sequence[Tensor]]:
        """What to call with inputs of `num_tokens` tokens (None: of a trace of fixed shapes)."""
        code = None if num_tokens is None else self.exact.get(num_tokens)
        return self.run if code is None or code.run is None else code.run


def prepare(compiler: str, cache_dir: Folder | None) -> None:
    """What comes before any kernel is compiled, and what takes long and can go on beside tracing.

    Inductor's worker processes need seconds to start, and until then kernels are compiled one by one.
    """
    if compiler != "inductor":
        return
    _torch.agree_on_assembler()
    if not is_filled(cache_dir):
        _torch.start_compile_workers()


def compile_split(
    split: SplitGraph,
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
    keys: Mapping[int, Key],
    facts: Mapping[str, SegmentFacts],
) -> dict[int, CompiledSegment]:
    """What runs each segment of `split`, by SegmentStep.index; each structure is compiled once.

    Args:
        compiled: structures by key, shared by the traces of one model; grows here.
        keys: of each segment's structure, by SegmentStep.index.
        facts: of each structure, by its key's digest.
    """
    compiler, cache_dir = config.compiler, config.cache_dir
    prepare(compiler, cache_dir)
    shape_env = next(filter(None, (_torch.shape_env_of(step.gm) for step in split.segments)), None)
    given = len(_torch.guards_since(shape_env, 0)) if shape_env is not None else 0
    jobs: dict[str, tuple[Key, Callable[[], CompiledSegment]]] = {}
    for step in split.segments:
        key = keys[step.index]
        if key.digest not in jobs:
            stored = None
            if cache_dir is not None and compiler == "inductor":
                stored = cache_dir, portable_key(step.gm)
            jobs[key.digest] = key, partial(_compile, step, key, facts[key.digest], config, given, stored)
    for digest, (key, job) in jobs.items():
        if digest not in compiled or not accept(compiled[digest].conditions, key, shape_env):
            compiled[digest] = job()
        elif compiled[digest].facts != facts[digest]:  # a capture has shown more since
            compiled[digest] = replace(compiled[digest], facts=facts[digest])
    found = {index: compiled[key.digest] for index, key in keys.items()}
    computing = sum(segment.facts.computes for segment in found.values())
    counters.add("segments", computing)
    counters.add("inline_segments", len(found) - computing)
    counters.add("op_steps", len(split.steps) - len(found))
    return found


def _compile(
    step: SegmentStep,
    key: Key,
    facts: SegmentFacts,
    config: PiecewiseConfig,
    given: int,
    stored: tuple[Folder, Key | str] | None,
) -> CompiledSegment:
    """The structure of `step`.

    Args:
        given: how many guards on sizes the model's trace came with.
        stored: where other processes find it, and under which key (or the reason why it has none).
    """
    gm = step.gm
    inputs = _torch.argument_values(gm)
    if not facts.computes:
        return CompiledSegment(key.digest, gm, gm.forward, facts, 0.0)
    chosen, code = config.compiler if facts.compiles else "eager", gm
    if chosen == "inductor":
        code = with_deferred_norms(choosing_linears(with_summed_norms(gm)))
        if config.cuda_graphs != "off":
            devices = {value.device for value in inputs if isinstance(value, Tensor)}
            with kept_products(config.cache_dir, devices):
                compile_kernels_ahead(code, config.sizes)
                compile_norms_ahead(code, config.sizes)
    _torch.publish_graph(f"segment_{step.index}", gm)
    began = time.perf_counter()
    if stored is not None and chosen == "inductor":
        made = load_or_compile(*stored, code, inputs, given)
    else:
        made = Made(_torch.compile_segment(code, inputs, chosen), False, None)
    if not made.from_cache:
        counters.add("compiles")
    seconds = time.perf_counter() - began
    log.debug("segment_%d: structure %s in %.2f s", step.index, key.digest, seconds)
    conditions = conditions_since(given, key, _torch.shape_env_of(gm))
    run = made.run if chosen == "eager" else separated(made.run, gm)
    return CompiledSegment(key.digest, gm, run, facts, seconds, conditions, made.from_cache, made.reason)
