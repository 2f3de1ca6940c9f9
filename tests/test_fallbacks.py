"""Every reason for which a forward runs without a tape: reached here, answered right, counted, explained."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from toys import WIDTH, Blocks, assert_same, compiled, define, fallbacks, ops, rows

import piecewise_graph as pg
from piecewise_graph.splitter.split import Unsplittable, split

SOURCE = Path(pg.__file__).parent

define(
    "times(Tensor x, float factor) -> Tensor", lambda x, factor: x * factor, lambda x, f: torch.empty_like(x)
)
pg.register_splitting_op("toy::times")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


# --- the models ---------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Writes a buffer by an op that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return ops.mix(x * self.count)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.index_copy_(0, torch.arange(x.shape[0], device=x.device), x)
        return ops.mix(x + self.cache.sum(0))


def autocast_around_an_op(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return ops.mix(x) @ torch.ones(WIDTH, WIDTH, device=x.device)


def grad_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x * 2
    return ops.mix(x)


def hidden_op(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, ops.mix, lambda t: t + 1, (x * 2,))


def branch_at_six(x: Tensor) -> Tensor:
    return ops.mix(x * (2 if x.shape[0] < 6 else 3))


def doubled_tokens(x: Tensor) -> Tensor:
    return ops.mix(torch.cat([x, x])) + 1


def float_of_the_size(x: Tensor) -> Tensor:
    return ops.times(x * 2, x.shape[0] / 3)


def rows_chosen_by_value(x: Tensor) -> Tensor:
    return ops.mix(x[(x[:, 0] > 0).nonzero().flatten()]).sum(0) + x


def inference_mode_around_an_op(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = ops.mix(x * 2)
    return y + 1


def mean_and_views(x: Tensor) -> Tensor:
    y = x - x.mean(0)
    ops.halve(y[:, :4])
    return y + 1


def break_first(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


class CpuTable(nn.Module):
    """A table that was left on the CPU, as offloaded embeddings are."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, device=device))
        self.scale = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mix(x * self.weight) * self.scale


# --- reason -> a model and calls that reach it --------------------------------------------------------


@dataclass
class Case:
    """What to call, and which of the calls fall back for the reason under test.

    Attributes:
        model: makes the model for a device.
        counts: token counts of the calls, in order.
        hits: how many of them fall back for the reason; no call falls back for another one.
        around: made for a device, wraps every call.
        calls: makes a call's arguments, where tokens are not enough.
    """

    model: Callable[[torch.device], Any]
    counts: tuple[int, ...] = (3, 3, 8)
    hits: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[torch.device], AbstractContextManager[Any]] = lambda device: nullcontext()
    calls: Callable[[int, torch.device], tuple[Any, ...]] = lambda count, device: (rows(count, device),)


def a(function: Callable[..., Any]) -> Callable[[torch.device], Any]:
    return lambda device: function


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def scalar_changes(count: int, device: torch.device) -> tuple[Any, ...]:
    return rows(4, device), float(count)


def two_tensor(count: int, device: torch.device) -> tuple[Any, ...]:
    return (TwoTensor(rows(count, device), rows(count, device)),)


CASES = {
    "a_symbolic_float_crosses_a_cut": Case(a(float_of_the_size)),
    "above_max_tokens": Case(lambda d: Blocks().to(d), counts=(9, 8, 8, 20), hits=2),
    "an_effect_crosses_a_cut": Case(a(inference_mode_around_an_op)),
    "autocast": Case(lambda d: Blocks().to(d), around=autocast),
    "autocast_region_crosses_a_cut": Case(a(autocast_around_an_op)),
    # the trace is valid below 6 only, and no bucket below 6 holds 5 tokens
    "bucket_outside_trace": Case(a(branch_at_six), counts=(3, 5, 5), hits=2),
    "cuda_graphs_off": Case(lambda d: Blocks().to(d), options={"cuda_graphs": "off"}),
    # a Python float that changes becomes a tensor that is read back to the host; two calls have it fixed
    "data_dependent": Case(
        a(lambda x, factor: ops.mix(x) * factor), calls=scalar_changes, hits=2, counts=(3, 4, 5, 6)
    ),
    "derived_size": Case(a(doubled_tokens), counts=(3, 3, 4, 4), hits=2),
    "grad_enabled": Case(lambda d: Blocks().to(d), around=lambda d: torch.enable_grad()),
    "grad_enabled_inside": Case(a(grad_inside)),
    "mixed_devices": Case(CpuTable),
    "mixes_tokens": Case(a(mean_and_views), counts=(3, 3, 4, 4), hits=2),
    "not_captured": Case(lambda d: Blocks().to(d), options={"capture": "explicit"}),
    "no_tokens": Case(lambda d: Blocks().to(d), counts=(0, 3, 0), hits=2),
    "not_traced_by_dynamo": Case(a(break_first)),
    "over_budget": Case(lambda d: Blocks().to(d), options={"max_graph_bytes": 1}),
    "random_numbers": Case(a(lambda x: ops.mix(x) + nn.functional.dropout(x, 0.5) * 0)),
    "splitting_op_inside_higher_order_op": Case(a(hidden_op)),
    "tensor_subclass": Case(lambda d: Blocks().to(d), calls=two_tensor),
    "writes_an_input": Case(lambda d: Counting().to(d)),
}
# Reached by tests of their own below, or where their mechanism is tested.
ELSEWHERE = {
    "a_tuple_crosses_a_cut",
    "capture_failed",
    "captured_by_caller",
    "data_dependent_size",
    "no_token_dimension",
    "padding_unproven",
    "proof_failed",
    "size_is_a_number",
    "second_dynamic_dimension",
}
GPU_ONLY = {"mixed_devices", "captured_by_caller"}
CPU_ONLY = {"data_dependent"}  # with a GPU the float that became a tensor makes it mixed_devices


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
    """Eager's result of a model that keeps state, on state of its own."""

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


# --- the reasons in the source ------------------------------------------------------------------------


def reasons_in_source() -> set[str]:
    """Literals that the library returns, assigns, raises or counts as a reason."""
    found: set[str] = set()
    for path in (p for p in SOURCE.rglob("*.py") if not {"eagle", "bench"} & set(p.parts)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found.update(text for part in _reason_parts(node) for text in _literals(part))
    return found


def _reason_parts(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef) and node.name in {
        "_keeps_whole",
        "_blocked",
        "padding_fault",
        "_fault",
    }:
        return [r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value is not None]
    if isinstance(node, ast.Assign):
        names = {t.id for t in node.targets if isinstance(t, ast.Name)}
        return [node.value] if names & {"blocked", "unpaddable", "reason", "fault"} else []
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called == "Decision":
            return [keyword.value for keyword in node.keywords if keyword.arg == "reason"] + node.args
        if called == "add":
            return [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        return list(node.args) if called in {"Unsplittable", "decided", "_count_fallback"} else []
    return []


def _literals(part: ast.AST) -> Iterator[str]:
    if isinstance(part, ast.Constant) and isinstance(part.value, str):
        yield part.value
    elif isinstance(part, ast.IfExp):
        yield from _literals(part.body)
        yield from _literals(part.orelse)


def test_every_reason_in_the_source_is_reached_by_a_test() -> None:
    assert reasons_in_source() == set(CASES) | ELSEWHERE


# --- reasons that need more than a table row ----------------------------------------------------------


def test_second_dynamic_dimension_runs_compiled_at_every_shape(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + 1

    fast = compiled(model)
    for shape in ((3, 8), (3, 6), (4, 5)):
        x = torch.randn(*shape, device=device)
        torch._dynamo.mark_dynamic(x, 1)
        assert_same(fast(x), model(x))
    assert fallbacks(fast) == {"second_dynamic_dimension": 3}


def test_size_that_is_no_dimension_of_an_input_left(device: torch.device) -> None:
    """Only the number of rows of `y` varies, and the graph takes that number instead of `y`."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x) * y.shape[0]

    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "max_tokens": 8})
    x = rows(4, device)
    for count in (5, 6, 7):
        y = torch.zeros(count, device=device)
        assert_same(fast(x, y), model(x, y))
    assert fallbacks(fast) == {"no_token_dimension": 2}  # the first call is a trace of fixed shapes


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_size_that_depends_on_data(device: torch.device) -> None:
    fast = compiled(rows_chosen_by_value)
    for _ in range(2):
        x = rows(4, device)
        assert_same(fast(x), rows_chosen_by_value(x))
    assert fallbacks(fast) == {"data_dependent_size": 2}


def test_tuple_that_leaves_its_segment_whole() -> None:
    """Dynamo unpacks tuples, so only a graph made by hand shows it."""
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
        """The same without ops, because toy ops have no derivative."""

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


@pytest.mark.parametrize("make", [Counting, Cache])
def test_written_buffer_keeps_the_state_of_eager(make: type[nn.Module], device: torch.device) -> None:
    model, eager = make().to(device), make().to(device)
    fast = compiled(model)
    for count in (3, 3, 8, 1):
        x = rows(count, device)
        assert_same(fast(x), eager(x))
        for mine, wanted in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, wanted)
    assert fallbacks(fast) == {"writes_an_input": 4}


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
    """A padding fault costs the segment, not the forward, unless its outputs share storage."""

    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + x.mean(0)

    fast = compiled(model)
    with pg.counters.expect(fallbacks=0, replays=2, **{"unpadded_segments:mixes_tokens": 2}):
        for _ in range(3):
            x = rows(3, device)
            assert_same(fast(x), model(x))


@pytest.mark.parametrize("tracer", ["pg", "torch"])
def test_int_argument_that_changes(tracer: str, device: torch.device) -> None:
    """Dynamo makes the second value a symbol without bounds."""

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
