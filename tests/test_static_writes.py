"""Segments write tensors at fixed addresses: buffers, and static KV caches (`mark_static_address`)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from toys import WIDTH, compiled, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
LENGTH = 64


class Decoder(nn.Module):
    """Writes the rows of a call behind those of the calls before, and counts them, as a static cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor, length: Tensor) -> Tensor:
        h = self.before(x)
        places = torch.arange(x.shape[0], device=x.device) + length
        cache.index_copy_(0, places, h)
        length.add_(x.shape[0])
        return self.after(ops.mix(h + cache.sum(0)))


class Summed(nn.Module):
    """Works for any number of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1.0)
        return self.linear(ops.mix(x.flatten(0, -2))) + cache[0]


class Columns(nn.Module):
    """Writes a row and reads a column."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache[0].add_(1.0)
        return ops.mix(x) + cache[:, 0].sum()


class Buffered(Decoder):
    """The cache is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(LENGTH, WIDTH))
        self.register_buffer("length", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.cache, self.length)


def static_cache(device: torch.device) -> tuple[Tensor, Tensor]:
    made = torch.zeros(LENGTH, WIDTH, device=device), torch.zeros((), dtype=torch.int64, device=device)
    for tensor in made:
        torch._dynamo.mark_static_address(tensor)
    return made


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def check(fast: Any, model: nn.Module, sizes: Sequence[int], mine: Any, theirs: Any) -> None:
    """Calls with one cache each; both are the same after every call."""
    for n in sizes:
        x = rows(n, mine[0].device)
        same(fast(x, *mine), model(x, *theirs))
        same(mine, theirs)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_marked_cache_is_written_once_per_call_by_graphs_of_exact_sizes(
    compiler: str, device: torch.device
) -> None:
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler)
    sizes = (3, 4, 3, 4, 3, 1, 1, 1)  # 4 is a capture size; others have graphs when they return
    mine = static_cache(device)
    with pg.counters.expect(replays=3, tapes=3, **{"fallbacks:writes_static_input": 2}):
        check(fast, model, sizes, mine, static_cache(device))
    assert pg.explain(fast).traces[0].fallbacks == {"writes_static_input": 2}


def test_plain_torch_compile_captures_decode_steps_at_once(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=False, options={"compiler": "eager"})
    with pg.counters.expect(tapes=1, replays=4, fallbacks=0):
        check(fast, model, (1, 1, 1, 1, 1), static_cache(device), static_cache(device))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_buffer_is_written_too(compiler: str, device: torch.device) -> None:
    model, eager = Buffered().to(device), Buffered().to(device)
    eager.load_state_dict(model.state_dict())
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler)
    with pg.counters.expect(tapes=2, replays=3, **{"fallbacks:writes_static_input": 1}):
        for n in (4, 3, 4, 3, 3, 4):
            x = rows(n, device)
            same(fast(x), eager(x))
            same(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_caches_that_alternate_keep_their_graphs(device: torch.device) -> None:
    """Another address is another tape: no call writes to the cache of another one."""
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine, theirs = ([static_cache(device) for _ in range(3)] for _ in range(2))
    for pair in zip(mine, theirs, strict=True):
        check(fast, model, (4,), *pair)
    with pg.counters.expect(tapes=0, traces=0, replays=9, fallbacks=0):
        for _ in range(3):
            for pair in zip(mine, theirs, strict=True):
                check(fast, model, (4,), *pair)
    for one, other in zip(mine, theirs, strict=True):
        same(one, other)


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_order_of_caches_and_sizes(data: st.DataObject) -> None:
    device = torch.device("cpu")
    model = Decoder()
    fast = compiled(model, token_dim={"x": 0})
    pairs = [(static_cache(device), static_cache(device)) for _ in range(2)]
    calls = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=4, max_size=8)
    with torch.no_grad():
        for which, n in data.draw(calls):
            check(fast, model, (n,), *pairs[which])


@pytest.mark.parametrize("check_option", ["first", "off"])
@pytest.mark.parametrize("several_sizes", [False, True])
def test_caches_that_take_turns_keep_their_graphs(
    check_option: str, several_sizes: bool, device: torch.device
) -> None:
    model = Summed().to(device)
    options = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8, "check": check_option}
    fast = torch.compile(model, backend="piecewise", dynamic=several_sizes or None, options=options)
    pairs = [(static_cache(device)[0], static_cache(device)[0]) for _ in range(2)]
    calls = 5 * len(pairs)
    with pg.counters.expect(tapes=len(pairs), **({} if several_sizes else {"replays": calls - len(pairs)})):
        for mine, theirs in 5 * pairs:
            x = torch.randn(2, 4, WIDTH, device=device)
            same(fast(x, mine), model(x, theirs))
            same(mine, theirs)


def test_caches_that_come_and_go_leave_nothing_behind(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0})

    for _ in range(20):
        check(fast, model, (4,), static_cache(device), static_cache(device))
    before = watchers()
    for _ in range(20):
        check(fast, model, (4,), static_cache(device), static_cache(device))
    assert watchers() == before


def test_threads_have_caches_of_their_own(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=False, options={"compiler": "eager"})
    check(fast, model, (4,), static_cache(device), static_cache(device))

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                check(fast, model, (4, 4, 4), static_cache(device), static_cache(device))

    with pg.counters.expect(traces=0, fallbacks=0), ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_second_cache_of_fixed_sizes_needs_no_rehearsal(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=False, options={"compiler": "eager"})
    for rehearsals in (1, 0, 0):
        mine, theirs = static_cache(device), static_cache(device)
        with pg.counters.expect(rehearsals=rehearsals, tapes=1, replays=2, fallbacks=0):
            check(fast, model, (4, 4, 4), mine, theirs)
        same(mine, theirs)


def watchers() -> int:
    gc.collect()
    return len(weakref.finalize._registry)  # type: ignore[attr-defined]


def test_capturing_and_planning_leave_them_as_they_were(device: torch.device) -> None:
    model = Buffered().to(device)
    model.cache.normal_()
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    fast = compiled(model, token_dim={"x": 0})
    with pg.counters.expect(tapes=2):
        pg.capture(fast, lambda n: rows(n, device), progress=False)
    pg.plan(fast)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    eager = Buffered().to(device)
    eager.load_state_dict(model.state_dict())
    with pg.counters.expect(replays=2, tapes=0):
        for n in (4, 8):
            x = rows(n, device)
            same(fast(x), eager(x))
            same(dict(model.named_buffers()), dict(eager.named_buffers()))


def test_frozen_calls_write_the_cache_that_they_are_given(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine, theirs = ([static_cache(device) for _ in range(2)] for _ in range(2))
    x = rows(4, device)
    frozen = pg.freeze(fast, x, *mine[0])
    model(x, *theirs[0])  # freezing runs its example
    for index in (0, 1, 0, 0, 1, 1, 0):
        x = rows(4, device)
        same(frozen(x, *mine[index]), model(x, *theirs[index]))
        same(mine, theirs)


def test_a_frozen_call_tells_views_of_one_cache_apart(device: torch.device) -> None:
    model = Columns().to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine, theirs = (torch.zeros(WIDTH, WIDTH, device=device) for _ in range(2))
    x = rows(4, device)
    torch._dynamo.mark_static_address(mine)
    frozen = pg.freeze(fast, x, mine)
    model(x, theirs)  # freezing runs its example
    turned = mine.t()
    torch._dynamo.mark_static_address(turned)
    for _ in range(2):
        same(frozen(x, turned), model(x, theirs.t()))
        same(frozen(x, mine), model(x, theirs))
        same(mine, theirs)


def test_a_tensor_that_nobody_marked_stays_compiled(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine = torch.zeros(LENGTH, WIDTH, device=device), torch.zeros((), dtype=torch.int64, device=device)
    with pg.counters.expect(replays=0, tapes=0, **{"fallbacks:writes_an_input": 3}):
        check(fast, model, (4, 4, 4), mine, static_cache(device))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_branch_that_writes_an_argument_writes_the_callers(depth: int, device: torch.device) -> None:
    """Of `torch.cond`, also inside of another: no replay would, so there is none."""

    def writing(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 1

    def outer(x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 2, writing, lambda x: x - 1, (x,))

    branch = writing if depth == 1 else outer
    model = compiled(lambda x: ops.mix(torch.cond(x.shape[0] > 3, branch, lambda x: x - 1, (x,))))
    for value in (1.0, 2.0, 3.0):
        x = torch.full((4, WIDTH), value, device=device)
        model(x)
        assert (x == 2 * value).all()


def test_a_branch_that_writes_what_it_made_is_replayed(device: torch.device) -> None:
    def writing(x: Tensor) -> Tensor:
        return (x + 1).mul_(2)

    model = compiled(lambda x: ops.mix(torch.cond(x.shape[0] > 3, writing, lambda x: x - 1, (x,))))
    with pg.counters.expect(replays=2):
        for value in (1.0, 2.0, 3.0):
            x = torch.full((4, WIDTH), value, device=device)
            torch.testing.assert_close(model(x), ops.mix(2 * (x + 1)))
            assert (x == value).all()
