"""Functions fit on a screen, files are short, and the lines of code per package do not grow unseen."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from house import FILES, GRAPH, HOUSE, code_lines, module_of, parsed, room_of
from test_architecture import CORE, LEVELS

# Catalogues, to be read in one sitting; rules.py is the proof, which a reader checks rule by rule.
LONG_FILES = {
    "errors": 580,
    "rules": 857,
    "claims": 439,
    "proof": 390,
}


def floors(graph: Mapping[str, Collection[str]]) -> int:
    """How many modules stand on one another at the most; raises CycleError for a circle."""
    height: dict[str, int] = {}
    for module in TopologicalSorter(graph).static_order():
        height[module] = 1 + max((height[below] for below in graph.get(module, ())), default=0)
    return max(height.values())


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """All but kernels, whose length is their launch's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and "triton.jit" not in map(_name, node.decorator_list):
            yield node


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


AROUND = sorted([*HOUSE.parent.glob("tests/**/*.py"), *HOUSE.parent.glob("benchmarks/*.py")])


def long_functions(path: Path) -> dict[str, int]:
    lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(parsed(path))}
    return {name: length for name, length in lengths.items() if length > 60}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", [*FILES, *AROUND], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_functions_fit_on_a_screen_and_files_stay_short(path: Path) -> None:
    assert not long_functions(path)
    assert lines_of(path) <= LONG_FILES.get(path.stem, 335)


def rooms_below() -> dict[str, set[str]]:
    """Each room with the rooms that it imports from; the table of lazy names apart."""
    found: dict[str, set[str]] = {}
    for module, targets in GRAPH.items():
        room = room_of(module, 1)
        lower = {room_of(target, 1) for target in targets} - {room}
        found[room] = found.get(room, set()) | (lower & CORE if room == "__init__" else lower)
    return found


# Lines of code per package: what stands. They fall. A feature may raise one by what it adds, said in its
# commit.
# "beside" are the core's files beside its packages.
BUDGETS = {
    "beside": 1334,
    "ranks": 399,
    "_torch": 961,
    "kernels": 1867,
    "splitter": 1409,
    "analysis": 1750,
    "compiler": 2303,
    "recorder": 1183,
    "runtime": 1447,
    "inspection": 1002,
    "frontend": 1398,
    "custom_ops": 4081,
    "eagle": 3615,
    "integrations": 934,
    "bench": 706,
    "cli": 1119,
}


def part_of(path: Path) -> str:
    room = room_of(module_of(path), 1)
    return room if room in BUDGETS else "beside"


def lines_by_part() -> dict[str, int]:
    return {part: sum(code_lines(path) for path in FILES if part_of(path) == part) for part in BUDGETS}


@pytest.mark.parametrize("part", BUDGETS)
def test_parts_stay_within_their_budgets(part: str) -> None:
    assert lines_by_part()[part] <= BUDGETS[part]


def test_figures_of_the_house(capsys: pytest.CaptureFixture[str]) -> None:
    """What a reader of the structure asks first, printed in every run."""
    rooms = rooms_below()
    longest = max(FILES, key=lines_of)
    sizes = {
        (f.end_lineno or 0) - f.lineno + 1: f"{path.stem}.{f.name}"
        for path in FILES
        for f in functions(parsed(path))
    }
    parts = lines_by_part()
    with capsys.disabled():
        print(
            f"\nhouse: {len(rooms)} rooms on {floors(rooms)} floors, {len(FILES)} files; longest file "
            f"{longest.name} ({lines_of(longest)} lines), longest function {sizes[max(sizes)]} "
            f"({max(sizes)} lines); {sum(parts.values())} lines of code: {parts}"
        )
    assert floors(rooms) <= len(LEVELS)
