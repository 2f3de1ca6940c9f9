"""For each fallback reason: a model and calls that reach it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from toys import WIDTH, Blocks, define, ops, rows

import piecewise_graph as pg

define(
    "times(Tensor x, float factor) -> Tensor", lambda x, factor: x * factor, lambda x, f: torch.empty_like(x)
)
pg.register_splitting_op("toy::times")


class Counting(nn.Module):
    """Writes a buffer with an op that is not registered."""

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


@dataclass
class Case:
    """What to call, and how many calls fall back for the reason under test.

    Attributes:
        model: makes the model for a device.
        counts: tokens of each call, in order.
        hits: how many calls fall back for the reason; none falls back for another reason.
        around: device -> the context manager around every call.
        calls: (token count, device) -> the arguments of a call.
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


def scaled_and_written(x: Tensor, factor: float) -> Tensor:
    """What reads the factor back cannot be cut out: it makes two views of memory that is written."""
    h = ops.mix(x) * factor
    column = h[:, 0]
    scaled = column * factor
    h.add_(1)
    return h + (column + scaled)[:, None]


CASES = {
    "a_symbolic_float_crosses_a_cut": Case(a(float_of_the_size)),
    "above_max_tokens": Case(lambda d: Blocks().to(d), counts=(9, 8, 8, 20), hits=2),
    "an_effect_crosses_a_cut": Case(a(inference_mode_around_an_op)),
    "autocast": Case(lambda d: Blocks().to(d), around=autocast),
    "autocast_region_crosses_a_cut": Case(a(autocast_around_an_op)),
    # the trace is valid below 6 only, and no bucket below 6 holds 5 tokens
    "bucket_outside_trace": Case(a(branch_at_six), counts=(3, 5, 5), hits=1),
    "changes_a_shape_in_place": Case(a(lambda x: ops.mix(x * 2).t_().flip(1).t())),
    "cuda_graphs_off": Case(lambda d: Blocks().to(d), options={"cuda_graphs": "off"}),
    # a Python float that changes becomes a tensor that is read back to the host; two calls have it fixed
    "data_dependent": Case(a(scaled_and_written), calls=scalar_changes, hits=2, counts=(3, 4, 5, 6)),
    "derived_size": Case(a(doubled_tokens), counts=(3, 3, 4, 4), hits=1),  # then 3 has its own graphs
    "grad_enabled": Case(lambda d: Blocks().to(d), around=lambda d: torch.enable_grad()),
    "grad_enabled_inside": Case(a(grad_inside)),
    # the same on a GPU, where that tensor is on the CPU
    "lazy_conjugate": Case(a(lambda x: ops.mix(torch.complex(x, x).conj().imag))),
    "mixed_devices": Case(a(scaled_and_written), calls=scalar_changes, hits=2, counts=(3, 4, 5, 6)),
    "mixes_tokens": Case(a(mean_and_views), counts=(3, 3, 4, 4), hits=1, options={"padding": "tried"}),
    "no_padding_proof": Case(a(lambda x: x.flip(0)), counts=(3, 3, 4, 4), hits=1),
    "not_captured": Case(lambda d: Blocks().to(d), options={"capture": "explicit"}),
    "no_tokens": Case(lambda d: Blocks().to(d), counts=(0, 3, 0), hits=2),
    "not_traced_by_dynamo": Case(a(break_first)),
    "over_budget": Case(lambda d: Blocks().to(d), options={"max_graph_bytes": 1}),
    "random_numbers": Case(a(lambda x: ops.mix(x) + nn.functional.dropout(x, 0.5) * 0)),
    "splitting_op_inside_higher_order_op": Case(a(hidden_op)),
    "tensor_subclass": Case(lambda d: Blocks().to(d), calls=two_tensor),
    "writes_an_input": Case(a(lambda x: ops.mix(x.mul_(1)) + 1)),
    "writes_static_input": Case(lambda d: Cache().to(d), counts=(3, 3, 4, 4), hits=1),
}
# Reached by tests of their own below, or where their mechanism is tested.
ELSEWHERE = {
    "a_tuple_crosses_a_cut",
    "capture_failed",
    "captured_by_caller",
    "data_dependent_size",
    "generate_not_compiled",
    "nested_forward",
    "no_token_dimension",
    "number_varies",
    "op_not_capturable",
    "overlapping_memory",
    "padding_unproven",
    "proof_failed",
    "ranks_differ",
    "reads_beyond_a_view",
    "size_is_a_number",
    "second_dynamic_dimension",
    "returns_a_view",
}
GPU_ONLY = {"mixed_devices", "captured_by_caller"}
CPU_ONLY = {"data_dependent"}  # with a GPU the float that became a tensor makes it mixed_devices
