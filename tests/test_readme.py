"""The READMEs are true: code runs, commands and links exist, figures are those of the JSON files."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import pydoc
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

import piecewise_graph as pg
from benchmarks.compare_report import markdown

ROOT = Path(__file__).parent.parent
READMES = [
    "README.md",
    "piecewise_graph/README.md",
    "piecewise_graph/RECIPES.md",
    "custom_ops/README.md",
    "piecewise_graph/eagle/README.md",
    "benchmarks/README.md",
]
PAGES = [*READMES, "CONTRIBUTING.md", "CHANGELOG.md"]
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page that its text begins on."""

    language: str
    text: str
    line: int


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[Block]:
    text = text_of(page)
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    every = [Block(m[1], m[2], text[: m.start(2)].count("\n") + 1) for m in found]
    return [block for block in every if block.language == language]


def python_of(page: str) -> str:
    """The page's Python blocks as one program, each on the lines that it has on the page."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines)


def sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)\n", text_of(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


# --- code -----------------------------------------------------------------------------------------


def missing(program: str) -> set[str]:
    """Packages that the program imports and that are not installed."""
    nodes = list(ast.walk(ast.parse(program)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    packages = {name.partition(".")[0] for name in names}
    return {package for package in packages if importlib.util.find_spec(package) is None}


def run(page: str, folder: Path) -> str:
    """What the page's Python prints. Blocks of one page follow one another, in a process of their own."""
    program = folder / "page.py"
    program.write_text(python_of(page), encoding="utf-8")
    environment = {**os.environ, "PIECEWISE_GRAPH_COMPILER": "eager", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(program)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{page} (lines are those of the page):\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in READMES[1:] if blocks(page, "python")])
def test_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    if lacks := missing(python_of(page)):
        pytest.skip(f"needs {', '.join(sorted(lacks))}")
    run(page, tmp_path)


def test_recipes_count_what_they_show_and_end_by_saying_what_became_of_the_model() -> None:
    for block in blocks("piecewise_graph/RECIPES.md", "python"):
        assert "with pg.counters.expect(" in block.text, block.line
        assert re.search(r"print\(pg\.explain\(.*\)\.summary\(\)\)\n$", block.text), block.line


def test_first_block_prints_what_the_readme_says(tmp_path: Path) -> None:
    def masked(text: str) -> str:
        text = re.sub(r" +(?=\d)", " ", text)
        return re.sub(r"\d+\.\d+|\d+(?= us)", "#", text).strip()  # times and MiB differ

    assert masked(run("README.md", tmp_path)) == masked(blocks("README.md", "text")[0].text)


def test_every_page_but_the_benchmarks_has_code() -> None:
    assert [page for page in READMES if not blocks(page, "python")] == ["benchmarks/README.md"]


def test_first_screen_fits() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120
    (block,) = blocks("README.md", "python")
    assert len([line for line in block.text.splitlines() if line]) <= 12
    imports = [n for n in ast.walk(ast.parse(block.text)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert sorted(ast.unparse(n) for n in imports) == ["import piecewise_graph as pg", "import torch"]
    assert block.line < 30


# --- commands -------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, ...]]:
    """Every command of a bash block, and every `python -m` between single backticks, as words."""
    for page in PAGES:
        text = [block.text for block in blocks(page, "bash")]
        text += re.findall(r"`(python -m [^`]+)`", text_of(page))
        for line in "\n".join(text).replace("\\\n", " ").splitlines():
            words = tuple(shlex.split(line, comments=True))
            if words:
                yield words


COMMANDS = sorted(set(commands()))
MODULES = [words for words in COMMANDS if words[:2] == ("python", "-m") and words[2] not in ("pip", "pytest")]


@pytest.mark.parametrize("words", MODULES, ids=" ".join)
def test_a_command_and_its_options_exist(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, module, *arguments = words
    options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    before = [argument for argument in arguments if argument.isalpha() and argument.islower()]
    subcommands = before[: {"piecewise_graph": 2 if "bench" in before else 1}.get(module, 0)]
    monkeypatch.setattr(sys, "argv", [module, *subcommands, "--help"])
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert not ended.value.code
    assert options <= set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))


def test_the_other_commands_are_known() -> None:
    targets = set(re.findall(r"^([a-z]+):.*##", text_of("Makefile"), re.MULTILINE))
    others = [words for words in COMMANDS if words not in MODULES]
    assert {words[0] for words in others} <= {"make", "pip", ".", "pytest", "git"}
    named = {word for words in others if words[0] == "make" for word in words[1:] if "=" not in word}
    inline = {name for page in PAGES for name in re.findall(r"`make ([a-z]+)", text_of(page))}
    assert named | inline <= targets | {"distclean"}


# --- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them in links."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_files_and_modules_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`([\w./]+)`", text_of(page))
    files = [
        name for name in named if re.search(r"[a-z]/|\.(py|json|md|toml|txt)$", name) and "NAME" not in name
    ]
    near = [ROOT, (ROOT / page).parent, ROOT / "piecewise_graph"]
    assert not [name for name in files if not any((folder / name).exists() for folder in near)]
    for name in named:
        if re.fullmatch(r"piecewise_graph(\.\w+)+", name):
            assert pydoc.locate(name) is not None, name


# --- figures --------------------------------------------------------------------------------------


def test_every_section_of_the_benchmarks_names_its_command_and_its_results() -> None:
    for title, text in sections("benchmarks/README.md").items():
        named = re.findall(r"\[results/(\w+\.json)\]\(results/\1\)", text)
        assert named, title
        for name in named:
            assert (RESULTS / name).exists(), name
            modules = re.findall(r"`python -m benchmarks\.(\w+)", text)
            assert any(name.startswith(module) for module in modules), title  # bench_trust_cuda.json too


def test_all_results_are_described_and_all_named_exist() -> None:
    existing = {path.name for path in RESULTS.glob("*.json")}
    assert set(re.findall(r"results/(\w+\.json)", text_of("benchmarks/README.md"))) == existing
    elsewhere = {name for page in PAGES for name in re.findall(r"results/([a-z_]+\.json)", text_of(page))}
    assert elsewhere <= existing


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return found


def test_tables_of_the_comparison_are_those_of_its_results() -> None:
    tables = markdown(rows("bench_compare.json"))
    missing = set(re.findall(r"^\|.*\|$", tables, re.MULTILINE)) - set(
        text_of("benchmarks/README.md").splitlines()
    )
    assert not missing


SIDES = {
    "eager": "eager",
    "`torch.compile`": "compile",
    '`torch.compile(mode="reduce-overhead")`': "reduce-overhead",
    "piecewise-cuda-graphs around `torch.compile`": "meta",
    "`torch.cuda.graph` around `torch.compile`, no checks": "raw",
    "ours, through Dynamo's guards": "unfrozen",
    "ours, frozen (`pg.freeze`)": "piecewise",
    "ours, frozen, one full graph": "full",
}


def test_the_small_table_is_that_of_the_results() -> None:
    found = {
        (row["side"], row["shape"], row["tokens"]): row["ms"]
        for row in rows("bench_compare.json")
        if row["kind"] == "forward"
    }
    text = sections("README.md")["Beside the other ways"]
    assert dict(re.findall(r"^\| (\S.*?) \| (\d[\d.| ]*) \|$", text, re.MULTILINE)) == {
        name: " | ".join(f"{found[side, shape, n]:.2f}" for shape in ("8b", "1b") for n in (1, 32, 512))
        for name, side in SIDES.items()
    }


def test_times_against_eager_are_those_of_the_results() -> None:
    timed = [row for row in rows("bench_backend.json") if "eager_ms" in row]
    assert len(timed) == 8
    text = text_of("benchmarks/README.md")
    for row in timed:
        cells = row["shape"], row["tokens"], f"{row['eager_ms']:.2f}", f"{row['piecewise_ms']:.2f}"
        assert f"| {' | '.join(map(str, cells))} | {row['speedup_eager']:.2f}x |" in text
    first = timed[0]
    assert (first["shape"], first["tokens"]) == ("Llama-3.2-1B", 1)
    claim = f"takes {first['piecewise_ms']:.2f} ms instead of eager's {first['eager_ms']:.2f}"
    assert claim in " ".join(text_of("README.md").split())


# --- what the tables list -------------------------------------------------------------------------


def test_every_option_is_listed_with_its_default() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|", sections("piecewise_graph/README.md")["Options"], re.MULTILINE
    )
    assert listed == [
        (field.name, repr(field.default).replace("'", '"')) for field in fields(pg.PiecewiseConfig)
    ]


def test_every_public_name_is_described() -> None:
    text = text_of("piecewise_graph/README.md")
    assert not [name for name in pg.__all__ if f"pg.{name}" not in text and name != "PiecewiseConfig"]
