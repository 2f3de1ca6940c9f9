"""Each distinct structure is compiled once, and exceptions of torch's control flow pass through."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from internals import replace_compile
from torch import Tensor, nn
from toys import WIDTH, Blocks, assert_same, check, compiled, ops, rows, through_torch

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


def distinct(model: Callable[..., Any], device: torch.device, *, count: int = 3) -> int:
    fast = compiled(model)
    x = rows(count, device)
    assert_same(fast(x), model(x))
    return pg.explain(fast).traces[0].distinct


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_equal_layers_share_one_compile(layers: int, device: torch.device) -> None:
    """Three structures for any number of layers: first, middle and last segment."""
    with pg.counters.expect(segments=layers + 1, compiles=3):
        check(Blocks(layers).to(device), device, counts=(3,))


def test_calls_and_buckets_do_not_compile_again(device: torch.device) -> None:
    with pg.counters.expect(traces=1, compiles=3, tapes=2):
        check(Blocks(4).to(device), device)


def test_plain_torch_compile_compiles_the_structures_of_both_traces(device: torch.device) -> None:
    """Plain torch.compile traces with fixed sizes, then with dynamic ones: 3 structures each."""
    model = Blocks(4).to(device)
    fast = through_torch(model)
    with pg.counters.expect(traces=2, compiles=2 * 3):
        for count in (3, 5, 6):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    assert len(pg.explain(fast).traces) == 2


def in_layers(*steps: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A model with a segment per step, and an op after each."""

    def model(x: Tensor) -> Tensor:
        for step in steps:
            x = ops.mix(step(x))
        return x

    return model


def test_other_constants_are_other_structures(device: torch.device) -> None:
    assert distinct(in_layers(lambda x: x * 2, lambda x: x * 2), device) == 1
    assert distinct(in_layers(lambda x: x * 2, lambda x: x * 3), device) == 2
    assert distinct(in_layers(lambda x: x * 2, lambda x: x * 2.0), device) == 2


def test_special_floats_are_told_apart(device: torch.device) -> None:
    def filled(value: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x.nan_to_num(nan=value) * 2

    assert distinct(in_layers(filled(0.0), filled(-0.0)), device) == 2
    assert distinct(in_layers(filled(math.inf), filled(-math.inf)), device) == 2


def test_other_ops_and_keywords_are_other_structures(device: torch.device) -> None:
    assert distinct(in_layers(torch.sin, torch.cos), device) == 2
    one, none = (lambda x, d=d: x.softmax(dim=d) for d in (1, -1))
    assert distinct(in_layers(one, none), device) == 2


def test_other_dtypes_are_other_structures(device: torch.device) -> None:
    def low(x: Tensor) -> Tensor:
        return ops.mix(ops.mix(ops.mix(x * 2).to(torch.bfloat16)) * 2).float()

    # x * 2 of float32, the cast, x * 2 of bfloat16, the cast back
    assert distinct(low, device) == 4


def test_weights_of_another_shape_are_another_structure(device: torch.device) -> None:
    wide, narrow = (nn.Linear(WIDTH, WIDTH, bias=bias).to(device) for bias in (True, False))
    assert distinct(in_layers(wide, narrow), device) == 2
    assert distinct(in_layers(wide, nn.Linear(WIDTH, WIDTH).to(device)), device) == 1


def test_tied_weights_are_another_structure_than_two(device: torch.device) -> None:
    """Code for `x @ a @ a` may rely on one weight; code for `x @ a @ b` may not."""
    a, b, c = (nn.Parameter(torch.randn(WIDTH, WIDTH, device=device)) for _ in range(3))
    model = in_layers(lambda x: x @ a @ a, lambda x: x @ b @ c)
    assert distinct(model, device) == 2


def test_inputs_that_share_storage_are_another_structure(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        view = y[:, :4]
        apart = ops.mix(y)[:, :4].clone()
        z = ops.mix(y) + 1
        first = y[:, :4] + view  # both of one storage
        second = ops.mix(z)[:, :4] + apart  # of two
        return first + second

    fast = compiled(model)
    x = rows(3, device)
    assert_same(fast(x), model(x))


def test_tensor_constants_are_shared_only_where_they_are_one_object(device: torch.device) -> None:
    def times(*values: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * torch.tensor(list(values) * 4, device=x.device)

    model = in_layers(times(1.0, 2.0), times(3.0, 4.0))
    fast = compiled(model)
    x = rows(3, device)
    for _ in range(2):
        assert_same(fast(x), model(x))


def test_two_models_do_not_share_proofs_or_structures(device: torch.device) -> None:
    with pg.counters.expect(compiles=2 * 3):
        for _ in range(2):
            check(Blocks(2).to(device), device, counts=(3, 3))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_every_compiler_gives_eagers_result(compiler: str, device: torch.device) -> None:
    with pg.counters.expect(traces=1, compiles=3, tapes=2, replays=7, fallbacks=1):
        check(Blocks(3).to(device), device, compiler=compiler)


def test_compilers_do_not_nest_cuda_graphs_or_freeze(device: torch.device) -> None:
    from torch._inductor import config

    model = Blocks(2).to(device)
    with config.patch({"freezing": True, "triton.cudagraphs": True}):
        fast = compiled(model, compiler="inductor")
        x = rows(3, device)
        fast(x)
        model.linears[0].weight.copy_(torch.randn(WIDTH, WIDTH, device=device))
        assert_same(fast(x), model(x))


def test_restart_raised_from_inside_a_compile_reaches_dynamo(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo starts over, and the aborted call leaves no trace in pg.explain."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    raised = []

    def restart_once(compile_segment: Any, *args: Any) -> Any:
        if not raised:
            raised.append(True)
            raise TensorifyScalarRestartAnalysis(restart_reason="for the test")
        return compile_segment(*args)

    replace_compile(monkeypatch, restart_once)
    model = Blocks(2).to(device)
    fast = compiled(model)
    x = rows(3, device)
    for _ in range(2):
        assert_same(fast(x), model(x))
    assert raised
    assert len(pg.explain(fast).traces) == 1


def test_code_is_shared_by_traces_only_where_its_conditions_hold(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the compiler make one kind of code for up to 6 tokens and another for more."""

    def compile_by_size(compile_segment: Any, gm: Any, inputs: Any, compiler: str) -> Any:
        size = next(x.shape[0] for x in inputs if isinstance(x, Tensor))
        large.append(bool(size > 6))  # asking makes the answer a condition of the trace
        return compile_segment(gm, inputs, compiler)

    large: list[bool] = []
    replace_compile(monkeypatch, compile_by_size)
    model = Blocks(2).to(device)
    fast = compiled(model)
    for count, traces in ((5, 1), (6, 0), (7, 1), (8, 0), (4, 0)):
        with pg.counters.expect(traces=traces, compiles=3 * traces):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    assert large == [False] * 3 + [True] * 3


def test_compile_error_is_not_hidden(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("the compiler is broken")

    replace_compile(monkeypatch, broken)
    with pytest.raises(Exception, match="the compiler is broken"):
        compiled(Blocks().to(device))(rows(3, device))


def test_published_graphs_reach_depyf(device: torch.device, tmp_path: Path) -> None:
    depyf = pytest.importorskip("depyf")
    folder = tmp_path / "dump"
    with contextlib.redirect_stdout(None), depyf.prepare_debug(str(folder)):
        compiled(Blocks(3).to(device))(rows(3, device))
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    before = [text for name, text in found.items() if "before_split" in name]
    segments = [name for name in found if ".segment_" in name]
    assert len(before) == 1
    assert "torch.ops.toy.mix" in before[0]
    assert len(segments) == 3  # the distinct ones
    assert all("def forward" in found[name] for name in segments)
