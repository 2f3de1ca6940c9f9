"""The tables of fallback reasons are complete: they name each reason that the code can give, and no other.

Reasons are found twice: in the source, where a constant stands in place of a reason, and in the counters, by
a fixture around every test (conftest.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import piecewise_graph as pg
from piecewise_graph import errors, reasons
from piecewise_graph.reasons import REMEDIES, remedy

HOUSE = Path(pg.__file__).parent
CONSUMERS = {"eagle", "bench", "cli", "custom_ops"}  # they count no reasons of their own
FILES = [p for p in HOUSE.rglob("*.py") if p.relative_to(HOUSE).parts[0] not in CONSUMERS]
# What analysis says of an op is for people; its reason is no_padding_proof.
CODE = [p for p in FILES if p.stem not in ("errors", "reasons") and p.parent.name != "analysis"]
# What holds a reason: variables, fields and parameters of these names.
HOLDERS = {"reason", "why", "fault", "blocked", "unpaddable", "unsaved", "rejected", "note", "cause"}
WORD = r"[a-z]+(?:_[a-z]+)*"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parameters() -> dict[str, set[int | str]]:
    """Name of a function or class -> where it takes a reason, as a position and as a keyword."""
    found: dict[str, set[int | str]] = {}
    for path in CODE:
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                names = names[1:] if names[:1] in (["self"], ["cls"]) else names
            elif isinstance(node, ast.ClassDef):
                init = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
                fields = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
                names = [a.arg for f in init for a in f.args.args[1:]] or [ast.unparse(f) for f in fields]
            else:
                continue
            places = {n for i, name in enumerate(names) if name in HOLDERS for n in (i, name)}
            found.setdefault(node.name, set()).update(places)
    return found


def words(node: ast.expr) -> Iterator[str]:
    """Patterns of the reasons that an expression may be: constants, behind `or` and `if` too, f-strings."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(WORD, node.value):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*words(node.body), *words(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from words(value)
    elif isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values]
        if re.fullmatch(WORD, "x".join(parts)):
            yield "".join(part or WORD for part in parts)


def given(tree: ast.Module, takes: dict[str, set[int | str]]) -> Iterator[ast.expr]:
    """Expressions that stand where a reason belongs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            if re.search(r"\bstr \| None|\| str\b", ast.unparse(node.returns)):  # a check: a reason or None
                yield from (r.value for r in ast.walk(node) if isinstance(r, ast.Return) and r.value)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(t).rpartition(".")[2] in HOLDERS for t in targets):
                yield node.value
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            places = takes.get(name, set())
            yield from (value for i, value in enumerate(node.args) if i in places)
            yield from (k.value for k in node.keywords if k.arg in HOLDERS and k.value)
            if name == "Rejected":  # its text is the reason
                yield from node.args


@cache
def reasons_in_the_code() -> set[str]:
    takes = parameters()
    return {word for path in CODE for value in given(tree_of(path), takes) for word in words(value)}


def test_every_reason_in_the_code_has_a_remedy() -> None:
    found = reasons_in_the_code()
    assert len(found) > len(REMEDIES) / 2
    assert not [word for word in found if not any(re.fullmatch(word, name) for name in REMEDIES)]


def test_no_remedy_is_for_a_reason_that_the_code_does_not_give() -> None:
    constants = {
        word
        for path in CODE
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.Constant, ast.JoinedStr))
        for word in words(node)
    }
    assert not [name for name in REMEDIES if not any(re.fullmatch(word, name) for word in constants)]


def test_the_tables_of_the_readme_are_the_remedies() -> None:
    text = (HOUSE / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Fallback reasons\n")[2].partition("\n## ")[0]
    rows = re.findall(rf"^\| `({WORD})` \| (.+) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) == len(REMEDIES)
    assert {name: advice for name, _, advice in rows} == REMEDIES
    assert all(meaning.endswith(".") for _, meaning, _ in rows)


def test_the_collector_sees_every_way_to_give_a_reason() -> None:
    code = """
def check(x) -> str | None:
    return "is_returned" if x else None
def count(self, reason): ...
count("is_passed")
fault = None or "is_assigned"
raise Rejected(f"{what}_is_made")
print("is_no_reason")
"""
    seen = {word for value in given(ast.parse(code), {"count": {0}}) for word in words(value)}
    assert seen == {"is_returned", "is_passed", "is_assigned", f"{WORD}_is_made"}


@pytest.mark.parametrize("name", REMEDIES)
def test_a_remedy_is_one_short_sentence(name: str) -> None:
    assert re.fullmatch(r"[a-z][^|`]*[^.|]", REMEDIES[name])


def test_errors_that_carry_a_reason_say_its_remedy() -> None:
    assert "torch.no_grad()" in str(errors.FreezeError.not_split("grad_enabled"))
    error = errors.CaptureError.nothing_captured(["grad_enabled", "RuntimeError: no"])
    assert reasons.REMEDIES["grad_enabled"] in str(error)
    assert "grad_enabled; RuntimeError: no" in str(error)


def test_free_text_has_a_remedy_too() -> None:
    assert remedy("RuntimeError: no")
