"""The registry of splitting ops, ops with a wrong declaration, and ops that are not registered."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from internals import registered_names, unregister_splitting_op
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from toys import WIDTH, assert_same, compiled, define, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import LeakWarning, SplittingOpError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- registration -------------------------------------------------------------------------------------

define("returns_nothing(Tensor x) -> ()", lambda x: None, lambda x: None)
define("returns_alias(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], lambda x: x[:1])
define("writes_and_returns(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1), lambda x: x)
define("half_precision(Tensor x) -> Tensor", lambda x: x.to(torch.float16), torch.empty_like)
define("one_row_less(Tensor x) -> Tensor", lambda x: x[1:].clone(), torch.empty_like)
define(
    "one_of_two_lies(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.double()), lambda x: (x + 0, x + 0)
)


def sneaky(x: Tensor, state: Tensor) -> Tensor:
    state.add_(1)
    return x * 2


define("sneaky(Tensor x, Tensor state) -> Tensor", sneaky, lambda x, state: torch.empty_like(x))
MOOD = [torch.float32]
define("moody(Tensor x) -> Tensor", lambda x: x.to(MOOD[0]) * 2, torch.empty_like)


def write_rows(x: Tensor, cache: Tensor) -> Tensor:
    cache[: len(x)] = x.to(cache.dtype)
    return cache.new_empty(0)


define("write_rows(Tensor x, Tensor(a!) cache) -> Tensor", write_rows, lambda x, cache: x.new_empty(0))
define(
    "read_rows(Tensor x, Tensor cache, Tensor after) -> Tensor",
    lambda x, cache, after: cache[: len(x)].to(x.dtype),
    lambda x, cache, after: torch.empty_like(x),
)
for _op in (
    "write_rows",
    "read_rows",
    "moody",
    "half_precision",
    "one_row_less",
    "one_of_two_lies",
    "sneaky",
):
    pg.register_splitting_op(f"toy::{_op}")


@pytest.mark.parametrize("name", ["attention", "", "::mix", "toy::", "toy.mix"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(SplittingOpError, match="namespace::name"):
        pg.register_splitting_op(name)


def test_op_may_be_registered_before_it_is_defined(device: torch.device) -> None:
    for name in ("defined_later", "lies_later"):
        pg.register_splitting_op(f"toy::{name}")
    try:
        define("defined_later(Tensor x) -> Tensor", lambda x: x * 3, torch.empty_like)
        fast = compiled(lambda x: ops.defined_later(x * 2) + 1)
        with pg.counters.expect(op_steps=1, replays=2, fallbacks=0):
            for n in (5, 7, 5):
                x = rows(n, device)
                assert_same(fast(x), x * 6 + 1)
        define("lies_later(Tensor x) -> ()", lambda x: None, lambda x: None)
        with pytest.raises(SplittingOpError, match="declares no argument that it writes"):
            compiled(lambda x: (ops.lies_later(x), x * 2)[1])(rows(3, device))
    finally:
        for name in ("defined_later", "lies_later"):
            unregister_splitting_op(f"toy::{name}")


def test_op_without_result_or_declared_write_is_refused() -> None:
    with pytest.raises(SplittingOpError, match="declares no argument that it writes"):
        pg.register_splitting_op("toy::returns_nothing")


@pytest.mark.parametrize("name", ["toy::returns_alias", "toy::writes_and_returns", "aten::view"])
def test_op_that_returns_an_alias_is_refused(name: str) -> None:
    with pytest.raises(SplittingOpError, match="returns an alias"):
        pg.register_splitting_op(name)
    assert name not in registered_names()


def test_capturable_implies_padded() -> None:
    assert pg.register_splitting_op("toy::mix_out", capturable=True).padded
    assert not pg.register_splitting_op("toy::mix_out").padded


def test_op_hears_of_its_calls_before_segments_are_compiled(device: torch.device) -> None:
    compiles, heard = list[int](), list[tuple[Any, ...]]()

    def compile_ahead(x: Tensor, factor: float = 1.0) -> None:
        compiles.append(pg.counters.snapshot()["compiles"])
        heard.append((is_fake(x), x.dim(), x.shape[1], x.dtype, x.device.type, factor))

    define(
        "announced(Tensor x, float factor=1.0) -> Tensor", torch.mul, lambda x, factor: torch.empty_like(x)
    )
    pg.register_splitting_op("toy::announced", compile_ahead=compile_ahead)
    try:
        fast = compiled(lambda x: ops.announced(ops.announced(x + 1, 2.0) + 1, factor=3.0) * 2)
        before = pg.counters.snapshot()["compiles"]
        for n in (3, 5):
            x = rows(n, device)
            assert_same(fast(x), ((x + 1) * 2 + 1) * 6)
        assert compiles == [before] * 2
        assert heard == [(True, 2, WIDTH, torch.float32, device.type, factor) for factor in (2.0, 3.0)]
    finally:
        unregister_splitting_op("toy::announced")


def test_model_goes_on_where_compiling_ahead_fails(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    define("fails_ahead(Tensor x) -> Tensor", lambda x: x * 3, torch.empty_like)
    pg.register_splitting_op("toy::fails_ahead", compile_ahead=lambda x: x.no_such_attribute)
    try:
        fast, x = compiled(lambda x: ops.fails_ahead(x + 1) * 2), rows(3, device)
        assert_same(fast(x), (x + 1) * 6)
        assert "compile_ahead of toy::fails_ahead failed" in caplog.text
    finally:
        unregister_splitting_op("toy::fails_ahead")


def test_sdpa_is_registered_by_default() -> None:
    assert "aten::scaled_dot_product_attention" in registered_names()


def test_op_of_another_domain_with_an_out_overload_is_accepted() -> None:
    """By torch's convention `op.out` returns its out argument."""
    name = "aten::cumprod"
    try:
        assert pg.register_splitting_op(name).name == name
    finally:
        unregister_splitting_op(name)


# --- liars --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "message"),
    [("half_precision", "float16"), ("one_row_less", r"\(2, 8\)")],
)
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_op_whose_fake_lies_is_refused_by_name(
    op: str, message: str, graphs: str, device: torch.device
) -> None:
    fast = compiled(lambda x: getattr(ops, op)(x * 2) + 1, cuda_graphs=graphs)
    with pytest.raises(SplittingOpError, match=rf"(?s)toy::{op}.*{message}.*fake"):
        fast(rows(3, device))


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_result_without_elements_may_be_of_any_dtype(graphs: str, device: torch.device) -> None:
    """It orders two ops: the write of a cache in its own dtype, and what reads the cache."""

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, WIDTH, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            written = ops.write_rows(x * 2, self.cache)
            return ops.read_rows(x, self.cache, written) + 1

    model = Cached().to(device)
    fast = compiled(model, cuda_graphs=graphs)
    for n in (5, 7, 5, 1):
        x = rows(n, device)
        assert_same(fast(x), (x * 2).to(torch.bfloat16).float() + 1)


def test_lie_about_one_element_of_a_tuple_is_found(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a, b = ops.one_of_two_lies(x * 2)
        return a + b

    with pytest.raises(SplittingOpError, match="float64"):
        compiled(model)(rows(3, device))


def test_result_of_another_dtype_after_the_capture_is_cast_not_misread(device: torch.device) -> None:
    """The bridge buffer fixes dtype and layout, whatever the op returns later."""
    fast = compiled(lambda x: ops.moody(x * 2) + 1)
    x = rows(3, device)
    fast(x), fast(x)
    MOOD[0] = torch.float64
    try:
        assert_same(fast(x), x * 4 + 1)
    finally:
        MOOD[0] = torch.float32


def test_undeclared_write_is_refused_and_names_the_argument(device: torch.device) -> None:
    state = torch.zeros(WIDTH, device=device)
    fast = compiled(lambda x: ops.sneaky(x * 2, state) + 1)
    with pytest.raises(SplittingOpError, match=r"(?s)toy::sneaky.*'state'.*Tensor\(a!\) state"):
        fast(rows(3, device))


def test_declared_write_is_not_mistaken_for_an_undeclared_one(device: torch.device) -> None:
    """`append` writes `y[0]`, whose storage it also reads as `y`."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        ops.append(y, y[0])  # y is not declared as written, but shares the storage that is
        return y + 1

    compiled(model)(rows(3, device))


# --- the leak detector --------------------------------------------------------------------------------

define("flash_attn_like(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)


def _bump(x: Tensor) -> None:
    x.add_(1)


define(
    "takes_tables(Tensor x, Tensor block_table) -> Tensor",
    lambda x, t: x * 2,
    lambda x, t: torch.empty_like(x),
)
define("bumps(Tensor(a!) x) -> ()", _bump, lambda x: None)


def leak_of(model: Any, device: torch.device) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = compiled(model)
        fast(rows(3, device))
    leaks = pg.explain(fast).traces[0].leaks
    told = [str(w.message) for w in caught if issubclass(w.category, LeakWarning)]
    assert len(told) == len(leaks)
    assert all(leak in text for leak, text in zip(leaks, told, strict=True))
    return list(leaks)


def test_unregistered_op_named_like_attention_is_reported(device: torch.device) -> None:
    assert leak_of(lambda x: ops.flash_attn_like(x) + 1, device) == ["toy::flash_attn_like"]


def test_unregistered_op_with_a_block_table_is_reported(device: torch.device) -> None:
    table = torch.zeros(4, device=device)
    assert leak_of(lambda x: ops.takes_tables(x, table) + 1, device) == ["toy::takes_tables"]


def test_unregistered_op_that_mutates_is_reported(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        ops.bumps(y)
        return y

    assert leak_of(model, device) == ["toy::bumps"]


def test_registered_and_ordinary_ops_are_not_reported(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = ops.mix(x * 2)
        y.add_(1)
        return torch.relu_(y)

    assert leak_of(model, device) == []


def test_leak_is_shown_by_explain(device: torch.device) -> None:
    fast = compiled(lambda x: ops.flash_attn_like(x) + 1)
    with pytest.warns(LeakWarning, match="register_splitting_op"):
        fast(rows(3, device))
    assert "not registered: toy::flash_attn_like" in str(pg.explain(fast))
