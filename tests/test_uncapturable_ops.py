"""An op that no graph can hold runs between graphs: it costs itself, not the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from internals import fail_capture
from test_wrapper_weights import Quantised, quantise
from torch import Tensor, nn
from toys import WIDTH, compiled, ops, rows, watching

import piecewise_graph as pg
from piecewise_graph.graph_pool import GraphPool

pytestmark = pytest.mark.usefixtures("no_grad")

LIBRARY = torch.library.Library("pg_test_host", "DEF")
LIBRARY.define("scaled(Tensor x) -> Tensor", tags=torch.Tag.data_dependent_output)
_calls: list[int] = []


def scaled(x: Tensor) -> Tensor:
    """By a number of the first row, which the host reads."""
    _calls.append(len(x))
    return x * (1 + float(x[0, 0].abs()))


LIBRARY.impl("scaled", scaled, "CompositeExplicitAutograd")
torch.library.register_fake("pg_test_host::scaled", torch.empty_like, lib=LIBRARY)
reads_host: Any = torch.ops.pg_test_host.scaled


class Model(nn.Module):
    """Linears around such an op; with `attends`, a splitting op beside it."""

    def __init__(self, attends: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attends = attends

    def forward(self, x: Tensor) -> Tensor:
        h = reads_host(self.before(x).relu())
        return self.after(ops.mix(h) if self.attends else h).relu() + x


class Unrolled(Model):
    """Fixes its token count while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [super(Unrolled, self).forward(x)[i : i + 1] * (i + 1) for i in range(x.shape[0])]
        return torch.cat(rows)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", ["proved", "tried"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_it_is_cut_out_and_the_rest_is_padded(compiler: str, padding: Any, device: torch.device) -> None:
    model = Model().to(device)
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler, padding=padding)
    counts = (5, 3, 6, 4, 8)
    with pg.counters.expect(
        traces=1, tapes=2, captures=4, replays=3, unpadded_segments=3, fallbacks=0, failed_captures=0
    ):
        for n in counts:
            x = rows(n, device)
            same(fast(x), model(x))
    [why] = pg.explain(fast).traces[0].padding.values()
    assert "pg_test_host::scaled (reads a value back to the host)" in why


def test_it_runs_once_per_call_on_live_rows(device: torch.device) -> None:
    model = Model(attends=True).to(device)
    fast = compiled(model, token_dim={"x": 0})
    for n in (5, 3, 6, 4, 8, 1):
        x = rows(n, device)
        _calls.clear()
        found = fast(x)
        ran = list(_calls)
        same(found, model(x))
        assert ran[-1] == n
        if pg.counters.snapshot()["replays"]:
            assert ran == [n]


@pytest.mark.parametrize("kind", [Model, Unrolled])
def test_traces_of_fixed_shapes_too(kind: Callable[[], nn.Module], device: torch.device) -> None:
    model = kind().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=False, options={"compiler": "eager"})
    sizes = (5, 3)
    with pg.counters.expect(traces=len(sizes), tapes=len(sizes), replays=2 * len(sizes), fallbacks=0):
        for _ in range(3):
            for n in sizes:
                x = rows(n, device)
                same(fast(x), model(x))


def test_graphs_of_returning_sizes_leave_it_out_as_well(device: torch.device) -> None:
    """Rows that depend on the token count are not padded; what cannot be captured is still cut out."""
    model = Model().to(device)

    def doubled(x: Tensor) -> Tensor:
        return torch.cat([model(x), model(x) * 2])

    fast = compiled(doubled, token_dim={"x": 0})
    regions = {"unpadded_segments": 2, "unpadded_segments:data_dependent": 2}
    with pg.counters.expect(tapes=1, replays=2, **regions, **{"fallbacks:derived_size": 1}):
        for _ in range(4):
            x = rows(5, device)
            same(fast(x), doubled(x))


@dataclass
class Captures:
    """Whether something is captured now, by stand-ins too; and whether ops that refuse that were mended."""

    running: bool = False
    allowed: bool = False


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    state, capture = Captures(), GraphPool.capture

    def told(*args: Any, **options: Any) -> Any:
        state.running = True
        try:
            return capture(*args, **options)
        finally:
            state.running = False

    monkeypatch.setattr(GraphPool, "capture", told)
    return state


@pytest.fixture
def refusing(captures: Captures, device: torch.device) -> Iterator[Any]:
    """Ops that no graph can hold, of which nothing tells before their capture."""
    library = torch.library.Library("pg_test_refuses", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.define("one() -> Tensor")

    def refuse() -> None:
        if captures.running and not captures.allowed:
            raise RuntimeError("not permitted when stream is capturing")

    def doubled(x: Tensor) -> Tensor:
        refuse()
        _calls.append(len(x))
        return x * 2

    def one() -> Tensor:
        refuse()
        return torch.ones((), device=device)

    library.impl("doubled", doubled, "CompositeExplicitAutograd")
    library.impl("one", one, "CompositeExplicitAutograd")
    torch.library.register_fake("pg_test_refuses::doubled", torch.empty_like, lib=library)
    torch.library.register_fake("pg_test_refuses::one", lambda: torch.ones((), device=device), lib=library)
    yield torch.ops.pg_test_refuses
    library._destroy()


class Refused(nn.Module):
    """Such an op in the second of two equal layers."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.layers, self.op = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), op

    def forward(self, x: Tensor) -> Tensor:
        h = ops.mix(self.op(self.layers[0](x).relu()))
        h = ops.mix(self.op(self.layers[1](h).relu()))
        return self.layers[2](h) + x


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("pads", [True, False])
def test_an_op_found_at_its_capture_is_cut_out(
    refusing: Any, compiler: str, pads: bool, device: torch.device
) -> None:
    """The next call captures what is left; each call runs the op once."""
    model = Refused(refusing.doubled).to(device)
    options = {"capture_sizes": [4, 8], "max_tokens": 8, "compiler": compiler, "padding": "tried"}
    fast: Any = compiled(model, token_dim={"x": 0}, **options)
    if not pads:
        fast = torch.compile(model, backend="piecewise", dynamic=False, options=options)
    sizes = (3, 2, 8, 5) if pads else (4, 8)
    for n in (*sizes, *sizes):
        fast(rows(n, device))
    assert "pg_test_refuses::doubled (its capture fails: RuntimeError: not perm" in str(pg.explain(fast))
    regions = 2 * len(sizes)
    with pg.counters.expect(
        replays=len(sizes), captures=0, failed_captures=0, **{"unpadded_segments:data_dependent": regions}
    ):
        for n in sizes:
            x = rows(n, device)
            _calls.clear()
            found = fast(x)
            assert _calls == [n, n]
            same(found, model(x))


def test_the_call_that_found_it_writes_once(refusing: Any, device: torch.device) -> None:
    model = Refused(refusing.doubled).to(device)
    fast = compiled(model, token_dim={"x": 0}, padding="tried")
    for tapes in (0, 1, 0):
        x = rows(3, device)
        with pg.counters.expect(tapes=tapes, captures=3 * tapes, failed_captures=0), watching() as seen:
            found = fast(x)
        same(found, model(x))
        assert [call.tokens for call in seen] == [3, 3]


def test_a_call_without_effects_captures_what_is_left_at_once(refusing: Any, device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        zeros = x.new_zeros(torch.sym_max(2, x.shape[0] - 1), 1)  # a size of its own on both sides of the cut
        return refusing.doubled(linear(x).relu() + zeros.sum()) + x + refusing.one() * (1 - zeros.sum())

    fast = compiled(model, token_dim={"x": 0}, padding="tried")
    with pg.counters.expect(tapes=1, replays=2, failed_captures=0, fallbacks=0):
        for _ in range(3):
            x = rows(4, device)
            same(fast(x), model(x))


def test_a_reset_tries_it_again(refusing: Any, captures: Captures, device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH).to(device)
    fast = compiled(lambda x: linear(refusing.doubled(linear(x))), token_dim={"x": 0}, padding="tried")
    x = rows(4, device)
    for graphs in (2, 1):
        pg.reset()
        with pg.counters.expect(tapes=1, captures=graphs, replays=1):
            fast(x), fast(x)
        captures.allowed = True


class Biased(nn.Module):
    """An attribute that the caller assigns anew."""

    def __init__(self, doubled: Any) -> None:
        super().__init__()
        self.linear, self.bias, self.doubled = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH), doubled

    def forward(self, x: Tensor) -> Tensor:
        return self.doubled(self.linear(x).relu()) + self.bias


@pytest.mark.usefixtures("captures")
def test_the_trace_that_is_cut_anew_still_copies_what_changes_with_calls(
    refusing: Any, device: torch.device
) -> None:
    model = Biased(refusing.doubled).to(device)
    fast = compiled(model, token_dim={"x": 0}, padding="tried")
    for number in range(6):
        model.bias = torch.full((WIDTH,), float(number), device=device)
        for _ in range(2):
            x = rows(4, device)
            same(fast(x), model(x))


@pytest.mark.usefixtures("captures")
def test_it_is_cut_out_of_a_combination_of_sizes(refusing: Any, device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        return refusing.doubled(linear(x).relu()) + x

    options = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8, "batch_sizes": ()}
    fast = torch.compile(model, backend="piecewise", dynamic=True, options=options)
    with pg.counters.expect(tapes=1, replays=2, failed_captures=0, fallbacks=1):
        for _ in range(4):
            x = torch.randn(2, 3, WIDTH, device=device)
            same(fast(x), model(x))


class Doubled(Quantised):
    """A wrapper whose own function does what no graph can hold, as torchao's dynamic int8 prints a tensor."""

    @staticmethod
    def linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
        found: Tensor = torch.ops.pg_test_refuses.doubled(Quantised.linear(x, weight, bias))
        return found


@pytest.mark.usefixtures("refusing")
def test_a_function_of_a_wrapper_is_cut_out_with_its_wrapper(device: torch.device) -> None:
    first, last = (nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    model = nn.Sequential(quantise(first, Doubled.of), *(nn.Tanh() for _ in range(9)), last)
    fast = compiled(model, token_dim={"input": 0}, padding="tried")
    with pg.counters.expect(tapes=1, captures=1, replays=2, failed_captures=0, fallbacks=0):
        for n in (3, 4, 2):
            x = rows(n, device)
            same(fast(x), model(x))
    assert "linear (its capture fails: RuntimeError: not perm" in str(pg.explain(fast))


def test_a_capture_that_fails_for_another_reason_costs_its_bucket(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op can be captured alone: nothing is cut."""
    fail_capture(monkeypatch, RuntimeError("the stream broke"), at=4)
    model = Model(attends=True).to(device)
    fast = compiled(model.before, token_dim={"input": 0}, compiler="eager")
    with pg.counters.expect(failed_captures=1, replays=1, **{"fallbacks:capture_failed": 1}):
        for n in (3, 4, 8, 7):
            x = rows(n, device)
            same(fast(x), model.before(x))
