"""Which weights kernels of a captured graph may read before the kernels in front of them are done."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.kernels.early_reads import may_read_early, unwritten

ROWS, COLUMNS = 1024, 4096
seen: list[bool] = []


@torch.library.custom_op("early_reads::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """A linear that notes what a kernel of ours would be told."""
    seen.append(may_read_early([weight]))
    return x @ weight.T


@torch.library.custom_op("early_reads::split", mutates_args=())
def split(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("early_reads::load", mutates_args=("weight",))
def load(x: Tensor, weight: Tensor) -> Tensor:
    """As a layer whose weight is fetched when it is needed."""
    weight.add_(1)
    return x.clone()


product.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
split.register_fake(torch.empty_like)
load.register_fake(lambda x, weight: torch.empty_like(x))


class Model(nn.Module):
    """A product on each side of a splitting op; `change` tells what happens to its weight before."""

    def __init__(self, change: str, device: torch.device) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("weight", torch.ones(8, 8, device=device))
        self.register_buffer("alias", self.weight[:2])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.change == "computed":
            weight = weight * 2
        elif self.change == "written":
            weight.mul_(1)
        elif self.change == "written as another":
            self.alias.mul_(1)
        x = product(x, weight)
        x = load(x, self.weight) if self.change == "written by an op" else split(x)
        return product(x, weight)


for name in ("early_reads::split", "early_reads::load"):
    pg.register_splitting_op(name, capturable=True)


@pytest.fixture
def capturing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where stand-ins are made of what runs, whatever runs is captured."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def while_captured(change: str, full: bool, device: torch.device) -> list[bool]:
    """What the last products of a capture were told."""
    model = Model(change, device)
    compiled = pg.compile(model, compiler="eager", capture_sizes=[4], token_dim={"x": 0})
    with torch.no_grad():
        report = pg.capture(
            compiled,
            lambda tokens: {"x": torch.ones(tokens, 8, device=device)},
            context=lambda tokens: {"full_graph": full},
            progress=False,
        )
    assert [bucket.mode for bucket in report.captured] == ["full" if full else "piecewise"]
    return seen[-2:]


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("full", [False, True])
def test_weights_that_nothing_writes_are_read_early(full: bool, device: torch.device) -> None:
    assert while_captured("none", full, device) == [True, True]


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("change", ["computed", "written", "written as another", "written by an op"])
def test_others_are_not(change: str, full: bool, device: torch.device) -> None:
    assert while_captured(change, full, device) == [False, False]


def test_nothing_is_read_early_outside_of_a_capture(device: torch.device) -> None:
    model = Model("none", device)
    seen.clear()
    with torch.no_grad():
        pg.compile(model, compiler="eager", cuda_graphs="off", token_dim={"x": 0})(
            torch.ones(4, 8, device=device)
        )
    assert seen and not any(seen)


@pytest.mark.usefixtures("capturing")
def test_a_captured_callable_says_what_it_does_not_write(device: torch.device) -> None:
    x, weight, other = (torch.ones(8, 8, device=device) for _ in range(3))
    seen.clear()
    for told in ((), [weight], [weight[2:], other]):
        pg.GraphPool().capture_call(lambda: product(x, weight), device=device, unwritten=told)
        assert seen[-1] == bool(told)
    with unwritten([weight, x], but=[weight[:1]]):
        pg.GraphPool().capture_call(lambda: product(x, weight), device=device)
        assert not seen[-1]


@pytest.mark.usefixtures("capturing")
def test_a_call_captured_in_place_does_too(device: torch.device) -> None:
    for change, expected in (("none", True), ("written by an op", False)):
        compiled = pg.compile(Model(change, device), compiler="eager", token_dim={"x": 0})
        with torch.no_grad():
            pg.capture_in_place(compiled, torch.ones(4, 8, device=device))
        assert seen[-2:] == [expected] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["none", "computed", "written", "loaded"])
def test_a_graph_that_writes_a_weight_reads_what_it_wrote(change: str, device: torch.device) -> None:
    """One row in bf16, which our kernels serve, in a chain of kernels that start early."""
    weight, x = (torch.randn(n, COLUMNS, device=device, dtype=torch.bfloat16) for n in (COLUMNS, 1))
    fresh = torch.randn_like(weight)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", weight.clone())

        def forward(self, x: Tensor, fresh: Tensor) -> Tensor:
            for _ in range(3):
                x = nn.functional.linear(x, fresh) / COLUMNS**0.5
            if change == "written":
                self.weight.mul_(-1)
            elif change == "loaded":
                self.weight.copy_(fresh)
            used = self.weight.abs() + 1 if change == "computed" else self.weight
            return nn.functional.linear(x, used)

    model, wanted = Chain(), Chain()
    compiled = pg.compile(model, capture_sizes=[1], token_dim={"x": 0})
    with torch.no_grad():
        pg.capture(compiled, lambda tokens: {"x": x, "fresh": fresh}, progress=False)
        for _ in range(20):
            model.weight.copy_(weight.normal_())
            wanted.weight.copy_(weight)
            given = fresh.normal_()
            found, right = compiled(x, given).float(), wanted(x, given).float()
            assert (found - right).norm() < 0.02 * right.norm()
