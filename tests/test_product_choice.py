"""Which products of the library share a launch, from one process to the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import piecewise_graph as pg
from piecewise_graph.compiler.product_choice import kept_products
from piecewise_graph.kernels.linear import library_products

CPU = torch.device("cpu")
FOUND = {"torch.bfloat16 512 14336 4096": True, "torch.float16 560 14336 4096": False}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_products, "_timed", {})


def time_here(found: dict[str, bool], folder: Path) -> None:
    """As a compile that times these does, in a process of its own."""
    with kept_products(folder, {CPU}):
        library_products.remember(CPU, found)
    library_products._timed.clear()


def test_the_next_process_knows_what_was_timed(tmp_path: Path) -> None:
    time_here(FOUND, tmp_path)
    more = {"torch.bfloat16 576 14336 4096": True}
    with kept_products(tmp_path, {CPU}):
        assert library_products.timed_on(CPU) == FOUND
        assert library_products.timed_on(torch.device("cuda", 0)) == {}
        library_products.remember(CPU, more)
    library_products._timed.clear()
    with kept_products(tmp_path, {CPU}):
        assert library_products.timed_on(CPU) == FOUND | more
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_written_where_nothing_is_new_or_kept(tmp_path: Path) -> None:
    time_here({}, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    time_here(FOUND, tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    with kept_products(tmp_path, {CPU}):
        pass
    with kept_products(None, {CPU}):
        library_products.remember(CPU, {"torch.bfloat16 1 1 1": True})
    assert file.stat().st_mtime_ns == written and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "one_launch", [None, [], {"torch.bfloat16 512": True}, {"torch.int8 1 1 1": True}, {"": True}]
)
def test_a_bad_file_costs_timings(one_launch: object, tmp_path: Path) -> None:
    time_here(FOUND, tmp_path)
    (file,) = tmp_path.iterdir()
    key = json.loads(file.read_text())["key"]
    for content in (json.dumps({"key": key, "one_launch": one_launch}), "[]", "\x00", '{"key": "another"}'):
        file.write_text(content)
        with kept_products(tmp_path, {CPU}):
            assert library_products.timed_on(CPU) == {}
            library_products.remember(CPU, FOUND)
        library_products._timed.clear()
        assert json.loads(file.read_text())["one_launch"] == FOUND


def test_a_choice_of_other_hardware_or_versions_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_here(FOUND, tmp_path)
    monkeypatch.setattr(torch, "__version__", "0.0")
    monkeypatch.setattr(torch.version, "__version__", "0.0")
    with kept_products(tmp_path, {CPU}):
        assert library_products.timed_on(CPU) == {}


def test_a_compile_reads_what_its_folder_keeps(tmp_path: Path) -> None:
    time_here(FOUND, tmp_path)
    compiled = pg.compile(torch.nn.Linear(8, 8), token_dim={"input": 0}, cache_dir=tmp_path)
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    assert library_products.timed_on(CPU) == FOUND
