"""Where tests look into the padding proof, as internals.py does for the rest: rules that believe too much."""

from __future__ import annotations

from typing import Any

import pytest

from piecewise_graph.analysis import proof, rules
from piecewise_graph.analysis.claims import Claim


def padding_rules() -> dict[str, Any]:
    """The rule of each op that has one of its own, by name."""
    return dict(rules.RULES)


def believe(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """The rule of `op` is wrong: it takes every row of every result for a live one."""

    def rule(call: Any) -> Any:
        changed = (*call.written, *call.new)
        return [Claim(tuple(map(call.padding.counted, tensor.shape))) for tensor in changed]

    monkeypatch.setitem(rules.RULES, op, rule)


def trust_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index of a tail is taken to leave its table."""
    monkeypatch.setattr(rules, "require_inside", lambda *_, **__: None)


def believe_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every elementwise op may take sizes for numbers."""
    monkeypatch.setattr(rules.Call, "numbers_are_constant", lambda *_: None)


def believe_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a part of a tensor never harms the rest."""
    monkeypatch.setattr(proof, "_steps", lambda *_: set())
