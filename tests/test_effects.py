"""A call has its effects once, whatever is traced, and whichever trace answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import BOTH

pytestmark = pytest.mark.usefixtures("no_grad")


class Counts(nn.Module):
    """Counts calls and adds up its inputs. Above 4 tokens it does something else, so it has two traces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.register_buffer("seen", torch.zeros(8))

    def note(self, x: Tensor) -> None:
        self.calls += 1
        self.seen.add_(x.sum(0))

    def scale(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if x.shape[0] > 4 else 1.0)


@torch.compiler.disable
def note(model: Counts, x: Tensor) -> None:
    model.note(x)


class BeforeABreak(Counts):
    def forward(self, x: Tensor) -> Tensor:
        note(self, x)
        return self.scale(x)


class BehindABreak(Counts):
    def forward(self, x: Tensor) -> Tensor:
        found = self.scale(x)
        note(self, x)
        return found + 1


class Scale(Counts):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)


class InASkippedFrame(Counts):
    """Dynamo skips a frame that breaks in a loop; the inner module is traced alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            self.note(x)
            torch._dynamo.graph_break()
        return self.inner(x)


class NeverTraced(Counts):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        return self.scale(x)


class InAHook(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda model, given: note(model, given[0]))


class InAHookThatIsNotTraced(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(torch.compiler.disable(lambda model, given: model.note(given[0])))


class InTheGraph(Counts):
    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        return self.scale(x)


MODELS = [
    BeforeABreak, BehindABreak, InASkippedFrame, NeverTraced, InAHook, InAHookThatIsNotTraced, InTheGraph,
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("counts", [(3, 5, 3, 4, 5, 1, 2), (1, 5, 1, 3, 5, 2), (6, 3, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_call_has_its_effects_once(
    kind: type[Counts], counts: tuple[int, ...], entry: Callable, device: torch.device
) -> None:
    model = kind().to(device)
    plain = copy.deepcopy(model)
    fast = entry(model)
    for count in counts:
        x = torch.randn(count, 8, device=device)
        torch.testing.assert_close(fast(x), plain(x))
        torch.testing.assert_close(model.seen, plain.seen)
        assert model.calls == plain.calls


@BOTH
def test_a_write_to_a_list_of_one_tensor(entry: Callable[..., Any]) -> None:
    def tripled(x: Tensor) -> Tensor:
        doubled = x * 2
        torch._foreach_mul_([doubled], 3.0)
        return doubled

    fast = entry(tripled)
    for count in (1, 5, 7):
        torch.testing.assert_close(fast(torch.ones(count)), torch.full((count,), 6.0))
