"""Which weights kernels of a captured graph may read before the kernels in front of them are done."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.kernels import early_reads
from piecewise_graph.kernels.early_reads import may_read_early, unwritten

COLUMNS = 4096  # of a weight that our kernels serve, and its rows
CHANGES = ["written", "written as another", "written as another storage", "written by an op"]
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


@torch.library.custom_op("early_reads::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    """As attention, which reads a table of the forward context."""
    seen.append(may_read_early([pg.get_forward_context().batch.table]))
    return x.clone()


@torch.library.custom_op("early_reads::fill", mutates_args=("table",))
def fill(x: Tensor, table: Tensor) -> Tensor:
    table.add_(1)
    return x.clone()


product.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))
split.register_fake(torch.empty_like)
load.register_fake(lambda x, weight: torch.empty_like(x))
look.register_fake(torch.empty_like)
fill.register_fake(lambda x, table: torch.empty_like(x))


def _writing(x: Tensor, weight: Tensor) -> Tensor:
    weight.mul_(1)
    return x + 1


def _reading(x: Tensor, weight: Tensor) -> Tensor:
    return x - 1


class Model(nn.Module):
    """A product on each side of a splitting op; `change` tells what happens to its weight before."""

    def __init__(self, change: str, device: torch.device) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("weight", torch.ones(8, 8, device=device))
        self.register_buffer("alias", self.weight[:2])
        self.register_buffer("same_memory", torch.from_dlpack(self.weight[1:]))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.change == "computed":
            weight = weight * 2
        elif self.change == "written":
            weight.mul_(1)
        elif self.change == "written as another":
            self.alias.mul_(1)
        elif self.change == "written as another storage":
            self.same_memory.mul_(1)
        elif self.change == "written in a branch":
            x = torch.cond(x.shape[0] > 3, _writing, _reading, (x, weight))
        x = product(x, weight)
        x = load(x, self.weight) if self.change == "written by an op" else split(x)
        return product(x, weight)


class Batch:
    """Of the forward context: a table of which it says that nothing writes it."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def unwritten_in_forward(self) -> tuple[Tensor, ...]:
        return (self.table,)


for name in ("early_reads::split", "early_reads::load", "early_reads::look"):
    pg.register_splitting_op(name, capturable=True)


@pytest.fixture
def capturing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where stand-ins are made of what runs, whatever runs is captured."""
    if device.type == "cpu":
        monkeypatch.setattr(early_reads, "_is_capturing", lambda: True)


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
@pytest.mark.parametrize("change", [*CHANGES, "computed"])
def test_others_are_not(change: str, full: bool, device: torch.device) -> None:
    assert while_captured(change, full, device) == [False, False]


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("kind", ["full", "piecewise", "written", "in place", "written in place"])
def test_a_full_graph_reads_what_its_context_says_early(kind: str, device: torch.device) -> None:
    """Unless the model writes it. Between graphs an op reads what kernels in front of it may write."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(4, device=device))

        def forward(self, x: Tensor) -> Tensor:
            return look(fill(x, self.table) if "written" in kind else x * 2) + 1

    model = Looking()
    batch, full = Batch(model.table), kind != "piecewise"
    compiled = pg.compile(model, compiler="eager", capture_sizes=[4], token_dim={"x": 0})
    if "in place" in kind:
        with torch.no_grad(), pg.forward_context(batch=batch):
            pg.capture_in_place(compiled, torch.ones(4, 8, device=device))
        assert seen[-1] == (kind == "in place")
        return
    with torch.no_grad():
        report = pg.capture(
            compiled,
            lambda tokens: {"x": torch.ones(tokens, 8, device=device)},
            context=lambda tokens: {"batch": batch, "full_graph": full},
            progress=False,
        )
    assert [bucket.mode for bucket in report.captured] == ["full" if full else "piecewise"]
    assert seen[-1] == (kind == "full")


def test_nothing_is_read_early_outside_of_a_capture(device: torch.device) -> None:
    weight = torch.ones(8, 8, device=device)
    with unwritten([weight]):
        assert not may_read_early([weight])


@pytest.mark.usefixtures("capturing")
def test_a_captured_callable_says_what_it_does_not_write(device: torch.device) -> None:
    x, weight, other = (torch.ones(8, 8, device=device) for _ in range(3))

    def told(*named: Tensor) -> bool:
        pg.GraphPool().capture_call(lambda: product(x, weight), device=device, unwritten=named)
        return seen[-1]

    assert told(weight) and told(weight[2:], other) and not told() and not told(other)
    with unwritten([weight]):
        assert not told()  # whoever captures it does not know what it writes


@pytest.mark.usefixtures("capturing")
def test_all_of_a_kernels_weights_have_to_be_unwritten(device: torch.device) -> None:
    one, two, empty = (torch.ones(n, 8, device=device) for n in (8, 8, 0))

    def told(*weights: Tensor) -> tuple[bool, bool]:
        """What a kernel that reads them is told where both are unwritten, and where the first one is."""
        found = list[bool]()

        def captured(*given: Tensor) -> bool:
            pg.GraphPool().capture_call(
                lambda: found.append(may_read_early(weights)), device=device, unwritten=given
            )
            return found[-1]

        return captured(one, two, empty), captured(one, empty)

    assert told(one) == (True, True) and told(one, two) == (True, False) == told(two)
    assert told(empty) == (False, False) == told(one, empty)  # there is nothing to read


@pytest.mark.usefixtures("capturing")
def test_what_was_said_ends_with_the_capture(device: torch.device) -> None:
    weight = torch.ones(8, 8, device=device)
    with pytest.raises(RuntimeError, match="broken"), unwritten([weight]):
        raise RuntimeError("broken")
    pg.GraphPool().capture_call(lambda: product(weight, weight), device=device)
    assert not seen[-1]


@pytest.mark.usefixtures("capturing")
@pytest.mark.parametrize("change", ["none", *CHANGES, "written in a branch"])
def test_a_call_captured_in_place_says_it_too(change: str, device: torch.device) -> None:
    compiled = pg.compile(Model(change, device), compiler="eager", token_dim={"x": 0})
    with torch.no_grad():
        pg.capture_in_place(compiled, torch.ones(4, 8, device=device))
    assert seen[-2:] == [change == "none"] * 2


@pytest.mark.usefixtures("capturing")
def test_an_argument_may_lie_in_a_weight(device: torch.device) -> None:
    """Of a call captured in place, which writes it where it is."""

    class Writing(Model):
        def forward(self, x: Tensor, scratch: Tensor) -> Tensor:  # type: ignore[override]
            scratch.mul_(1)
            return product(x, self.weight)

    model, x = Writing("none", device), torch.ones(4, 8, device=device)
    compiled = pg.compile(model, compiler="eager", token_dim={"x": 0})
    with torch.no_grad():
        for scratch, expected in ((torch.ones(2, 8, device=device), True), (model.weight[:2], False)):
            pg.capture_in_place(compiled, x, scratch)
            assert seen[-1] == expected


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
