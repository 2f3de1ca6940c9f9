"""The functions of `_torch` that look at opaque arguments do what they say on the installed torch."""

from __future__ import annotations

from typing import Any

import torch
from torch._library.opaque_object import OpaqueBase, get_opaque_type_name, register_opaque_type
from torch.fx import GraphModule

from piecewise_graph import _torch


class Word(OpaqueBase):
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Word({self.text!r})", {"Word": Word}


def test_opaque_arguments_are_told_and_their_objects_found() -> None:
    register_opaque_type(Word, typ="value", hoist=True)
    library = torch.library.Library("pg_test_gates_opaque", "DEF")
    library.define(f"spell(Tensor x, {get_opaque_type_name(Word)} word) -> Tensor")
    library.impl("spell", lambda x, word: x * len(word.text), "CompositeExplicitAutograd")
    torch.library.register_fake("pg_test_gates_opaque::spell", lambda x, word: x * 1, lib=library)
    word, found = Word("abc"), []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        values = map(_torch.example_value, gm.graph.find_nodes(op="placeholder"))
        found.extend(_torch.real_object(value) for value in values if _torch.is_opaque(value))
        return gm

    spell = torch.ops.pg_test_gates_opaque.spell
    result = torch.compile(lambda x: spell(x, word), backend=backend)(torch.ones(2))
    assert found == [word] and result.tolist() == [3.0, 3.0]
    assert not any(map(_torch.may_keep_state, [word, torch.ones(2)])), "a value, and a tensor"
    assert not _torch.is_opaque(torch.ones(2)) and not _torch.is_opaque(3)


def test_opaque_values_are_compared_by_value_and_objects_by_identity() -> None:
    assert _torch.comparable(Word("a")) == _torch.comparable(Word("a"))
    one, other = [object(), object()]
    assert _torch.comparable(one) == _torch.comparable(one) != _torch.comparable(other)
    assert hash(_torch.comparable(one)) == hash(_torch.comparable(one))
