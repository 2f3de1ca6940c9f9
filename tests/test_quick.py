"""`make quick` leaves no package of the house out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import quick

ROOT = Path(__file__).resolve().parents[1]


def packages() -> set[str]:
    """Every package of the house, by its import name."""
    core = (ROOT / "piecewise_graph").rglob("__init__.py")
    ops = (ROOT / "custom_ops").rglob("__init__.py")
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in core}
    return found | {".".join(["piecewise_graph", *file.parent.relative_to(ROOT).parts]) for file in ops}


def test_every_package_has_quick_tests() -> None:
    assert set(quick.QUICK) == packages()


@pytest.mark.parametrize("name", [name for names in quick.QUICK.values() for name in names])
def test_quick_files_exist_and_hold_quick_tests(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    tests = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    ]
    slow = [test for test in tests if "slow" in " ".join(map(ast.unparse, test.decorator_list))]
    assert len(tests) > len(slow)
