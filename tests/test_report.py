"""pg.explain: its text and its JSON."""

from __future__ import annotations

import gc
import json
from html.parser import HTMLParser

import pytest
import torch
from internals import state
from torch import Tensor, nn
from toys import WIDTH, Blocks, compiled, ops, rows, through_torch

import piecewise_graph as pg
from piecewise_graph.errors import NotCompiledError
from piecewise_graph.inspection.report import Report, StepReport, StructureReport, TraceReport
from piecewise_graph.recorder.bucket_record import BucketRecord

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 3


@pytest.fixture
def used(device: torch.device) -> tuple[Blocks, object]:
    """A model and its compiled model after calls with 3, 3, 4, 8 and 9 tokens."""
    model = Blocks(LAYERS).to(device)
    fast = compiled(model)
    for count in (3, 3, 4, 8, 9):
        fast(rows(count, device))
    return model, fast


def test_report_counts_by_formula(used: tuple[Blocks, object]) -> None:
    report = pg.explain(used[1])
    (trace,) = report.traces
    assert trace.segments == LAYERS + 1
    assert trace.steps == 2 * LAYERS + 1
    assert trace.inline_segments == 0
    assert trace.splitting_ops == {"toy::mix": LAYERS}
    assert trace.distinct == 3
    assert trace.blocked is None
    assert trace.failed == trace.padding == {}
    assert [(b.tokens, b.graphs, b.replays) for b in trace.buckets] == [
        (4, LAYERS + 1, 2),
        (8, LAYERS + 1, 0),
    ]
    # replays of 3 and 4 tokens; 8 was captured, and its call answered by the first replay
    assert [b.token_counts for b in trace.buckets] == [2, 1]
    assert all((b.bind_seconds > 0) == (b.token_counts > 0) for b in trace.buckets)
    assert "host time of a new token count: " in str(report)
    assert trace.fallbacks == {"above_max_tokens": 1}
    # the input and one bridge, for 8 tokens; the bridge of the smaller bucket, which came first, apart
    assert report.buffer_bytes == (8 + 8 + 4) * WIDTH * 4
    assert not report.sealed


def test_report_is_json(used: tuple[Blocks, object]) -> None:
    report = pg.explain(used[1])
    text = json.dumps(report.to_dict())
    found = json.loads(text)
    assert found["traces"][0]["segments"] == LAYERS + 1
    assert found["buffer_bytes"] == report.buffer_bytes


def test_text_shows_what_a_person_asks(used: tuple[Blocks, object]) -> None:
    text = str(pg.explain(used[1]))
    for part in (
        f"{LAYERS + 1} segments",
        f"{LAYERS} x toy::mix",
        "3 distinct structures",
        "1 token or more",
        "fallback above_max_tokens: 1 calls",
        "in the graph pool",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 160


class Page(HTMLParser):
    """Tags that open and close in order, texts by class, and what the page asks the network for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.asked += [name for name, _ in attrs if name in ("src", "href")]
        self.asked += [tag] * (tag in ("script", "link", "img", "iframe"))
        self.inside = dict(attrs).get("class") or tag
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside, []).append(data)


def test_page_shows_steps_structures_buckets_and_fallbacks(used: tuple[Blocks, object]) -> None:
    report = pg.explain(used[1])
    text = report.to_html()
    found = Page(text)
    assert not found.open and not found.asked and "@import" not in text and "url(" not in text
    steps = [step.name for step in report.traces[0].layout]
    assert found.texts["segment"][: LAYERS + 1] == [name for name in steps if name.startswith("segment")]
    assert found.texts["op"] == ["toy::mix"] * LAYERS
    codes = [structure.code for structure in report.traces[0].structures]
    assert len(codes) == 3 and all(code in found.texts["pre"] for code in codes)
    assert "above_max_tokens" in text and "raise max_tokens, or split the batch" in text
    assert "Memory of the graph pool over capture" in text and "prefers-color-scheme: dark" in text
    assert [bucket.pool_bytes > 0 for bucket in report.traces[0].buckets] == [True, True]


def test_page_escapes_what_it_is_given() -> None:
    evil = "<script>alert('1')</script>"
    step = StepReport(evil, False, "", (f'"{evil}',))
    trace = TraceReport(
        evil, 1, blocked=evil, leaks=(evil,), failed={4: evil}, fallbacks={evil: 1}, layout=(step,),
        structures=(StructureReport(evil, (evil,), evil, 0.0, evil),), padding={evil: evil},
    )  # fmt: skip
    text = Report((trace,), 0, 0, False, {evil: 1}, {4: evil}).to_html()
    assert "<script" not in text and text.count("&lt;script&gt;") > 10
    assert not Page(text).asked


def test_report_has_the_code_that_inductor_generated(device: torch.device) -> None:
    fast = compiled(lambda x: x.sin() * 2, compiler="inductor")
    fast(rows(3, device))
    (structure,) = pg.explain(fast).traces[0].structures
    assert structure.origin == "Inductor" and "def call(" in structure.code
    assert structure.segments == ("segment_0",)


def test_text_shows_why_a_segment_is_not_padded(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x * 2) / x.shape[0])
    fast(rows(3, device)), fast(rows(3, device))
    report = pg.explain(fast)
    assert list(report.traces[0].padding.values()) == ["not proved: aten::div (size as a number)"]
    assert report.traces[0].buckets[0].unpadded == {"no_padding_proof": 1}
    assert "is not padded, not proved: aten::div (size as a number)" in str(report)


def test_text_shows_that_a_trace_is_never_replayed(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x) + torch.rand_like(x))
    fast(rows(3, device))
    assert "never replayed: random_numbers" in str(pg.explain(fast))


def test_trace_of_a_range_shows_it(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x * (2 if x.shape[0] < 6 else 3)))
    fast(rows(3, device))
    assert pg.explain(fast).traces[0].sizes.startswith(("1 to 5 tokens", "1 token or more, where "))


def test_plain_torch_compile_is_found_by_its_weights_and_by_its_code(device: torch.device) -> None:
    model = Blocks(LAYERS).to(device)
    by_weights = through_torch(model)
    by_weights(rows(3, device))
    assert pg.explain(by_weights).traces[0].segments == LAYERS + 1

    def function(x: Tensor) -> Tensor:
        return ops.mix(x * 2)

    by_code = through_torch(function)
    by_code(rows(3, device))
    assert pg.explain(by_code).traces[0].splitting_ops == {"toy::mix": 1}


def test_two_models_of_one_class_are_told_apart(device: torch.device) -> None:
    models = [through_torch(Blocks(n).to(device)) for n in (1, 4)]
    for fast in models:
        fast(rows(3, device))
    assert [pg.explain(fast).traces[-1].segments for fast in models] == [1 + 1, 4 + 1]


@pytest.mark.parametrize("strange", [None, 3, nn.Linear(2, 2), print])
def test_object_that_is_not_compiled_is_refused(strange: object) -> None:
    with pytest.raises(NotCompiledError, match="pass the object that"):
        pg.explain(strange)


def test_model_that_was_never_called_is_refused(device: torch.device) -> None:
    with pytest.raises(NotCompiledError, match="after at least one call"):
        pg.explain(compiled(Blocks().to(device)))


def test_explain_changes_nothing(used: tuple[Blocks, object], device: torch.device) -> None:
    before = pg.counters.snapshot()
    first = pg.explain(used[1]).to_dict()
    assert pg.explain(used[1]).to_dict() == first
    assert pg.counters.snapshot() == before


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_frozen_replays_are_counted_like_all_others(outputs: str, device: torch.device) -> None:
    fast = compiled(Blocks(LAYERS).to(device), outputs=outputs)
    frozen = pg.freeze(fast, rows(3, device))  # captures the bucket of 4
    for count in (3, 4, 2, 3, 8, 8):
        frozen(rows(count, device))
    fast(rows(4, device))
    (trace,) = pg.explain(fast).traces
    assert [(b.tokens, b.replays) for b in trace.buckets] == [(4, 4 + 1), (8, 1)]


def test_replays_are_counted_where_the_tape_is(device: torch.device) -> None:
    """A call that asked for a full graph and got the piecewise one counts there."""
    fast = compiled(Blocks(LAYERS).to(device))
    with pg.forward_context(full_graph=True), pg.counters.expect(**{"not_full:op_not_capturable": 3}):
        for _ in range(3):
            fast(rows(4, device))
    (trace,) = pg.explain(fast).traces
    assert [(b.tokens, b.mode, b.replays) for b in trace.buckets] == [(4, "piecewise", 2)]


def test_the_summary_names_what_matters_in_ten_lines(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x - x.mean(0)) * 2)
    for count in (3, 3, 4, 9, 9):
        fast(rows(count, device))
    text = pg.explain(fast).summary()
    assert (
        text.startswith("2 replays of ")
        and "between graphs, beside splitting ops: 1 x no_padding_proof" in text
    )
    assert "fallback above_max_tokens: 2 calls; raise max_tokens, or split the batch" in text
    assert "memory: " in text and len(text.splitlines()) <= 10


def test_a_summary_of_many_reasons_stays_short() -> None:
    many = {f"reason {number}": number for number in range(1, 12)}
    bucket = BucketRecord(8, graphs=2, graph_bytes=0, unpadded={"no_padding_proof": 1})
    trace = TraceReport("all", steps=3, buckets=(bucket,))
    report = Report(
        (trace,), 0, 0, sealed=False, fallbacks=many, ended={"traces": 1, "graphs": 1, "replays": 1}
    )
    lines = report.summary().splitlines()
    assert len(lines) == 10 and "fallback reason 11: 11 calls" in lines[2] and "and 6 more reasons" in lines


def test_what_graphs_of_a_dead_cache_served_is_still_told(device: torch.device) -> None:
    """The next cache finds what the model has: segments, proofs and the pool."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache.add_(1)
            return ops.mix(self.linear(x)) + cache[0]

    model = Counts().to(device)
    options = {"compiler": "eager", "capture_sizes": [4], "max_tokens": 4}
    fast = torch.compile(model, backend="piecewise", dynamic=False, options=options)
    for _ in range(3):
        cache = torch.zeros(1, device=device)
        torch._dynamo.mark_static_address(cache)
        for step in range(3):
            x = rows(4, device)
            torch.testing.assert_close(fast(x, cache), ops.mix(model.linear(x)) + step + 1)
        del cache
        gc.collect()
    report = pg.explain(fast)
    alive = [bucket for trace in report.traces for bucket in trace.buckets]
    assert report.ended["replays"] + sum(b.replays for b in alive) == 3 * 2
    assert report.ended["traces"] + len(alive) == 3
    assert "ended with a tensor that they read" in str(report) and "ended with" in report.summary()


def test_what_a_trace_served_is_counted_once_whoever_holds_it(device: torch.device) -> None:
    """Several tensors that it read die, one after another."""

    def model(x: Tensor, one: Tensor, two: Tensor) -> Tensor:
        one.add_(1), two.add_(1)
        return ops.mix(x) + one + two

    fast = compiled(model, capture_sizes=[4], max_tokens=4, token_dim={"x": 0})
    caches = [torch.zeros(1, device=device) for _ in range(2)]
    for cache in caches:
        torch._dynamo.mark_static_address(cache)
    for _ in range(3):
        fast(rows(4, device), *caches)
    held = state(fast).traces
    del cache
    caches.clear()
    gc.collect()
    assert len(held) == 1 and pg.explain(fast).ended == {"traces": 1, "graphs": 2, "replays": 2}


def test_a_model_that_was_never_called_has_no_report_of_a_dead_one(device: torch.device) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return ops.mix(self.linear(x)) * 2

    first = through_torch(Doubles().to(device))
    first(rows(3, device)), first(rows(4, device))
    del first
    gc.collect()
    with pytest.raises(NotCompiledError):
        pg.explain(through_torch(Doubles().to(device)))
