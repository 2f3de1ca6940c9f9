"""Parts of a model on another device than its graphs: they run there, between the graphs.

On a CPU the device `meta` is the other one. Nothing is computed there; what is cut out shows all the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_uncapturable_ops import reads_host
from torch import Tensor, nn
from toys import REPLAYS, WIDTH, assert_same, check, compiled, counts_of, fallbacks, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import TraceError
from piecewise_graph.kernels.copies import bind_copy

pytestmark = pytest.mark.usefixtures("no_grad")


class Beside(nn.Module):
    """A linear on the other device, between two on the device of the input."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.far = nn.Linear(WIDTH, WIDTH, device=other)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        near = self.first(x).relu()
        far = self.far(torch.ones_like(x, device=self.far.weight.device)).relu()
        return ops.mix(self.last(near)), far


def test_a_part_elsewhere_is_cut_out_and_the_rest_is_replayed() -> None:
    """Segments: before, the part, after; then the op. Two of the three are captured, per bucket."""
    cpu = torch.device("cpu")
    wanted = counts_of(segments=2, op_steps=1) | {"segments": 3, "unpadded_segments": REPLAYS}
    fast = check(Beside("meta"), cpu, expect=wanted | {"unpadded_segments:mixed_devices": REPLAYS})
    told = str(pg.explain(fast))
    assert "aten::addmm (runs on meta)" in told
    assert fallbacks(fast) == {"above_max_tokens": 1}


def test_results_lie_where_the_model_leaves_them() -> None:
    fast = compiled(Beside("meta"))
    for count in (3, 3, 8):
        near, far = fast(rows(count, torch.device("cpu")))
        assert near.device.type == "cpu"
        assert (far.device.type, far.shape) == ("meta", (count, WIDTH))


def test_an_argument_elsewhere_is_copied_there() -> None:
    weight = torch.randn(WIDTH)

    def model(x: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        torch._check(x.shape[0] == far.shape[0])
        return ops.mix(x * weight), far.to("meta") * 2  # it is there already: nothing runs

    fast = compiled(model, token_dim={"x": 0, "far": 0})
    with pg.counters.expect(tapes=1, replays=2, fallbacks=0):
        for count in (3, 4, 2):
            x, far = rows(count, torch.device("cpu")), torch.empty(count, WIDTH, device="meta")
            near, beyond = fast(x, far)
            assert_same(near, model(x, far)[0])
            assert beyond.shape == (count, WIDTH)


def test_a_part_elsewhere_is_not_put_into_a_full_graph() -> None:
    fast = compiled(Beside("meta"))
    x = rows(3, torch.device("cpu"))
    fast(x)
    with (
        pg.counters.expect(**{"full_replays": 0, "not_full": 1, "not_full:op_not_capturable": 1}),
        pg.forward_context(full_graph=True),
    ):
        fast(x)
    model = Beside("meta")
    whole = compiled(lambda x: (model.first(x), model.far(torch.ones_like(x, device="meta"))))
    whole(x)
    with (
        pg.counters.expect(**{"full_replays": 0, "not_full:mixed_devices": 1}),
        pg.forward_context(full_graph=True),
    ):
        whole(x)


def test_the_same_part_in_a_model_that_lies_there_as_a_whole_is_not_taken_for_it() -> None:
    """Equal segments share code and facts; what no graph can hold depends on where the graphs run."""
    near = Beside("cpu")
    x = rows(3, torch.device("cpu"))
    for model in (near, Beside("meta"), near):
        fast = compiled(model)
        uncaptured = 0 if model is near else 1
        fast(x)
        with pg.counters.expect(replays=1, unpadded_segments=uncaptured):
            fast(x)


# --- on a GPU, with a part on the CPU -------------------------------------------------------------------


class Offloaded(nn.Module):
    """An embedding and a linear that stay on the CPU, as offloaded weights do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
        self.far, self.scale = nn.Linear(WIDTH, WIDTH), torch.tensor(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.first(self.table(ids.cpu()).to(self.first.weight.device))
        h = ops.mix(h)
        h = h + self.far(h.cpu()).to(h.device)
        return self.last(h) * self.scale


def ids_on(device: torch.device) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(32, (count,), device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["cpu", "cuda"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_parts_on_the_cpu_run_there(given: str, compiler: str, device: torch.device) -> None:
    model, some_ids = Offloaded(device), ids_on(torch.device(given))
    fast = compiled(model, token_dim={"ids": 0}, compiler=compiler)
    with pg.counters.expect(traces=1, tapes=2, failed_captures=0, fallbacks=0, replays=6):
        for count in (3, 8, 4, 1, 5, 7, 2, 8):
            ids = some_ids(count)
            assert_same(fast(ids), model(ids))


@pytest.mark.gpu
def test_a_number_on_the_host_that_changes_in_place_is_read_anew(device: torch.device) -> None:
    model, some_ids = Offloaded(device), ids_on(device)
    fast = compiled(model, token_dim={"ids": 0})
    for factor in (0.5, 2.0, -1.0, 3.0):
        model.scale.fill_(factor)
        ids = some_ids(4)
        assert_same(fast(ids), model(ids))


@pytest.mark.gpu
def test_a_frozen_call_with_parts_on_the_cpu(device: torch.device) -> None:
    model, some_ids = Offloaded(device), ids_on(torch.device("cpu"))
    step = pg.freeze(compiled(model, token_dim={"ids": 0}), some_ids(4))
    for count in (3, 4, 2, 8, 3):
        ids = some_ids(count)
        assert_same(step(ids), model(ids))


# --- numbers on the host --------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A number that the forward makes is read on both sides of an op; with `written`, also written."""

    def __init__(self, device: torch.device, written: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(3))
        self.written = written

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        step = torch.tensor(0.5)
        first, second, last = self.linears
        h = ops.mix(first(x) * step)
        if self.written:
            step.add_(1)
        h = ops.mix(second(h) * step)
        if self.written:
            step.add_(1)
        return last(h) * step, step * 2


def test_each_segment_makes_a_literal_for_itself(device: torch.device) -> None:
    """On a GPU, too, where it would otherwise be a number on another device; what is returned is cut out."""
    model = Scaled(device, written=False)
    fast = compiled(lambda x: model(x)[0])
    with pg.counters.expect(captures=2 * 3, unpadded_segments=0, replays=2, fallbacks=0):
        for count in (3, 8, 4, 5):
            x = rows(count, device)
            assert_same(fast(x), model(x)[0])


@pytest.mark.parametrize("written", [False, True])
def test_a_number_that_is_written_begins_anew_in_every_call(written: bool, device: torch.device) -> None:
    model = Scaled(device, written)
    fast = compiled(model)
    for count in (3, 3, 4, 2, 8, 5, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))
    with pg.counters.expect(replays=1, fallbacks=0):
        fast(rows(3, device))


def test_the_host_is_one_device_whatever_its_index() -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    fast = compiled(lambda x: ops.mix(linear(x)).to("cpu:0") + 1)
    with pg.counters.expect(unpadded_segments=0, replays=2):
        for _ in range(3):
            fast(rows(3, torch.device("cpu")))


def test_reasons_are_those_of_each_segment() -> None:
    near, far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, device="meta")

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        h = reads_host(near(x).relu())
        return ops.mix(h * 2) + 1, far(torch.ones_like(x, device="meta"))

    fast = compiled(model)
    wanted = {"unpadded_segments:data_dependent": 1, "unpadded_segments:mixed_devices": 1}
    fast(rows(3, torch.device("cpu")))
    with pg.counters.expect(replays=1, **wanted):
        fast(rows(3, torch.device("cpu")))


def test_errors_do_not_speak_of_one_device_where_weights_lie_on_two() -> None:
    with pytest.raises(TraceError, match="could not be traced with inputs x"):
        compiled(Beside("meta"))(torch.randn(3, WIDTH + 1))


def test_copies_into_buffers_of_several_gpus_are_made_one_by_one() -> None:
    views = [torch.zeros(4), torch.empty(4, device="meta")]
    assert bind_copy(views) is None
