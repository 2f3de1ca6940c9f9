"""Segments that write in place what other segments made, or views of it, and what others see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from toys import WIDTH, assert_same, compiled, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
Model = Callable[[Tensor], Any]
CALLS = (4, 3, 4, 8, 8, 5, 3, 3)


def assert_right(model: Model, compiler: str, device: torch.device, calls: tuple[int, ...] = CALLS) -> Any:
    fast = compiled(model, compiler=compiler)
    for count in calls:
        x = rows(count, device)
        found, wanted = fast(x), model(x)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    return fast


def _norm(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 3)


def _scale(x: Tensor) -> None:
    x.mul_(3)


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    """Ops of the user's that return nothing, as vLLM's norms and rotary embedding are."""
    with torch.library._scoped_library("own", "FRAGMENT") as library:
        for schema, run in (
            ("norm(Tensor x, Tensor(a!) out) -> ()", _norm),
            ("scale(Tensor(a!) x) -> ()", _scale),
        ):
            name = schema.partition("(")[0]
            library.define(schema)
            library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"own::{name}", lambda *_: None, lib=library)
        pg.register_padding_rule("own::norm", rows={"x": 0, "out": 0})
        pg.register_padding_rule("own::scale", rows={"x": 0})
        yield torch.ops.own


def by_norm(x: Tensor) -> tuple[Tensor, ...]:
    h = ops.mix(x + 1)
    out = torch.empty_like(h)
    torch.ops.own.norm(h, out)
    return (ops.mix(out) * 2,)


def by_scale(x: Tensor) -> tuple[Tensor, ...]:
    h = ops.mix(x + 1)
    torch.ops.own.scale(h)
    return (ops.mix(h) * 2,)


def by_foreach(x: Tensor) -> tuple[Tensor, ...]:
    """A result of T + 1 rows: sizes that return have graphs, in which every segment is one."""
    h = ops.mix(x + 1)
    torch._foreach_mul_([h], 3.0)
    y = ops.mix(h) * 2
    return (torch.cat([y, y[:1]]),)


@pytest.mark.filterwarnings("ignore::piecewise_graph.errors.LeakWarning")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("model", [by_norm, by_scale, by_foreach])
def test_a_segment_of_ops_that_return_nothing_is_replayed(
    model: Model, compiler: str, own: Any, device: torch.device
) -> None:
    fast = assert_right(model, compiler, device, (4, 3, 4, 4, 3, 3, 8, 8, 8))
    assert all(bucket.replays for bucket in pg.explain(fast).traces[-1].buckets)


def heads_returned(x: Tensor) -> tuple[Tensor, ...]:
    x = x * 1.5
    q = x[:, :4]
    p = ops.mix(x)
    h = q.view(x.shape[0], 2, 2)
    h.mul_(0.4)
    return p, h


def heads(x: Tensor) -> tuple[Tensor, ...]:
    p, h = heads_returned(x)
    return ops.mix(p), h * 1


def split_heads(x: Tensor) -> tuple[Tensor, ...]:
    q, _, v = x.repeat(1, 3).split(WIDTH, -1)
    g = ops.mix(v)
    q = q.view(*q.shape[:-1], 2, 4)
    q.mul_(0.5)
    return (ops.mix(g) + q.flatten(1),)


def expanded(x: Tensor) -> tuple[Tensor, ...]:
    h = x.tanh()
    e = h.expand(2, *h.shape)
    p = ops.mix(x)
    e[1].mul_(0.5)
    return h, ops.mix(p)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("model", [heads, heads_returned, split_heads, expanded])
def test_a_segment_writes_a_view_that_is_not_dense(model: Model, compiler: str, device: torch.device) -> None:
    fast = assert_right(model, compiler, device)
    assert "is not compiled: it writes views" in str(pg.explain(fast))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_an_unpadded_segment_writes_what_two_inputs_share_in_strides_of_the_count(
    compiler: str, device: torch.device
) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        z = x.transpose(0, 1).contiguous().transpose(0, 1).T.contiguous()
        flat = z.squeeze().reshape(-1, 2, 4)  # a view
        z.expand(1, *z.shape)[0].add_(0.05)
        return torch.tanh(y.narrow(-1, 0, 4).transpose(0, 1)), flat * 1

    fast = compiled(model, compiler=compiler, capture_sizes=[4, 16], max_tokens=16)
    for count in (3, 4, 5, 16, 3, 3):
        x = rows(count, device)
        for one, other in zip(fast(x), model(x), strict=True):
            assert_same(one, other)


def test_an_unpadded_segment_is_laid_out_what_it_does_not_write(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        y, h = x * 2, (x * 3).view(-1, 2, 4).transpose(0, 1).contiguous()
        z = y[:, :4]
        p = ops.mix(x)
        y.mul_(z.mean() + h.view(-1).mean())
        return ops.mix(p), y + 0

    fast = assert_right(model, "aot_eager", device)
    assert pg.explain(fast).traces[0].exact_only is None


def test_a_guard_that_divides_by_nothing_at_a_bucket_is_not_met_there(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return (x[2:].reshape(x.shape[0] - 2, -1, 4) + 0,)

    fast = compiled(model, capture_sizes=[1, 2, 4, 8])
    for count in (5, 3, 8, 3):
        x = rows(count, device)
        assert_same(fast(x)[0], model(x)[0])


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "the last": lambda a: a[-1],
    "the last two": lambda a: a[-2:],
    "in the middle": lambda a: a[a.shape[0] // 2],
    "the last of a column": lambda a: a.select(1, 0)[-1:],
}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_row_of_zeros_that_is_counted_from_the_end(
    place: Callable[[Tensor], Tensor], compiler: str, device: torch.device
) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        marks = torch.zeros_like(x)
        place(marks).add_(x[0, 0])
        return (ops.mix(x + marks),)

    fast = compiled(model, compiler=compiler)
    for count in (3, 5):  # nothing differs at the calls that capture
        fast(torch.zeros(count, WIDTH, device=device))
    for count in (3, 5, 7, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_rows_that_are_written_through_a_view_that_begins_a_row_earlier(
    compiler: str, device: torch.device
) -> None:
    """The last row of the later view is no row of the earlier one: at a bucket it is, one of the tail."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        marks = (ops.mix(x) > 0).float()
        all_rows = torch.cat([marks[:1] * 0, marks * 0])
        later = all_rows[1:]
        all_rows[:-1].add_(marks)
        return (ops.mix(later * 1),)

    fast = compiled(model, compiler=compiler)
    for count in (3, 8, 5):  # nothing differs at the calls that capture
        fast(torch.zeros(count, WIDTH, device=device))
    for count in (8, 5, 7, 3, 8, 5):
        x = rows(count, device)
        assert_same(fast(x), model(x))


VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda a: a[:, :4],
    lambda a: a.view(a.shape),
    lambda a: a.reshape(a.shape[0], 2, -1),
    lambda a: a.transpose(0, -1).contiguous().transpose(0, -1),
    lambda a: a.flatten(1),
    lambda a: a[:1],
    lambda a: a.expand(2, *a.shape)[1],
    lambda a: a * 1,
    lambda a: a.clone(),
)
WRITES: tuple[Callable[[Tensor], Any], ...] = (
    lambda a: a.mul_(0.7),
    lambda a: a[:1].add_(0.3),
    lambda a: a[..., 0].fill_(0.25),
    lambda a: a.reshape(-1).mul_(0.8),
    lambda a: a.contiguous().add_(0.2),
    lambda a: torch._foreach_mul_([a], 0.9),
    ops.halve,
)
STATEMENTS = st.tuples(
    st.sampled_from(["view", "view", "write", "op"]), st.integers(0, 99), st.integers(0, 99)
)


@settings(max_examples=30)
@given(st.lists(STATEMENTS, min_size=4, max_size=9), st.permutations([1, 2, 3, 4, 8, 3, 1, 5]))
def test_random_programs_of_views_writes_and_ops(
    statements: list[tuple[str, int, int]], counts: list[int]
) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        made = [x * 1.5]
        for kind, which, function in statements:
            given = made[which % len(made)]
            if kind == "view":
                made.append(VIEWS[function % len(VIEWS)](given))
            elif kind == "write":
                WRITES[function % len(WRITES)](given)
            else:
                made.append(ops.mix(given))
        return tuple(each + 0 for each in made)

    torch._dynamo.reset()
    assert_right(model, "aot_eager", torch.device("cpu"), tuple(counts))
