"""The house as data: its files, their imports and their lines of code, for the tests of its structure."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import piecewise_graph as pg

HOUSE = Path(pg.__file__).parent
CUSTOM_OPS = HOUSE.parent / "custom_ops"
FILES = sorted([*HOUSE.rglob("*.py"), *CUSTOM_OPS.rglob("*.py")])


def module_of(path: Path) -> str:
    inside = path.relative_to(HOUSE.parent).with_suffix("").parts
    parts = ("piecewise_graph", *inside) if inside[0] == "custom_ops" else inside
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
PACKAGES = {name for name, path in MODULES.items() if path.stem == "__init__"}


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(module: str) -> set[str]:
    """Modules of the house that `module` names in imports, wherever they stand, and in import strings."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            inner = {f"{source}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= inner or {source}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            found |= (
                {name, package + name, f"{package}.{name}"}
                if re.fullmatch(r"[a-z_]*(\.[a-z_]+)+", name)
                else set()
            )
    return (found & MODULES.keys()) - {module}


GRAPH = {module: imported(module) for module in MODULES}


def room_of(module: str, depth: int) -> str:
    """`piecewise_graph.eagle.head.draft` -> "eagle" at depth 1, "head" at depth 2."""
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else "__init__"


def code_lines(path: Path) -> int:
    """Lines that hold code: what a budget should count, so that nobody saves on docstrings."""
    tree = parsed(path)
    docs = {
        line
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(1 for n, line in lines if n not in docs and line.strip() and not line.strip().startswith("#"))
