"""DESIGN section 9: the habits that keep the house small."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import piecewise_graph as pg

ROOT = Path(pg.__file__).parent
CORE = sorted(ROOT.glob("*.py"))
CUSTOM_OPS = sorted((ROOT.parent / "custom_ops").rglob("*.py"))
EAGLE = sorted((ROOT / "eagle").rglob("*.py"))
BENCH = sorted((ROOT / "bench").rglob("*.py"))

# A module imports from lines above its own, never from its own line or below.
LEVELS = (
    {"errors", "telemetry", "buckets", "_torch", "facades"},
    {
        "context",
        "shapes",
        "signals",
        "call_names",
        "splitting_ops",
        "dispatch",
        "token_dims",
        "merged_weights",
    },
    {"split_graph", "graph_pool"},
    {"splitter", "analysis", "config", "one_token", "structure", "merge_linears"},
    {"cache"},
    {"compiler", "linear_choice"},
    {"program", "family"},
    {"static_inputs", "addresses"},
    {"padding", "tape"},
    {"recorder", "specialize"},
    {"captured_context", "full_graph", "planner"},
    {"tape_set"},
    {"runtime"},
    {"whole"},
    {"per_model"},
    {"backend"},
    {"frontend"},
    {"lookup", "frozen_plan"},
    {"precapture", "report", "frozen"},
    {"__init__"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
LONG_FILES = {"errors": 480, "_torch": 480}  # catalogues, to be read in one sitting
FACADES = {"piecewise_graph"}  # `import piecewise_graph as pg` stands for __init__


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of_package(tree: ast.AST) -> Iterator[str]:
    """Names of the core's modules that `tree` imports when it runs (type checking apart)."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "piecewise_graph":
            _, _, module = str(node.module).partition(".")
            names = [module] if module else [alias.name for alias in node.names]
            yield from (name if name in LEVEL_OF else "__init__" for name in names)
        elif isinstance(node, ast.Import):
            inside = [a.name for a in node.names if a.name.split(".")[0] == "piecewise_graph"]
            yield from (name.partition(".")[2] or "__init__" for name in inside)
        yield from imports_of_package(node)


def test_every_module_of_the_core_has_a_level() -> None:
    assert {path.stem for path in CORE} == set(LEVEL_OF)


DOWNWARD = [path for path in CORE if path.stem != "facades"]  # facades reach upwards, inside functions


@pytest.mark.parametrize("path", DOWNWARD, ids=lambda p: p.stem)
def test_module_imports_downward_only(path: Path) -> None:
    upward = {name for name in imports_of_package(parsed(path)) if LEVEL_OF[name] >= LEVEL_OF[path.stem]}
    assert not upward


@pytest.mark.parametrize("path", DOWNWARD, ids=lambda p: p.stem)
def test_core_never_imports_its_consumers(path: Path) -> None:
    assert not re.search(
        r"import .*custom_ops|from .*(custom_ops|\.eagle|\.bench)", path.read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("path", CUSTOM_OPS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_custom_ops_never_import_their_consumers(path: Path) -> None:
    assert not re.search(
        r"^\s*(import|from) .*\b(eagle|bench)\b", path.read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize("path", EAGLE, ids=lambda p: f"eagle/{p.stem}")
def test_eagle_never_imports_its_benchmark(path: Path) -> None:
    assert not re.search(r"^\s*(import|from) .*\bbench\b", path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", EAGLE + BENCH, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_consumers_import_their_own_modules_relatively_and_others_absolutely(path: Path) -> None:
    froms = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
    own = f"piecewise_graph.{path.parent.name}"
    assert not [node.module for node in froms if (node.module or "").startswith(own)]
    assert all(node.level <= 1 for node in froms)


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
        "import piecewise_graph.bench.options",
    ],
)
def test_import_in_a_fresh_process_loads_nothing_heavy(statement: str, torch_alone: set[str]) -> None:
    loaded = modules_loaded_by(statement)
    assert "piecewise_graph.runtime" in loaded
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


@pytest.mark.parametrize(
    "path",
    [p for p in CORE + CUSTOM_OPS + EAGLE + BENCH if p.stem != "_torch"],
    ids=lambda p: f"{p.parent.name}/{p.stem}",
)
def test_only_one_file_touches_private_torch(path: Path) -> None:
    tree = parsed(path)
    allowed = re.compile(r"torch\._(foreach_\w+|check\w*)$")
    used = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("_")}
    private = {u for u in used if re.match(r"torch(\.\w+)*\._[a-z]", u) and not allowed.match(u)}
    imported = {
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
    assert not private | imported


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", CORE + EAGLE + BENCH, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_functions_fit_on_a_screen_and_files_stay_short(path: Path) -> None:
    tree = parsed(path)
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions(tree) if f.end_lineno - f.lineno >= 60}
    assert not long
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONG_FILES.get(path.stem, 335)


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


def test_core_stays_within_its_budget() -> None:
    """Lines of code; the command line is no part of the core."""
    core = [path for path in CORE if path.stem not in ("cli", "demo", "__main__")]
    assert sum(map(code_lines, core)) <= 5500


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
        for path in CORE + CUSTOM_OPS + EAGLE + BENCH
        if re.search(r"\benviron\b|\bgetenv\b", re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL))
        and re.search(r"os\.(environ|getenv)|from os import", path.read_text())
    ]
    assert readers == ["config"]


def test_every_error_message_is_built_in_the_catalogue() -> None:
    """Outside of errors.py an error is raised through a constructor with a name, or re-raised."""
    catalogues = [ROOT / folder / "errors.py" for folder in ("", "eagle", "bench")]
    catalogue = {n.name for file in catalogues for n in parsed(file).body if isinstance(n, ast.ClassDef)}
    direct = [
        f"{path.stem}:{node.lineno}"
        for path in CORE + EAGLE + BENCH
        if path.stem != "errors"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in catalogue
    ]
    assert not direct
