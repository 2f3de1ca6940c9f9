"""cache_dir: another process, or this one after it forgot, loads what was compiled."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_cases import hit, missed, model, only_file, run
from internals import replace_compile
from toys import Blocks, assert_same, compiled, rows

import piecewise_graph as pg
from piecewise_graph.compiler import disk_cache

pytestmark = pytest.mark.usefixtures("no_grad")


LAYERS = 3
DISTINCT = 3  # first, middle, last


# --- other processes ----------------------------------------------------------------------------------

SCRIPT = """
import json, sys, time
import torch
sys.path.insert(0, sys.argv[1])
from cheap_traces import make_traces_cheap
from toys import Blocks, compiled, rows
import piecewise_graph as pg

make_traces_cheap()
found = []
with torch.no_grad():
    for seed in json.loads(sys.argv[3]):
        torch.manual_seed(seed)
        model, x = Blocks(3), rows(5, torch.device("cpu"))
        fast = compiled(model, compiler="inductor", cache_dir=sys.argv[2])
        y = fast(x)
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(fast(x[:1]), model(x[:1]))
        trace = pg.explain(fast).to_dict()["traces"][0]
        found.append({"y": y.tolist(), "counters": pg.counters.snapshot(), "trace": trace})
        pg.counters.clear()
        torch._dynamo.reset()
print(json.dumps(found))
"""


def start(folder: Path, private: Path, *seeds: int) -> subprocess.Popen[str]:
    """A process with an Inductor cache of its own, so that only cache_dir can make it warm.

    Headers that are compiled ahead would lie in that cache: to make them takes longer than they save here.
    """
    private.mkdir()
    own = {"TORCHINDUCTOR_CACHE_DIR": str(private), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    environment = os.environ | own
    arguments = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder), json.dumps(seeds)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found: list[dict[str, Any]] = json.loads(out)
    return found


@pytest.mark.slow
def test_processes_fill_one_folder_at_once_and_the_next_one_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "segments"
    writers = [start(folder, tmp_path / name, 0) for name in ("one", "other")]
    cold = [result(writer)[0] for writer in writers]
    for found in cold:
        assert found["counters"]["compiles"] + found["counters"]["cache_hits"] == DISTINCT
        assert found["counters"]["cache_rejected"] == found["counters"]["cache_unsaved"] == 0
    files = sorted(folder.iterdir())
    assert len(files) == DISTINCT
    for file in files:
        assert disk_cache.file_name(disk_cache.unpack(file.read_bytes()).key) == file.name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = [file.read_bytes() for file in files]

    same, others = result(start(folder, tmp_path / "next", 0, 1))
    for found in (same, others):
        assert found["counters"]["compiles"] == found["counters"]["cache_misses"] == 0
        assert found["counters"]["cache_hits"] == DISTINCT
        assert found["trace"]["from_cache"] == found["trace"]["distinct"] == DISTINCT
        assert found["trace"]["compile_seconds"] == 0
    assert same["y"] == cold[0]["y"]
    assert others["y"] != same["y"]  # other weights, compared with eager over there
    assert [file.read_bytes() for file in files] == before


# --- one process that forgets -------------------------------------------------------------------------


@pytest.mark.slow
def test_what_one_compile_leaves_the_next_one_finds(tmp_path: Path) -> None:
    with missed():
        assert "distinct structures compiled in" in str(pg.explain(run(tmp_path)))
    with hit():
        fast = run(tmp_path)
    (trace,) = pg.explain(fast).traces
    assert (trace.distinct, trace.from_cache, trace.compile_seconds, trace.cache_notes) == (1, 1, 0.0, {})
    assert trace.load_seconds > 0
    assert "1 distinct structures loaded from cache_dir in" in str(pg.explain(fast))


def test_folder_is_made_private(tmp_path: Path) -> None:
    run(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "inductor")
    assert pg.PiecewiseConfig.from_options(None).cache_dir == str(tmp_path)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_other_compilers_leave_nothing(compiler: str, tmp_path: Path) -> None:
    with pg.counters.expect(compiles=1, cache_hits=0, cache_misses=0):
        run(tmp_path / "none", compiler=compiler)
    assert not (tmp_path / "none").exists()


def test_weights_are_not_in_the_file(tmp_path: Path) -> None:
    """The file of a 16 MiB layer is far smaller, and a model with other weights loads it."""
    for seed, expected in ((0, {"cache_hits": 0, "compiles": 3}), (1, {"cache_hits": 3, "compiles": 0})):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        wide = Blocks(LAYERS, width=2048)
        with pg.counters.expect(**expected):
            x = rows(3, torch.device("cpu"), width=2048)
            assert_same(compiled(wide, compiler="inductor", cache_dir=tmp_path)(x), wide(x))
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < wide.linears[0].weight.nbytes // 4


# --- conditions on sizes ------------------------------------------------------------------------------


@pytest.fixture
def not_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Inductor find that its code is right for every token count except 7."""

    def compile_but_for_seven(compile_segment: Any, gm: Any, inputs: Any, compiler: str) -> Any:
        made = compile_segment(gm, inputs, compiler)
        size = next(x.shape[0] for x in inputs if isinstance(x, torch.Tensor))
        if size == 7:
            raise RuntimeError("not 7")
        return made

    replace_compile(monkeypatch, compile_but_for_seven)


@pytest.mark.usefixtures("not_seven")
def test_loaded_code_brings_its_conditions(tmp_path: Path) -> None:
    for expected in (missed(), hit()):
        with expected:
            fast = run(tmp_path, count=6)
        assert "where Ne(" in pg.explain(fast).traces[0].sizes
        for count in (8, 1, 3):
            x = rows(count, torch.device("cpu"))
            assert_same(fast(x), model(x))
        with pytest.raises(Exception, match="not 7"):  # 7 tokens get a trace of their own, which cannot be
            fast(rows(7, torch.device("cpu")))


def test_code_is_not_used_where_its_conditions_do_not_hold(tmp_path: Path, not_seven: None) -> None:
    run(tmp_path, count=6)
    entry = disk_cache.unpack(only_file(tmp_path).read_bytes())
    ((condition, names),) = pickle.loads(entry.conditions)
    assert list(names.values()) == ["c0"]
    assert condition.func.__name__ == "Unequality"
    with pytest.MonkeyPatch.context() as patch, missed(rejected="sizes"):
        replace_compile(patch, lambda original, gm, inputs, compiler: gm.forward)
        patch.setattr(disk_cache, "write_private", lambda *args: None)
        patch.setattr(disk_cache, "_artifact", lambda run: b"")
        run(tmp_path, count=7)
