"""DESIGN section 9: the habits that keep the house small."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from house import FILES, GRAPH, HOUSE, MODULES, module_of, parsed, room_of

import piecewise_graph as pg

# A room (a package, or a file beside the packages) imports from rooms above its own line, never from its own
# line or below. What a package holds is its own business, as long as its files make no circle.
LEVELS = (
    {"reasons"},
    {"errors", "_torch", "telemetry", "buckets", "kernels"},
    {"sizes", "context", "ranks"},
    {"stand_in"},
    {"graph_pool", "splitter"},
    {"config", "analysis"},
    {"compiler"},
    {"recorder"},
    {"runtime"},
    {"backend"},
    {"frontend"},
    {"inspection"},
    {"__init__"},
    {"custom_ops"},
    {"integrations"},
    {"eagle"},
    {"bench"},
    {"cli"},
    {"__main__"},
)
# The same inside of the packages that have rooms of their own.
INNER_LEVELS = {
    "eagle": (
        {"errors", "statistics"},
        {"options"},
        {"request"},
        {"head"},
        {"rounds"},
        {"serving"},
        {"speculator"},
        {"__init__"},
    ),
    "custom_ops": (
        {"errors", "rope_limit"},
        {"kv_cache", "token_choice_kernels"},
        {"token_choice"},
        {"metadata"},
        {"attention"},
        {"__init__"},
    ),
}
CORE = set().union(*LEVELS[: LEVELS.index({"__init__"}) + 1])
SHARED_NAMES = {"__init__", "errors"}  # errors: the catalogue of its package


def arrows_upward(package: str, levels: Sequence[Collection[str]]) -> list[str]:
    depth = package.count(".") + 1
    level = {room: number for number, rooms in enumerate(levels) for room in rooms}
    return [
        f"{module} -> {target}"
        for module, targets in GRAPH.items()
        for target in targets
        if module.startswith(package) and target.startswith(package)
        if room_of(module, depth) != room_of(target, depth) and module != "piecewise_graph"
        if level[room_of(target, depth)] >= level[room_of(module, depth)]
    ]


def test_every_room_has_a_level() -> None:
    for package, levels in {
        "piecewise_graph": LEVELS,
        **{f"piecewise_graph.{p}": v for p, v in INNER_LEVELS.items()},
    }.items():
        rooms = {room_of(m, package.count(".") + 1) for m in MODULES if m.startswith(package)}
        assert rooms == set().union(*levels), package


def test_no_import_points_upward() -> None:
    """Deferred ones, those for type checkers alone, and strings that are imported, included."""
    assert not arrows_upward("piecewise_graph", LEVELS)
    for package, levels in INNER_LEVELS.items():
        assert not arrows_upward(f"piecewise_graph.{package}", levels)


def test_the_only_way_up_is_the_table_of_lazy_names() -> None:
    tree = parsed(HOUSE / "__init__.py")
    table = next(
        n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_LAZY"
    )
    level = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
    upward = {m for m in GRAPH["piecewise_graph"] if level[room_of(m, 1)] > level["__init__"]}
    looked_for = {"piecewise_graph.custom_ops"}  # by a checkout that is not installed, and not imported
    assert upward - looked_for == set(ast.literal_eval(table).values())


def test_no_files_import_one_another_in_a_circle() -> None:
    below = {**GRAPH, "piecewise_graph": {m for m in GRAPH["piecewise_graph"] if room_of(m, 1) in CORE}}
    list(TopologicalSorter(below).static_order())


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.stem for path in FILES if path.stem not in SHARED_NAMES)
    assert not [name for name, count in names.items() if count > 1]


def test_few_files_lie_beside_the_packages() -> None:
    assert len(list(HOUSE.glob("*.py"))) <= 14


def modules_loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def torch_alone() -> set[str]:
    return modules_loaded_by("import torch")


@pytest.mark.parametrize(
    "statement",
    [
        "import piecewise_graph",
        "import piecewise_graph.custom_ops.attention",
        "import piecewise_graph.eagle",
        "import piecewise_graph.cli.commands",
    ],
)
def test_import_in_a_fresh_process_loads_nothing_heavy(statement: str, torch_alone: set[str]) -> None:
    loaded = modules_loaded_by(statement)
    assert "piecewise_graph.runtime.runtime" in loaded
    heavy = (
        "torch._inductor",
        "torch._dynamo",
        "triton",
        "flashinfer",
        "flash_attn",
        "transformers",
        "depyf",
    )
    found = {name for name in loaded - torch_alone for h in heavy if name == h or name.startswith(h + ".")}
    assert not found


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name != "_torch"], ids=module_of)
def test_only_one_package_touches_private_torch(path: Path) -> None:
    tree = parsed(path)
    allowed = re.compile(r"torch\._(foreach_\w+|check\w*)$")
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_")}
    private = {u for u in used if re.match(r"torch(\.\w+)*\._[a-z]", u) and not allowed.match(u)}
    from_private = {
        name
        for node in ast.walk(tree)
        for name in (
            [str(node.module), *(f"{node.module}.{a.name}" for a in node.names)]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        if re.match(r"torch(\.\w+)*\._[a-z]", name)
    }
    assert not private | from_private


def test_public_names_are_listed_sorted_and_exist() -> None:
    assert list(pg.__all__) == sorted(pg.__all__)
    missing = [name for name in pg.__all__ if not hasattr(pg, name)]
    assert not missing


def test_no_public_name_is_a_submodule_but_errors() -> None:
    submodules = {module.name for module in pkgutil.iter_modules(pg.__path__)}
    assert set(pg.__all__) & submodules == {"errors"}


def test_environment_is_read_in_one_file() -> None:
    readers = [
        path.stem
        for path in FILES
        if re.search(r"\benviron\b|\bgetenv\b", re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL))
        and re.search(r"os\.(environ|getenv)|from os import", path.read_text())
    ]
    assert readers == ["config"]


def test_every_error_message_is_built_in_the_catalogue() -> None:
    """Outside of errors.py an error is raised through a constructor with a name, or re-raised."""
    catalogues = [path for path in FILES if path.stem == "errors"]
    catalogue = {n.name for file in catalogues for n in parsed(file).body if isinstance(n, ast.ClassDef)}
    direct = [
        f"{path.stem}:{node.lineno}"
        for path in FILES
        if path.stem != "errors"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in catalogue
    ]
    assert not direct


def test_the_loop_its_benchmark_and_the_commands_live_on_public_names() -> None:
    """Of the core they import `piecewise_graph` itself and its errors, integrations `_torch` too."""
    named = {"__init__", "errors"}
    allowed = {"eagle": named, "bench": named, "cli": named, "integrations": named | {"_torch"}}
    reached = {
        module: {target for target in targets if room_of(target, 1) in CORE - allowed[room_of(module, 1)]}
        for module, targets in GRAPH.items()
        if room_of(module, 1) in allowed
    }
    assert not {module: targets for module, targets in reached.items() if targets}
