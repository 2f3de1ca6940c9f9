"""Segments take size symbols, and compute themselves what is derived from them.

Inductor binds a symbol where it is an argument or a dimension. Its cache stores conditions on arguments that
are no symbols by the names of the trace, which another trace cannot evaluate. So each model is traced twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from toys import WIDTH, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
Model = Callable[[Tensor, Tensor], Tensor]


def sum_of_two(x: Tensor, past: Tensor) -> Tensor:
    """The length of keys when prompts are continued."""
    y = ops.mix(x * 2)
    return y + torch.arange(x.shape[0] + past.shape[0], device=x.device).sum()


def quotient(x: Tensor, past: Tensor) -> Tensor:
    y = ops.mix(x * 2)
    return y + torch.ones((past.shape[0] + 1) // 2, device=x.device).sum() * (x.shape[0] % 3)


def longer_by_one(x: Tensor, past: Tensor) -> Tensor:
    y = ops.mix(torch.cat([x, past[:1]]))
    return y * 2 + y.shape[0]


def of_products(x: Tensor, past: Tensor) -> Tensor:
    y = ops.mix((x[:, None] * past).flatten(0, 1))
    return y.unflatten(0, (x.shape[0], past.shape[0])) + 1


MODELS = (sum_of_two, quotient, longer_by_one, of_products)


def traced_anew(model: Model, compiler: str) -> Model:
    torch._dynamo.reset()
    pg.reset()
    return torch.compile(model, backend="piecewise", dynamic=True, options={"compiler": compiler})


@pytest.mark.parametrize("model", MODELS)
def test_sizes_of_another_trace(model: Model, device: torch.device) -> None:
    for _ in range(2):
        fast = traced_anew(model, "inductor")
        for tokens, before in ((5, 3), (6, 9)):
            x, past = rows(tokens, device), torch.ones(before, WIDTH, device=device)
            torch.testing.assert_close(fast(x, past), model(x, past))


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(2, 9), st.integers(2, 9)), min_size=1, max_size=4))
def test_any_sizes(counts: list[tuple[int, int]]) -> None:
    for model in MODELS:
        fast = traced_anew(model, "eager")
        for tokens, before in counts:
            x, past = rows(tokens, torch.device("cpu")), torch.ones(before, WIDTH)
            torch.testing.assert_close(fast(x, past), model(x, past))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor keeps on disk: code that another test left there could be the right one by chance."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def shifted(x: Tensor) -> Tensor:
    """Each token with the one before it. At two tokens AOTAutograd takes the size for the number 2."""
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return (x + before) * torch.arange(x.shape[0], device=x.device)[:, None]


def shifted_pair(x: Tensor, past: Tensor) -> Tensor:
    return torch.cat([x[1:], past[:-1]]).sum() + x.shape[0] * torch.ones(past.shape[0], device=x.device).sum()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("way", ["pg.compile", "torch.compile"])
@pytest.mark.parametrize("counts", [(5, 2, 7, 16), (2, 1, 5), (2, 7, 2, 1, 8)], ids=str)
def test_code_made_at_two_tokens_serves_no_other_count(
    counts: tuple[int, ...], way: str, compiler: str, device: torch.device, empty_cache: None
) -> None:
    if way == "pg.compile":
        fast = pg.compile(shifted, token_dim={"x": 0}, max_tokens=16, compiler=compiler)
    else:
        fast = torch.compile(shifted, backend="piecewise", dynamic=True, options={"compiler": compiler})
    for count in counts:
        x = rows(count, device)
        torch.testing.assert_close(fast(x), shifted(x))


@pytest.mark.parametrize(
    "counts", [((3, 2), (2, 3), (7, 5)), ((5, 5), (7, 3), (4, 4), (2, 2), (9, 2))], ids=str
)
def test_code_made_where_one_of_two_sizes_is_two_serves_no_others(
    counts: tuple[tuple[int, int], ...],
) -> None:
    fast = torch.compile(shifted_pair, backend="piecewise", dynamic=True, options={"compiler": "aot_eager"})
    for tokens, before in counts:
        x, past = rows(tokens, torch.device("cpu")), torch.ones(before, WIDTH)
        torch.testing.assert_close(fast(x, past), shifted_pair(x, past))


def in_slices(x: Tensor) -> Tensor:
    """From four tokens on, the code reads four: what Inductor's cache has to know of it."""
    return x[:4].sum(0) + 2 * x[4:].sum(0) + x


def in_thirds(x: Tensor) -> Tensor:
    first, second, third = x.tensor_split(3)
    return x + first.sum(0) + 2 * second.sum(0) + 3 * third.sum(0)


def averaged(x: Tensor) -> Tensor:
    return x + torch.nn.functional.avg_pool1d(x.T[None], 2, ceil_mode=True).sum()


@pytest.mark.parametrize("model", [in_slices, in_thirds, averaged])
def test_inductors_cache_gives_code_to_the_counts_it_is_right_for(
    model: Callable[[Tensor], Tensor], device: torch.device, empty_cache: None
) -> None:
    for counts in ((10, 6, 3), (5, 2, 4), (3, 12)):  # traced anew, where the caches hold what was compiled
        torch._dynamo.reset()
        pg.reset()
        fast = torch.compile(model, backend="piecewise", dynamic=True)
        for count in counts:
            x = rows(count, device)
            torch.testing.assert_close(fast(x), model(x))


def test_symbols_of_layouts_are_arguments_of_their_segment() -> None:
    found: list[int] = []

    def plain(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + 1

    fast = pg.compile(plain, token_dim={"x": 0}, max_tokens=16, compiler="eager")
    fast(rows(6, torch.device("cpu")))
    (trace,) = fast.model_state.traces
    for step in trace.program.split.segments:
        values = [node.meta["example_value"] for node in step.gm.graph.find_nodes(op="placeholder")]
        tensors = [value for value in values if isinstance(value, Tensor)]
        symbols = {
            s
            for x in tensors
            for size in x.shape
            if not isinstance(size, int)
            for s in size.node.expr.free_symbols
        }
        found.append(len(symbols))
        assert symbols <= {value.node.expr for value in values if isinstance(value, torch.SymInt)}
    assert found == [1, 1]
