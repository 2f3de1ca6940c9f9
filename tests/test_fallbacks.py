"""Every reason of a fallback is reached here: the answer is right, the reason counted and explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_cases import (
    CASES,
    CPU_ONLY,
    ELSEWHERE,
    GPU_ONLY,
    Case,
    Counting,
    autocast,
    rows_chosen_by_value,
)
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from toys import WIDTH, Blocks, assert_same, compiled, fallbacks, ops, rows

import piecewise_graph as pg
from piecewise_graph.splitter.split import Unsplittable, split

pytestmark = pytest.mark.usefixtures("no_grad")


SOURCE = Path(pg.__file__).parent


# --- reason -> a model and calls that reach it --------------------------------------------------------


def _skip_elsewhere(reason: str, device: torch.device) -> None:
    if reason in (GPU_ONLY if torch.device(device).type == "cpu" else CPU_ONLY):
        pytest.skip("another kind of device")


def run(case: Case, fast: Any, model: Any, device: torch.device) -> None:
    for count in case.counts:
        args = case.calls(count, device)
        with case.around(device):
            wanted = model(*args)
            assert_same(_plain(fast(*args)), _plain(wanted))


def _plain(value: Any) -> Any:
    return value.a if isinstance(value, TwoTensor) else value


class Stateful:
    """The eager result of a model with state, computed on a copy of that state."""

    def __init__(self, model: nn.Module) -> None:
        import copy

        self.model = copy.deepcopy(model)

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", sorted(CASES))
def test_reason_is_reached_counted_and_the_answer_right(reason: str, device: torch.device) -> None:
    _skip_elsewhere(reason, device)
    case = CASES[reason]
    model = case.model(device)
    eager = Stateful(model) if isinstance(model, nn.Module) else model
    fast = compiled(model, **case.options)
    with pg.counters.expect(fallbacks=case.hits, **{f"fallbacks:{reason}": case.hits}):
        run(case, fast, eager, device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reason", sorted(CASES))
def test_reason_is_shown_by_explain(reason: str, device: torch.device) -> None:
    _skip_elsewhere(reason, device)
    case = CASES[reason]
    model = case.model(device)
    fast = compiled(model, **case.options)
    for count in case.counts:
        with case.around(device):
            fast(*case.calls(count, device))
    assert fallbacks(fast) == {reason: case.hits}
    assert reason in str(pg.explain(fast))


# --- all reasons --------------------------------------------------------------------------------------


def reasons_of_calls() -> set[str]:
    """Reasons in README's tables of calls and segments (test_readme_reasons.py holds them complete)."""
    text = (SOURCE / "README.md").read_text(encoding="utf-8")
    tables = (
        text.partition(f"\n### {title}\n")[2].partition("\n###")[0]
        for title in ("A call ran without graphs", "A segment ran at the exact token count")
    )
    return {reason for table in tables for reason in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}


def test_every_reason_is_reached_by_a_test() -> None:
    assert reasons_of_calls() == set(CASES) | ELSEWHERE


# --- reasons that need more than a table row ----------------------------------------------------------


def test_second_dynamic_dimension_runs_compiled_at_every_shape(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + 1

    fast = compiled(model, batch_sizes=())
    for shape in ((3, 8), (3, 6), (4, 5)):
        x = torch.randn(*shape, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        assert_same(fast(x), model(x))
    assert fallbacks(fast) == {"second_dynamic_dimension": 3}


def test_a_stride_that_varies_alone_is_no_count_of_tokens(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + 1

    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "max_tokens": 8})
    for width in (9, 10, 11):
        x = torch.randn(3, width, device=device)[:, :8]
        assert_same(fast(x), model(x))
    assert fallbacks(fast) == {"no_token_dimension": 2}  # the first call is a trace of fixed shapes


def test_size_that_is_no_dimension_of_an_input_left(device: torch.device) -> None:
    """Only the row count of `y` varies, and the graph takes that count instead of `y`."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x) * y.shape[0]

    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "max_tokens": 8})
    x = rows(4, device)
    for count in (5, 6, 7):
        y = torch.zeros(count, device=device)
        assert_same(fast(x, y), model(x, y))
    assert fallbacks(fast) == {"number_varies": 2}  # the first call is a trace of fixed shapes


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_size_that_depends_on_data(device: torch.device) -> None:
    fast = compiled(rows_chosen_by_value)
    for _ in range(2):
        x = rows(4, device)
        assert_same(fast(x), rows_chosen_by_value(x))
    assert fallbacks(fast) == {"data_dependent_size": 2}


def test_tuple_that_leaves_its_segment_whole() -> None:
    """Dynamo unpacks tuples, so this graph is made by hand."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(4, WIDTH)
    pair = graph.call_method("chunk", (x, 2, 1))
    pair.meta["example_value"] = torch.ones(4, WIDTH).chunk(2, 1)
    op = graph.call_function(torch.ops.toy.mix_list, (pair,))
    op.meta["example_value"] = torch.ones(4, WIDTH // 2)
    graph.output((op,))
    with pytest.raises(Unsplittable, match="a_tuple_crosses_a_cut"):
        split(torch.fx.GraphModule({}, graph))


@pytest.mark.gpu
def test_callers_own_capture_gets_plain_kernels(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    x = rows(4, device)
    fast(x), fast(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fast(x)
    x.copy_(rows(4, device))
    graph.replay()
    assert_same(found, model(x))
    assert fallbacks(fast) == {"captured_by_caller": 1}


def test_gradients_are_right_under_grad_mode_and_tapes_are_used_without(device: torch.device) -> None:
    model = Blocks().to(device)

    class Plain(nn.Module):
        """The same model without ops, because toy ops have no derivative."""

        def forward(self, x: Tensor) -> Tensor:
            for linear in model.linears:
                x = x + linear(x)
            return x

    plain = Plain()
    plain.linears = model.linears
    fast = compiled(plain)
    x = rows(3, device)
    with torch.enable_grad():
        plain(x).square().sum().backward()
        wanted = [p.grad.clone() for p in plain.parameters()]
        plain.zero_grad()
        fast(x).square().sum().backward()
    for parameter, grad in zip(plain.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    with pg.counters.expect(fallbacks=0, tapes=1, replays=1):
        fast(x), fast(x)


def test_random_numbers_follow_the_callers_seed_at_every_call(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return ops.mix(x) * torch.rand_like(x) + nn.functional.dropout(x, 0.5)

    fast = compiled(model)
    x = rows(4, device)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        wanted = model(x)
        torch.manual_seed(seed)
        assert_same(fast(x), wanted)
    assert not torch.equal(fast(x), fast(x))


def test_written_attribute_keeps_the_state_of_eager(device: torch.device) -> None:
    model, eager = Counting().to(device), Counting().to(device)
    fast = compiled(model)
    with pg.counters.expect(tapes=2, replays=1):
        for count in (3, 3, 8, 3):
            x = rows(count, device)
            assert_same(fast(x), eager(x))
            torch.testing.assert_close(model.count, eager.count)
    assert fallbacks(fast) == {"writes_static_input": 1}


def test_autocast_gives_the_low_precision_of_eager(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    x = rows(3, device)
    exact = fast(x)
    with autocast(device):
        low = fast(x)
        assert_same(low, model(x))
    assert not torch.equal(low.float(), exact.float())
    assert_same(fast(x), exact)


def test_model_that_reduces_over_tokens_is_replayed_with_that_segment_unpadded(device: torch.device) -> None:
    """Only that segment runs unpadded, unless its outputs share storage."""

    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + x.mean(0)

    fast = compiled(model)
    with pg.counters.expect(fallbacks=0, replays=2, **{"unpadded_segments:no_padding_proof": 2}):
        for _ in range(3):
            x = rows(3, device)
            assert_same(fast(x), model(x))


@pytest.mark.parametrize("tracer", ["pg", "torch"])
def test_int_argument_that_changes(tracer: str, device: torch.device) -> None:
    """Dynamo makes a symbol without bounds of the second value."""

    def model(x: Tensor, n: int) -> Tensor:
        return ops.mix(x) * n

    fast = (
        compiled(model)
        if tracer == "pg"
        else torch.compile(model, backend="piecewise", options={"compiler": "eager"}, dynamic=True)
    )
    x = rows(4, device)
    for n in (3, 4, 5, -2):
        assert_same(fast(x, n), model(x, n))


def test_more_counts_than_dynamos_limit_get_graphs_where_a_model_fixes_its_count(
    device: torch.device,
) -> None:
    """By itself, Dynamo gives up a code object after 8 traces."""
    model = torch.compile(
        lambda x: torch.cat([x[i : i + 1] * i for i in range(x.shape[0])]), backend="piecewise"
    )
    counts = range(1, 12)
    for _ in range(2):
        before = pg.counters.snapshot()["replays"]
        for n in counts:
            model(torch.ones(n, 2, device=device))
    assert pg.counters.snapshot()["replays"] - before == len(counts)
