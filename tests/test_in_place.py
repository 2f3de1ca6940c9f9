"""pg.capture_in_place: one call as one graph, which reads its inputs where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import models
import pytest
import torch
from full_graph_cases import LAYERS, Centring
from hypothesis import given, settings, strategies as st
from torch import nn
from toys import (
    SIZES,
    WIDTH,
    Blocks,
    assert_same,
    captured,
    compiled,
    new_pool,
    rows,
    through_torch,
    watching,
)

import piecewise_graph as pg
from piecewise_graph.errors import CaptureError, ContextError, FreezeError, GraphPoolError

pytestmark = pytest.mark.usefixtures("no_grad")


class Parallel(nn.Module):
    """Two linears of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * self.two(x)


class Two(NamedTuple):
    hidden: torch.Tensor
    count: int


def of_rows(count: int, device: torch.device) -> pg.forward_context:
    return pg.forward_context(live=torch.tensor([count], device=device))


@pytest.mark.parametrize("entry", [compiled, through_torch])
def test_a_replay_reads_the_callers_buffer(entry: Any, device: torch.device) -> None:
    model, x = Centring().to(device), rows(3, device)
    with of_rows(3, device):
        graph = pg.capture_in_place(entry(model), x)
        for _ in range(3):
            x.copy_(rows(3, device))
            with pg.counters.expect(replays=1, full_replays=1, captures=0, fallbacks=0, traces=0):
                assert_same(graph(), model(x))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(2, SIZES[-1] + 3), min_size=1, max_size=5, unique=True), st.randoms())
def test_graphs_of_several_sizes_share_their_memory(counts: list[int], draw: Any) -> None:
    """Of any size: nothing is padded, so the capture sizes are no limit."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        model = Centring().to(device)
        fast, graphs = compiled(model), {}
        for count in sorted(counts, reverse=True):
            x, context = rows(count, device), of_rows(count, device)
            with context, pg.counters.expect(captures=1):
                graphs[count] = x, context, pg.capture_in_place(fast, x)
        for count in draw.choices(counts, k=6):
            x, context, graph = graphs[count]
            x.normal_()
            with context:
                assert_same(graph(), model(x))


def test_another_forward_context_than_the_captured_one_is_refused(device: torch.device) -> None:
    """Its tensors are part of the graph: a replay would read those of the capture."""
    model, x = Centring().to(device), rows(3, device)
    with of_rows(3, device):
        graph = pg.capture_in_place(compiled(model), x)
    with of_rows(2, device), pytest.raises(ContextError, match="live"):
        graph()
    with pytest.raises(ContextError, match="live"):
        graph()
    live = torch.tensor([3], device=device)
    with pytest.raises(ContextError, match="list"), pg.forward_context(live=live, others=[3]):
        pg.capture_in_place(compiled(model), x)


def test_it_stands_beside_the_models_other_graphs(device: torch.device) -> None:
    model, x = Centring().to(device), rows(4, device)
    with of_rows(4, device):
        fast = compiled(model, capture="explicit")
        captured(fast, device)
        with pg.counters.expect(captures=1, replays=0, fallbacks=0):
            graph = pg.capture_in_place(fast, x)
        for _ in range(2):
            x.normal_()
            assert_same(graph(), model(x))
            with pg.counters.expect(replays=1, full_replays=0):
                assert_same(fast(x), model(x))


def test_outputs_have_the_models_containers(device: torch.device) -> None:
    model = Centring().to(device)
    x = rows(2, device)

    def wrapped(x: torch.Tensor, flag: bool) -> dict[str, Any]:
        hidden = model(x)
        return {"two": Two(hidden, 7), "list": [hidden + 1 if flag else hidden]}

    with of_rows(2, device):
        graph = pg.capture_in_place(compiled(wrapped), x, flag=True)
        x.normal_()
        found, wanted = graph(), wrapped(x, True)
    assert isinstance(found["two"], Two) and found["two"].count == 7
    assert_same([found["two"].hidden, found["list"]], [wanted["two"].hidden, wanted["list"]])


def test_weights_written_in_place_are_read(device: torch.device) -> None:
    model, x = Centring().to(device), rows(2, device)
    with of_rows(2, device):
        graph = pg.capture_in_place(compiled(model), x)
        model.linears[0].weight.mul_(2.0)
        assert_same(graph(), model(x))


@pytest.mark.parametrize("drop", [lambda _: pg.reset(), pg.GraphPool.release], ids=["reset", "release"])
def test_a_dropped_graph_says_so(drop: Callable[[pg.GraphPool], None], device: torch.device) -> None:
    pool, x = new_pool(), rows(2, device)
    with of_rows(2, device):
        graph = pg.capture_in_place(compiled(Centring().to(device), pool=pool), x)
        drop(pool)
        with pytest.raises(GraphPoolError, match="dropped"):
            graph()


def test_an_op_that_cannot_be_captured_is_refused(device: torch.device) -> None:
    with pytest.raises(CaptureError, match=r"(?s)op_not_capturable.*capturable=True"):
        pg.capture_in_place(compiled(Blocks().to(device)), rows(2, device))


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return x + 1


@pytest.mark.parametrize("model", [breaks, lambda x: x], ids=["graph break", "no graph"])
def test_a_call_that_is_not_one_graph_is_refused(model: Any, device: torch.device) -> None:
    with pytest.raises(FreezeError):
        pg.capture_in_place(compiled(model), rows(2, device))


def test_something_else_is_refused(device: torch.device) -> None:
    with pytest.raises(FreezeError, match="no piecewise trace"):
        pg.capture_in_place(Blocks().to(device), rows(2, device))


def test_a_forward_happens_twice_to_warm_up_and_once_per_replay(device: torch.device) -> None:
    total = torch.zeros(WIDTH, device=device)

    def adds(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        return x * total

    x = torch.ones(2, WIDTH, device=device)
    fast = compiled(adds)
    fast(x)
    before = total.clone()
    graph = pg.capture_in_place(fast, x)
    assert_same(total - before, torch.full_like(total, 2 * 2.0))
    assert_same(graph(), x * total)
    assert_same(total - before, torch.full_like(total, 3 * 2.0))


def test_outputs_are_the_same_memory_in_new_containers(device: torch.device) -> None:
    scale = torch.ones(3, device=device)
    x = rows(2, device)
    graph = pg.capture_in_place(compiled(lambda x: {"twice": x * 2, "scale": scale}), x)
    first = graph()
    kept = first["twice"]
    first["twice"] = None
    x.normal_()
    assert graph()["twice"] is not None
    assert_same(kept, x * 2)  # as it is on a GPU


class Batch:
    """Metadata that says how many tokens it describes."""

    def __init__(self, live: torch.Tensor, count: int) -> None:
        self.live, self.count = live, count

    def check_tokens(self, num_tokens: int) -> None:
        if num_tokens != self.count:
            raise ContextError("batch of another size", "make a batch of this size")


@pytest.mark.parametrize("check", ["first", "always"])
def test_tensors_inside_of_objects_are_looked_at(check: str, device: torch.device) -> None:
    """At the first replay, and at every one where the model's `check` says so."""
    batch, x = Batch(torch.zeros(1, device=device), 2), rows(2, device)
    with pg.forward_context(batch=batch):
        graph = pg.capture_in_place(compiled(lambda x: x * 2, check=check), x)
        graph()
        batch.live.data = torch.ones(1, device=device)
        if check == "always":
            with pytest.raises(ContextError, match="batch"):
                graph()
        else:
            graph()
        again = pg.capture_in_place(compiled(lambda x: x * 3, check=check), x)
        batch.live.data = torch.ones(1, device=device)
        with pytest.raises(ContextError, match="batch"):
            again()


def test_a_context_of_another_number_of_tokens_is_refused_at_the_capture(device: torch.device) -> None:
    with (
        pg.forward_context(batch=Batch(torch.zeros(1), 3)),
        pytest.raises(ContextError, match="another size"),
    ):
        pg.capture_in_place(compiled(lambda x: x * 2), rows(2, device))


def test_nothing_is_padded_under_a_full_graphs_context(device: torch.device) -> None:
    model, x = Centring().to(device), rows(3, device)
    live = torch.tensor([3], device=device)
    with pg.forward_context(full_graph=True, live=live), watching() as seen:
        graph = pg.capture_in_place(compiled(model), x)
        assert_same(graph(), model(x))
    assert {each.tokens for each in seen} == {3}


def test_a_later_trace_of_another_kind_does_not_matter(device: torch.device) -> None:
    fast, x = compiled(lambda x, y: x * 2, token_dim={"x": 0}), rows(2, device)
    fast(x, None)
    with torch.enable_grad():
        fast(x.clone().requires_grad_(), 1)
    graph = pg.capture_in_place(fast, x, None)
    x.normal_()
    assert_same(graph(), x * 2)


def test_graphs_that_are_off_are_not_captured(device: torch.device) -> None:
    with pytest.raises(CaptureError, match="cuda_graphs_off"):
        pg.capture_in_place(compiled(lambda x: x * 2, cuda_graphs="off"), rows(2, device))


def test_merged_weights_can_be_replaced_while_a_graph_is_there(device: torch.device) -> None:
    model = Parallel().to(device)
    fast, x = compiled(model, merge_linears=True), rows(2, device)
    graph = pg.capture_in_place(fast, x)
    assert_same(graph(), model(x))
    model.one.weight.data = torch.randn_like(model.one.weight)
    again = pg.capture_in_place(fast, x)
    assert_same(again(), model(x))
    assert_same(fast(x), model(x))
    del graph


def test_attention_of_torch_may_be_captured_too(device: torch.device) -> None:
    model = models.build("llama", device=device)
    ids = models.random_ids(4, device=device)
    fast = pg.compile(model, compiler="eager", pool=new_pool())
    graph = pg.capture_in_place(fast, **models.call("llama", ids))
    ids.copy_(models.random_ids(4, device=device))
    assert_same(graph().logits, model(**models.call("llama", ids)).logits)


@pytest.mark.gpu
def test_on_a_gpu_it_is_one_launch_without_copies(device: torch.device) -> None:
    model, x = Centring().to(device), rows(4, device)
    with of_rows(4, device):
        graph = pg.capture_in_place(compiled(model, compiler="inductor"), x)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph()
            torch.cuda.synchronize()
            with torch.profiler.profile() as trace:
                found = graph()
                torch.cuda.synchronize()
        assert_same(found, model(x))
    launches = [event.name for event in trace.events() if event.name.startswith(("cudaGraph", "cudaLaunch"))]
    assert launches == ["cudaGraphLaunch"] and LAYERS > 0
