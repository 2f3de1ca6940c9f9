"""The library's stages and paths, each timed by pytest-benchmark.

    pytest benchmarks                          # a table
    pytest benchmarks --benchmark-json=FILE    # all numbers
    pytest benchmarks --benchmark-autosave     # keep this run; then, after a change:
    pytest benchmarks --benchmark-compare      # beside the latest run that was kept

Without a GPU, models are tiny, segments run eagerly and stand-ins take the place of graphs: the times are the
host's and say whether a change made the library slower. With a GPU, the model is a Llama-3.2-1B with random
weights, compiled by Inductor, and every call is timed until the device has finished it. The scripts beside
this file (`python -m benchmarks.bench_decode` and others) print the tables and marks that README quotes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import piecewise_graph as pg
from benchmarks.bench_eagle import Pair
from benchmarks.llama import SHAPES, random_model
from benchmarks.paged import PagedModel
from piecewise_graph.bench.drive import wait
from piecewise_graph.custom_ops import metadata as md

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SHAPE, COMPILER = ("1b", "inductor") if ON_GPU else ("tiny", "eager")
SIZES = (1, 4, 16)  # tokens of the buckets
REQUESTS = 4
CONTEXT = 1024  # tokens of a request in the metadata benchmark
MODES = pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])


def synced(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call that returns when the device has finished it."""

    def run() -> None:
        call()
        wait(DEVICE)

    return run


# Preparing a model.


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama on transformers' own attention; every forward computes all of its tokens."""
    return random_model(SHAPES[SHAPE], DEVICE, "sdpa")


def inputs(tokens: int) -> dict[str, Any]:
    ids = torch.randint(1, SHAPES[SHAPE].config.get("vocab_size", 128256), (1, tokens), device=DEVICE)
    return {"input_ids": ids, "use_cache": False}


def forget() -> None:
    """Drop every trace and graph."""
    torch._dynamo.reset()
    pg.reset()


def traced(model: Any, compiler: str) -> Any:
    """A model that is split and compiled, with nothing captured."""
    compiled = pg.compile(model, capture_sizes=SIZES, capture="explicit", compiler=compiler)
    compiled(**inputs(max(SIZES)))
    return compiled


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_split_and_compile(
    benchmark: Any, model: Any, compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call, from empty caches: Dynamo's trace, the splitter, one compile per distinct segment."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    rounds = 1 if compiler == "inductor" else 3
    benchmark.pedantic(traced, (model, compiler), setup=forget, rounds=rounds)


def test_capture(benchmark: Any, model: Any) -> None:
    """Rehearse and capture every bucket of a compiled model."""

    def setup() -> tuple[tuple[Any, Any], dict[str, Any]]:
        forget()
        return (traced(model, COMPILER), inputs), {"progress": False}

    report = benchmark.pedantic(pg.capture, setup=setup, rounds=3)
    assert len(report.captured) == len(SIZES)


# Calling it.


@pytest.fixture(scope="module")
def paged() -> PagedModel:
    """A Llama on our attention and a paged KV cache, with one batch per bucket."""
    return PagedModel(SHAPES[SHAPE], SIZES)


@pytest.fixture(scope="module")
def captured(paged: PagedModel) -> Any:
    """The paged model with every bucket captured in both modes."""
    compiled = pg.compile(paged.model, capture_sizes=SIZES, outputs="static", compiler=COMPILER)
    for full in (False, True):
        pg.capture(compiled, paged.inputs, context=partial(paged.fields, full=full), progress=False)
    return compiled


@MODES
def test_replay(benchmark: Any, paged: PagedModel, captured: Any, full: bool) -> None:
    """A call of pg.compile's result whose bucket is captured."""
    call = partial(captured, **paged.inputs(REQUESTS))
    with paged.context(REQUESTS, full):
        call()
        with pg.counters.expect(fallbacks=0, captures=0):
            benchmark(synced(call))


@MODES
def test_frozen_call(benchmark: Any, paged: PagedModel, captured: Any, full: bool) -> None:
    """The same without Dynamo; inputs are copied in."""
    given = paged.inputs(REQUESTS)
    with paged.context(REQUESTS, full):
        call = partial(pg.freeze(captured, **given), **given)
        call()
        with pg.counters.expect(fallbacks=0, captures=0):
            benchmark(synced(call))


@MODES
def test_decode_step(benchmark: Any, paged: PagedModel, captured: Any, full: bool) -> None:
    """What a serving loop does per token: enter the context, call, choose, write the next inputs in place."""
    given = paged.inputs(REQUESTS)
    with paged.context(REQUESTS, full):
        frozen = pg.freeze(captured, **given)
        frozen(**given)
        given |= frozen.static_inputs(REQUESTS)

    def step() -> None:
        with paged.context(REQUESTS, full):
            logits = frozen(**given).logits
        given["input_ids"].copy_(logits.argmax(-1))

    benchmark(synced(step))


# Its parts.


@MODES
def test_attention(benchmark: Any, paged: PagedModel, full: bool) -> None:
    """One call of our attention op over the paged KV cache."""
    with paged.context(REQUESTS, full):
        benchmark(synced(partial(paged.attend, REQUESTS)))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [4, 8])
def test_metadata(benchmark: Any, nodes: int, page_size: int) -> None:
    """The metadata of a greedy round with a chain: drafts, their tree, what is accepted."""
    pages = (CONTEXT + 64) // page_size
    table = torch.arange((REQUESTS + 1) * pages, device=DEVICE, dtype=torch.int32).view(REQUESTS + 1, pages)
    requests = torch.arange(1, REQUESTS + 1, device=DEVICE, dtype=torch.int32)
    batch = md.Batch(requests, torch.full_like(requests, CONTEXT), table, page_size)
    drafts = torch.randint(0, 2, (REQUESTS, nodes - 1), device=DEVICE)
    target = torch.randint(0, 2, (REQUESTS * nodes,), device=DEVICE)
    steps = md.DraftSteps.allocate(batch, steps=nodes - 1, topk=1)
    tree = md.Tree.allocate(batch, nodes=nodes)
    accepted = md.Accepted.allocate(batch, nodes=nodes, steps=nodes - 1)
    last = torch.zeros_like(requests)

    def metadata() -> None:
        md.draft_steps(batch, steps)
        md.build_tree(batch, last, drafts, tree)
        md.accept_greedy(batch, tree.tokens, target, accepted)

    benchmark(synced(metadata))


# Speculative decoding.


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A target and a head with random weights; acceptance is synthetic."""
    options = argparse.Namespace(compiler=COMPILER, specialize=(), draft_specialize=())
    with torch.no_grad():
        made = Pair(SHAPE, "eagle1", [1, REQUESTS], options)
    yield made
    made.speculator.close()


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
def test_round(benchmark: Any, pair: Pair, graphs: str) -> None:
    """A round of all requests: draft, verify, accept, draft-extend, and reading the result."""
    step = pair.run(REQUESTS, graphs, 2.5)
    benchmark(synced(step))
    step.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
def test_engine_step(benchmark: Any, pair: Pair, overlap: bool) -> None:
    """A step of an engine under load: requests end after a few rounds and others take their places."""
    engine = pair.speculator.engine(synthetic=2.5, overlap=overlap)

    def step() -> None:
        while engine.unfinished < REQUESTS:
            engine.add_request(range(1, 17), max_new_tokens=24)
        engine.step()

    for _ in range(8):  # captures every size of the batch
        step()
    benchmark(synced(step))
    engine.close()
