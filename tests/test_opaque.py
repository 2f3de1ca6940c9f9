"""Objects that torch passes through a graph (a layer's name, a table) are constants of a model's tapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._library.opaque_object import OpaqueBase, get_opaque_type_name, register_opaque_type
from toys import WIDTH, assert_same, compiled, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


class Name(OpaqueBase):
    """A value: equal ones are the same. vLLM passes the names of its layers so."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Name({self.text!r})", {"Name": Name}


class Table(OpaqueBase):
    """An object with a state of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


register_opaque_type(Name, typ="value", hoist=True)
register_opaque_type(Table, typ="reference")

FACTORS = {"a": 2.0, "b": -3.0, "c": 0.5, "d": 1.5}
LIBRARY = torch.library.Library("pg_test_opaque", "DEF")
OPS: Any = torch.ops.pg_test_opaque


def factor_of(given: Any) -> float:
    return given.factor if isinstance(given, Table) else FACTORS[given.text]


def attend(x: Tensor, given: Any, out: Tensor) -> None:
    out.copy_((x - x.mean(0, keepdim=True)) * factor_of(given))


for kind in (Name, Table):
    suffix, of = kind.__name__.lower(), get_opaque_type_name(kind)
    LIBRARY.define(f"attend_{suffix}(Tensor x, {of} given, Tensor(a!) out) -> ()")
    LIBRARY.impl(f"attend_{suffix}", attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pg_test_opaque::attend_{suffix}", lambda x, given, out: None, lib=LIBRARY)
    LIBRARY.define(f"scale_{suffix}(Tensor x, {of} given) -> Tensor")
    LIBRARY.impl(f"scale_{suffix}", lambda x, given: x * factor_of(given), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"pg_test_opaque::scale_{suffix}", lambda x, given: torch.empty_like(x), lib=LIBRARY
    )
    pg.register_splitting_op(f"pg_test_opaque::attend_{suffix}")
    pg.register_padding_rule(f"pg_test_opaque::scale_{suffix}", rows={"x": 0})


def count(x: Tensor, given: Table) -> Tensor:
    given.factor += 1  # behind torch's back
    return x * given.factor


LIBRARY.define(f"count(Tensor x, {get_opaque_type_name(Table)} given) -> Tensor")
LIBRARY.impl("count", count, "CompositeExplicitAutograd")
torch.library.register_fake("pg_test_opaque::count", lambda x, given: torch.empty_like(x), lib=LIBRARY)


class Layer(nn.Module):
    def __init__(self, given: Any, inside: bool) -> None:
        super().__init__()
        self.linear, self.given, self.inside = nn.Linear(WIDTH, WIDTH), given, inside

    def forward(self, x: Tensor) -> Tensor:
        suffix = "table" if isinstance(self.given, Table) else "name"
        h = self.linear(x)
        if self.inside:  # as vLLM's experts: an op in a segment takes the name too
            h = getattr(OPS, f"scale_{suffix}")(h, self.given) + 1
        out = torch.empty_like(h)
        getattr(OPS, f"attend_{suffix}")(h, self.given, out)
        return x + out


def stack(given: Any, *, inside: bool = False) -> nn.Module:
    return nn.Sequential(*(Layer(each, inside) for each in given))


def names(text: str) -> list[Name]:
    return [Name(letter) for letter in text]


def tables(text: str) -> list[Table]:
    return [Table(FACTORS[letter]) for letter in text]


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("inside", [False, True], ids=["op", "op and segment"])
def test_names_are_constants_and_structures_do_not_know_them(
    inside: bool, compiler: str, device: torch.device
) -> None:
    model = stack(names("abcd"), inside=inside).to(device)
    fast = compiled(model, token_dim={"input": 0}, compiler=compiler)
    with pg.counters.expect(traces=1, compiles=3, tapes=2, replays=2, fallbacks=0):
        for n in (5, 3, 5, 7):
            x = rows(n, device)
            same(fast(x), model(x))


@pytest.mark.parametrize("inside", [False, True], ids=["op", "op and segment"])
@pytest.mark.parametrize(
    "given", [names, lambda text: [Table(FACTORS[each]) for each in text]], ids=["value", "reference"]
)
def test_models_of_one_class_keep_their_own(given: Any, inside: bool, device: torch.device) -> None:
    models = [stack(given(text), inside=inside).to(device) for text in ("ab", "ba", "bb")]
    fast = [compiled(model, token_dim={"input": 0}) for model in models]
    for n in (5, 7, 5):
        for run, model in zip(fast, models, strict=True):
            x = rows(n, device)
            same(run(x), model(x))


def test_another_name_needs_other_tapes_and_the_old_one_finds_its_own(device: torch.device) -> None:
    model = stack(names("ab")).to(device)
    fast, x = compiled(model, token_dim={"input": 0}), rows(5, device)
    for text in "acac":
        model[0].given = Name(text)  # type: ignore[union-attr]
        for _ in range(2):
            same(fast(x), model(x))
    assert pg.counters.snapshot()["tapes"] <= 3


def test_all_that_a_compiled_model_can_do_goes_on(device: torch.device) -> None:
    model = stack(names("ab"), inside=True).to(device)
    fast, x = compiled(model, token_dim={"input": 0}), rows(5, device)
    fast(x)
    assert pg.plan(fast, [8]).buckets
    assert pg.bisect(fast, x).departure is None
    frozen = pg.freeze(fast, x)
    for _ in range(2):
        x = rows(5, device)
        assert_same(frozen(x), fast(x))


def test_an_object_that_is_another_one_in_every_call_leaves_few_graphs(device: torch.device) -> None:
    model = stack(tables("ab")).to(device)
    fast, x = compiled(model, token_dim={"input": 0}), rows(5, device)
    for factor in range(20):
        model[1].given = Table(factor / 4)  # type: ignore[union-attr]
        same(fast(x), model(x))
    assert len(pg.explain(fast).traces) == 16


class Counting(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return OPS.count(super().forward(x), self.given) + 1


@pytest.mark.parametrize("padding", ["proved", "tried"])
def test_an_object_that_an_op_changes_is_changed_once_per_call(padding: Any, device: torch.device) -> None:
    model = Counting(Table(1.0), inside=False).to(device)
    fast = compiled(model, token_dim={"x": 0}, padding=padding)
    for n in (5, 5, 8, 8, 7, 4, 4):
        x, before = rows(n, device), model.given.factor
        wanted = model(x)
        model.given.factor = before
        same(fast(x), wanted)
        assert model.given.factor == before + 1
