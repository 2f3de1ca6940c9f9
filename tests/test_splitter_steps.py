"""Writes across cuts, and the steps of a split graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toys import (
    COUNTS,
    REPLAYS,
    WIDTH,
    Blocks,
    check,
    compiled,
    counts_of,
    fallbacks,
    ops,
    rows,
)

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


# --- writes -------------------------------------------------------------------------------------------


def test_in_place_ops_on_a_value_of_an_earlier_segment(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        z = ops.mix(y)
        y.add_(1)
        y[:, :2] = z[:, :2]
        return y + z

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_segment_that_only_writes_is_not_dropped(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        z = ops.mix(y)
        y.add_(1)  # the result is not read
        return y + ops.mix(z)

    check(model, device, expect=counts_of(segments=3, op_steps=2))


def test_bridge_buffer_written_in_place_by_a_later_segment(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        z = ops.mix(x * 2)
        z.mul_(3)
        return ops.mix(z + 1) + z

    check(model, device, expect=counts_of(segments=3, op_steps=2))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_two_inputs_of_one_storage_of_which_one_is_written(compiler: str, device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        view = y[:, 2:]
        z = ops.mix(y)
        y.add_(1)
        return view + z[:, 2:]

    padded = counts_of(segments=2, op_steps=1)  # the write is cut out of the second
    expect = padded | {"segments": 3, "unpadded_segments": REPLAYS}
    check(model, device, compiler=compiler, expect=expect)


def test_op_writes_a_view_whose_base_is_read_later(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        ops.halve(y[:, :4])
        return y + 1

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_op_writes_a_base_whose_view_is_read_later(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        view = y.view(-1, 2, WIDTH // 2)[:, 1]
        ops.halve(y)
        return view + 1

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_op_that_writes_the_callers_tensor_reaches_it(device: torch.device) -> None:
    """A write to an activation reaches the caller: written back, or done by a call without a tape."""

    def model(x: Tensor) -> Tensor:
        ops.halve(x)
        return x + 1

    fast = compiled(model)
    for count in COUNTS:
        x = rows(count, device)
        mine, wanted = x.clone(), x * 0.5 + 1
        torch.testing.assert_close(fast(mine), wanted)
        torch.testing.assert_close(mine, x * 0.5)


def test_cache_that_is_an_argument_of_forward_is_written_by_every_call(device: torch.device) -> None:
    """Op writes must reach a KV cache that is an argument without a token dimension."""

    def model(x: Tensor, cache: Tensor) -> Tensor:
        y = x * 2
        ops.append(y, cache)
        return y + cache

    fast = compiled(model)
    cache, wanted = torch.zeros(WIDTH, device=device), torch.zeros(WIDTH, device=device)
    for count in COUNTS:
        x = rows(count, device)
        wanted += (x * 2).sum(0)
        torch.testing.assert_close(fast(x, cache), x * 2 + wanted)
        torch.testing.assert_close(cache, wanted)


# --- steps --------------------------------------------------------------------------------------------


def test_adjacent_ops_merge_into_one_step(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a = ops.mix(x * 2)
        b = ops.mix(a)
        return a + b

    fast = check(model, device, expect=counts_of(segments=2, op_steps=1))
    assert pg.explain(fast).traces[0].splitting_ops == {"toy::mix": 2}


def test_allocation_between_ops_is_made_once_without_a_graph(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a = ops.mix(x * 2)
        out = torch.empty_like(a)
        ops.mix_out(a, out)
        return out + 1

    check(model, device, expect=counts_of(segments=2, op_steps=2, inline=1))


def test_views_between_ops_are_made_once_without_a_graph(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a = ops.mix(x * 2)
        b = ops.mix(a.view(-1, 2, WIDTH // 2).transpose(1, 2))
        return b.transpose(1, 2).reshape(-1, WIDTH) + 1

    check(model, device, expect=counts_of(segments=2, op_steps=2, inline=1))


def test_op_inside_a_higher_order_op_keeps_the_graph_whole(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 3, ops.mix, lambda t: t + 1, (x * 2,))

    fast = check(model, device, counts=(3, 3, 9))
    assert fallbacks(fast) == {"splitting_op_inside_higher_order_op": 3}


def test_op_two_levels_deep_in_higher_order_ops_keeps_the_graph_whole(device: torch.device) -> None:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 5, ops.mix, lambda t: t - 1, (x * 2,))

    def model(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 3, inner, lambda t: t + 1, (x * 2,))

    fast = check(model, device, counts=(3, 3, 9))
    assert fallbacks(fast) == {"splitting_op_inside_higher_order_op": 3}


def test_graph_without_a_splitting_op_is_one_segment(device: torch.device) -> None:
    check(lambda x: x * 2 + 1, device, expect=counts_of(segments=1, op_steps=0))


def test_graph_that_is_nothing_but_an_op(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return ops.mix(x)

    check(model, device, expect=counts_of(segments=0, op_steps=1))


def test_argument_handed_back_is_the_callers_own(device: torch.device) -> None:
    fast = compiled(lambda x: (ops.mix(x * 2), x))
    for count in (3, 3, 9):
        x = rows(count, device)
        assert fast(x)[1] is x


def test_same_tensor_returned_twice(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor, None]:
        y = ops.mix(x * 2)
        return y, y, None

    check(model, device, expect={"replays": REPLAYS})


def test_layers_times_ops_gives_layers_plus_one_segments(device: torch.device) -> None:
    layers = 5
    check(Blocks(layers).to(device), device, expect=counts_of(segments=layers + 1, op_steps=layers))
