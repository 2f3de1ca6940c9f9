"""What crosses a cut of a Dynamo graph, and what must not, compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import Tensor, nn
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


# --- sizes --------------------------------------------------------------------------------------------


def test_torch_size_taken_before_an_op_is_used_after_it(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        size = x.size()
        return ops.mix(x * 2).view(size[0], 2, -1).sum(1).view(size[0], size[1] // 2) + 1

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_whole_torch_size_crosses_a_cut(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        size = x.size()
        return ops.mix((x * 2).flatten()[: x.shape[0] * WIDTH].view(size)).reshape(size) + x.new_ones(size)

    check(model, device, expect={"traces": 1, "replays": REPLAYS})


def test_half_of_the_token_count_crosses_a_cut(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return ops.mix(x + 1) * half  # depends on the size, so this segment is not padded

    fast = check(model, device, expect={"traces": 1, "unpadded_segments": REPLAYS * 1})
    assert "aten::mul (size as a number)" in str(pg.explain(fast))


def test_integer_results_are_computed_for_the_live_count(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, int, int]:
        return ops.mix(x * 2) + 1, x.shape[0], x.shape[0] * 2 + 1

    check(model, device, expect={"replays": REPLAYS})


# --- tuples -------------------------------------------------------------------------------------------


def test_elements_of_a_chunk_cross_a_cut(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (x * 2).chunk(2, dim=1)
        mixed = ops.mix(left.contiguous())
        return mixed + right, left

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_strided_element_goes_straight_into_an_op(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        left, right = torch.split(x * 2, [3, WIDTH - 3], dim=1)
        return ops.mix(right)[:, :3] + left

    check(model, device, expect=counts_of(segments=2, op_steps=1))


@pytest.mark.parametrize("used", [(0, 1), (1,), (0,)])
def test_elements_of_a_tuple_that_an_op_returned(used: tuple[int, ...], device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        pair = ops.mix_pair(x * 2)
        return sum((pair[i] * (i + 1) for i in used), torch.zeros_like(x))

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_op_takes_a_list_of_tensors_from_two_segments(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        early = x * 2
        return ops.mix_list([early, ops.mix(early) + 1]) - 1

    check(model, device, expect=counts_of(segments=3, op_steps=2))


def test_element_read_far_from_its_tuple(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        parts = (x * 2).unbind(1)
        mixed = ops.mix(parts[0].unsqueeze(1).expand(-1, WIDTH).contiguous())
        return ops.mix(mixed + 1) + parts[WIDTH - 1].unsqueeze(1)

    check(model, device, expect=counts_of(segments=3, op_steps=2))


# --- modes --------------------------------------------------------------------------------------------


def test_autocast_region_inside_one_segment_stays_in_force(device: torch.device) -> None:
    weight = torch.randn(WIDTH, WIDTH, device=device)

    def model(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            low = x @ weight
        assert low.dtype == torch.bfloat16
        return ops.mix(low.float()) + 1

    check(model, device, expect=counts_of(segments=2, op_steps=1))


def test_autocast_region_around_an_op_keeps_the_graph_whole(device: torch.device) -> None:
    weight = torch.randn(WIDTH, WIDTH, device=device)

    def model(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            low = ops.mix(x) @ weight
        return low.float() + 1

    fast = check(model, device, expect={"fallbacks": len(COUNTS)})
    assert fallbacks(fast) == {"autocast_region_crosses_a_cut": len(COUNTS)}


def test_grad_switches_around_an_op_do_not_cut_more(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * 2
        with torch.no_grad():
            x = ops.mix(x)
        return x + 1

    check(model, device, expect={"segments": 2, "op_steps": 1, "replays": REPLAYS})


# --- constants and weights ----------------------------------------------------------------------------


def test_tensor_constants_and_globals_are_bound_not_copied_in(device: torch.device) -> None:
    held = torch.arange(float(WIDTH), device=device)

    def model(x: Tensor) -> Tensor:
        made = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], device=x.device)
        return ops.mix(x * made) + held

    # torch.tensor copies from the host, which no capture allows: on a GPU it is cut out after the first one
    is_cpu = device.type == "cpu"
    steps = {"segments": 2, "op_steps": 1} if is_cpu else {}
    check(model, device, expect={**steps, "replays": REPLAYS if is_cpu else REPLAYS - 1})


def test_weights_are_read_where_they_are(device: torch.device) -> None:
    """A copied weight would show as buffer bytes and miss in-place updates."""
    model = Blocks(2, width=64).to(device)
    fast = compiled(model)
    x = rows(3, device, 64)
    fast(x), fast(x)
    model.linears[0].weight.mul_(-2)
    torch.testing.assert_close(fast(x), model(x))
    weight_bytes = sum(p.nbytes for p in model.parameters())
    # one input, and one bridge buffer per mix: 3 buffers of at most 8 x 64 floats
    assert 0 < pg.explain(fast).buffer_bytes <= 3 * 8 * 64 * 4 < weight_bytes


# --- small programs at random -------------------------------------------------------------------------

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "double": lambda x: x * 2,
    "in place": lambda x: (x * 1).add_(1),
    "transposed view": lambda x: x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH),
    "slice": lambda x: torch.cat([x[:, 4:], x[:, :4]], 1),
    "chunk": lambda x: torch.cat(list(x.chunk(2, dim=1))[::-1], 1),
    "mix": ops.mix,
    "mix twice": lambda x: ops.mix(ops.mix(x)),
    "pair": lambda x: ops.mix_pair(x)[1],
    "strided": ops.mix_strided,
    "cumsum": lambda x: x.cumsum(0),
    "divide by T": lambda x: x / x.shape[0],
}


def mixed_out(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    ops.mix_out(x, out)
    return out


def halved_view(x: Tensor) -> Tensor:
    y = x * 1
    ops.halve(y[:, 2:])
    return y


UNARY |= {"mix out": mixed_out, "halved view": halved_view}


class Chain(nn.Module):
    """Steps by name; a number adds the value of so many steps before, "linear" is a new layer."""

    def __init__(self, steps: list[str | int]) -> None:
        super().__init__()
        self.steps = steps
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for step in steps if step == "linear")

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        values, used = [x * 1], 0
        for step in self.steps:
            last = values[-1]
            if isinstance(step, int):
                values.append(last + values[max(len(values) - 1 - step, 0)])
            elif step == "linear":
                values.append(self.linears[used](last))
                used += 1
            else:
                values.append(UNARY[step](last))
        return values[-1], values[len(values) // 2]


STEPS = st.one_of(st.sampled_from([*UNARY, "linear"]), st.integers(1, 4))


@settings(
    max_examples=15,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=8), counts=st.lists(st.integers(1, 9), min_size=3, max_size=5)
)
def test_random_programs_give_eagers_result(steps: list[str | int], counts: list[int]) -> None:
    torch._dynamo.reset()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check(Chain(steps).to(device), device, counts=counts, expect={"traces": 1})
