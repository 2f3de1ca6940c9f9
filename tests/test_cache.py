"""cache_dir: the next process loads what this one compiled, and nothing that lies there can do harm."""

from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from internals import replace_compile
from toys import WIDTH, Blocks, assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.compiler import disk_cache, segment_key
from piecewise_graph.splitter.split import split

LAYERS = 3
DISTINCT = 3  # first, middle, last

# Looking for the CPU's vector units starts processes and compilers; what they find is true on any machine.
QUICK_START = {"TORCHINDUCTOR_VEC_ISA_OK": "1"}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_start() -> Iterator[None]:
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": True}):
        yield


# --- other processes ----------------------------------------------------------------------------------

SCRIPT = """
import json, sys, time
import torch
sys.path.insert(0, sys.argv[1])
from toys import Blocks, compiled, rows
import piecewise_graph as pg

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
    """A process with an Inductor cache of its own, so that only cache_dir can make it warm."""
    private.mkdir()
    environment = os.environ | QUICK_START | {"TORCHINDUCTOR_CACHE_DIR": str(private)}
    arguments = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(folder), json.dumps(seeds)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found: list[dict[str, Any]] = json.loads(out)
    return found


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


def model(x: torch.Tensor) -> torch.Tensor:
    return ops.mix(x.sin() * 2 + 1)


def run(folder: Path, count: int = 5, **options: Any) -> Any:
    """A model of one segment, compiled anew as a new process would; returns what pg.compile returned."""
    torch._dynamo.reset()
    fast = compiled(model, **({"compiler": "inductor", "cache_dir": folder} | options))
    x = rows(count, torch.device("cpu"))
    assert_same(fast(x), model(x))
    return fast


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("original")
    with torch.no_grad():
        run(folder)
    (file,) = folder.iterdir()
    return file.read_bytes()


@pytest.fixture
def folder(tmp_path: Path, original: bytes) -> Path:
    """A folder with the compiled segment of `model`."""
    found = tmp_path / "segments"
    found.mkdir(mode=0o700)
    only_file(found, original)
    return found


def only_file(folder: Path, content: bytes | None = None) -> Path:
    if content is not None:
        file = folder / disk_cache.file_name(disk_cache.unpack(content).key)
        file.write_bytes(content)
        file.chmod(0o600)
    (file,) = folder.glob("*.segment")
    return file


def hit() -> Any:
    return pg.counters.expect(compiles=0, cache_hits=1, cache_misses=0, cache_rejected=0, cache_unsaved=0)


def missed(rejected: str | None = None, unsaved: str | None = None) -> Any:
    reasons = {f"cache_rejected:{rejected}": 1} if rejected else {}
    reasons |= {f"cache_unsaved:{unsaved}": 1} if unsaved else {}
    counts = {"cache_rejected": int(rejected is not None), "cache_unsaved": int(unsaved is not None)}
    return pg.counters.expect(compiles=1, cache_hits=0, cache_misses=1, **counts, **reasons)


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


def test_environment_names_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_CACHE_DIR", str(folder))
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "inductor")
    assert pg.PiecewiseConfig.from_options(None).cache_dir == str(folder)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_other_compilers_leave_nothing(compiler: str, tmp_path: Path) -> None:
    with pg.counters.expect(compiles=1, cache_hits=0, cache_misses=0):
        run(tmp_path / "none", compiler=compiler)
    assert not (tmp_path / "none").exists()


def test_weights_are_not_in_the_file(tmp_path: Path) -> None:
    """A layer of 16 MiB leaves a file that is far smaller, and other weights use it."""
    for seed, expected in ((0, {"cache_hits": 0, "compiles": 3}), (1, {"cache_hits": 3, "compiles": 0})):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        wide = Blocks(LAYERS, width=2048)
        with pg.counters.expect(**expected):
            x = rows(3, torch.device("cpu"), width=2048)
            assert_same(compiled(wide, compiler="inductor", cache_dir=tmp_path)(x), wide(x))
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < wide.linears[0].weight.nbytes // 4


# --- damage -------------------------------------------------------------------------------------------


def repacked(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: disk_cache.pack(disk_cache.Entry(**(vars(disk_cache.unpack(content)) | changes)))


def flipped(position: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        at = int(position * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return flip


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "truncated"),
        (lambda content: content[:40], "truncated"),
        (lambda content: content[: len(content) // 2], "truncated"),
        (lambda content: content[:-1], "truncated"),
        (lambda content: content + b"\0", "truncated"),
        (flipped(0.0), "foreign"),
        (lambda content: b"PK\3\4" + content, "foreign"),
        (flipped(0.5), "checksum"),
        (flipped(1.0), "checksum"),
        (repacked(key="0" * 64), "other_key"),
        (repacked(artifact=b"no artifact"), "load_failed"),
        (repacked(artifact=b""), "load_failed"),
        (repacked(conditions=b"no pickle"), "load_failed"),
    ],
)
def test_damaged_file_is_not_used_and_is_replaced(
    damage: Callable[[bytes], bytes], reason: str, folder: Path
) -> None:
    file = only_file(folder)
    file.write_bytes(damage(file.read_bytes()))
    with missed(rejected=reason):
        fast = run(folder)
    assert pg.explain(fast).traces[0].cache_notes == {reason: 1}
    assert f"cache_dir: {reason} (1 structures)" in str(pg.explain(fast))
    with hit():
        run(folder)


def test_artifact_of_another_torch_under_our_key_is_not_used(folder: Path) -> None:
    """The key makes it a miss already; if all versions lied, Inductor's own check would still hold."""
    file = only_file(folder)
    entry = disk_cache.unpack(file.read_bytes())
    from torch._inductor.codecache import torch_key

    assert torch_key() in entry.artifact
    stale = entry.artifact.replace(torch_key(), bytes(len(torch_key())))
    file.write_bytes(repacked(artifact=stale)(file.read_bytes()))
    with missed(rejected="load_failed"):
        run(folder)


# --- somebody else's ----------------------------------------------------------------------------------


def test_file_or_folder_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    reason = "file_of_another_user" if own == 0 else "folder_of_another_user"
    with missed(rejected=reason, unsaved=None if own == 0 else reason):
        run(folder)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_folder_that_others_can_write_to_is_neither_read_nor_written(mode: int, folder: Path) -> None:
    before = only_file(folder).read_bytes()
    folder.chmod(mode)
    with missed(rejected="folder_writable_by_others", unsaved="folder_writable_by_others"):
        run(folder)
    assert only_file(folder).read_bytes() == before


def test_file_that_others_can_write_to_is_replaced_by_one_they_cannot(folder: Path) -> None:
    only_file(folder).chmod(0o666)
    with missed(rejected="file_writable_by_others"):
        run(folder)
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_nothing_but_a_plain_file_is_opened(folder: Path, tmp_path: Path) -> None:
    """A link may lead anywhere; a pipe would wait for ever."""
    file = only_file(folder)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with missed(rejected="unreadable"):
        run(folder)
    assert not file.is_symlink()
    file.unlink()
    os.mkfifo(file)
    with missed(rejected="no_file"):
        run(folder)


# --- nowhere to write ---------------------------------------------------------------------------------


def test_folder_that_cannot_be_made_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with missed(rejected="unreadable", unsaved="unwritable"):
        run(tmp_path / "file" / "segments")


def test_full_disk_is_harmless_and_leaves_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, missed(unsaved="unwritable"):
        patch.setattr(os, "replace", full)
        fast = run(tmp_path)
    assert pg.explain(fast).traces[0].cache_notes == {"unwritable": 1}
    assert list(tmp_path.iterdir()) == []
    with missed():
        run(tmp_path)


def test_readers_never_see_part_of_a_file(tmp_path: Path) -> None:
    name = disk_cache.file_name("k")
    entries = [disk_cache.Entry("k", bytes([n]) * 300_000, b"", {}) for n in range(4)]
    done = threading.Event()

    def write(entry: disk_cache.Entry) -> None:
        while not done.is_set():
            assert disk_cache.write_private(str(tmp_path), name, disk_cache.pack(entry)) is None

    writers = [threading.Thread(target=write, args=(entry,)) for entry in entries]
    for writer in writers:
        writer.start()
    tmp_path.chmod(0o700)
    seen = [disk_cache.read_private(str(tmp_path), name) for _ in range(300)]
    done.set()
    for writer in writers:
        writer.join()
    assert all(disk_cache.unpack(content) in entries for content in seen if content is not None)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_cache_of_inductor_that_is_off_is_harmless(tmp_path: Path) -> None:
    from torch._inductor import config

    with config.patch({"fx_graph_cache": False}), missed(unsaved="not_serializable"):
        run(tmp_path)


# --- conditions on sizes ------------------------------------------------------------------------------


@pytest.fixture
def not_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Inductor had found that its code is right for any number of tokens but 7."""

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
        assert "conditions: Ne(" in pg.explain(fast).traces[0].sizes
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


# --- what has no key ----------------------------------------------------------------------------------


def unsaved(reason: str) -> Any:
    counts = {"cache_misses": 0, "cache_hits": 0, f"cache_unsaved:{reason}": 1}
    return pg.counters.expect(**counts)


def test_graph_that_holds_graphs_has_no_key() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))

    with pytest.raises(AssertionError, match="holds_objects"):
        digest(branch)


@torch.compiler.allow_in_graph
def allowed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_function_of_the_users_has_no_key() -> None:
    with pytest.raises(AssertionError, match="python_function"):
        digest(lambda x: allowed(x) + 1)


def test_op_that_tracing_opens_is_not_saved(tmp_path: Path) -> None:
    """Its Python code becomes part of what is compiled, and may change under the same name."""
    with torch.library._scoped_library("opened", "FRAGMENT") as library, unsaved("not_opaque"):
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        torch._dynamo.reset()
        x = rows(3, torch.device("cpu"))
        fast = compiled(lambda x: ops.mix(torch.ops.opened.twice(x)), compiler="inductor", cache_dir=tmp_path)
        assert_same(fast(x), ops.mix(x + x))
    assert list(tmp_path.iterdir()) == []


# --- the key ------------------------------------------------------------------------------------------


def digest(function: Callable[..., Any] = torch.sin, x: Any = None, **mark: int) -> str:
    """Key of the first segment of `function(x)`; no compile."""
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(segment_key.portable_key(split(gm).segments[0].gm))
        return gm.forward

    torch._dynamo.reset()
    x = rows(5, torch.device("cpu")) if x is None else x
    torch._dynamo.mark_dynamic(x, 0, **mark)
    torch.compile(function, backend=backend)(x)
    assert isinstance(found[0], segment_key.Key), found[0]
    return found[0].digest


def test_key_does_not_depend_on_values_or_names() -> None:
    def named(tokens: torch.Tensor) -> torch.Tensor:
        other_name = torch.sin(tokens)
        return other_name

    assert len({digest(), digest(), digest(named), digest(x=rows(7, torch.device("cpu")))}) == 1


KINDS: dict[str, Callable[[], str]] = {
    "as it is": digest,
    "op": lambda: digest(torch.cos),
    "constant": lambda: digest(lambda x: x.sin() * 2),
    "other constant": lambda: digest(lambda x: x.sin() * 3),
    "type of a constant": lambda: digest(lambda x: x.sin() * 2.0),
    "dtype": lambda: digest(x=torch.ones(5, WIDTH, dtype=torch.bfloat16)),
    "width": lambda: digest(x=torch.ones(5, 2 * WIDTH)),
    "strides": lambda: digest(x=torch.ones(5, 2 * WIDTH)[:, ::2]),
    "offset": lambda: digest(x=torch.ones(5 * WIDTH + 1)[1:].view(5, WIDTH)),
    "parameter": lambda: digest(x=torch.nn.Parameter(torch.ones(5, WIDTH), requires_grad=False)),
    "range": lambda: digest(min=3, max=100),
    "magnitude while tracing": lambda: digest(x=torch.ones(300, WIDTH)),
    "condition of the trace": lambda: digest(lambda x: x.sin() if x.shape[0] % 4 == 1 else x),
}


def test_key_tells_structures_apart() -> None:
    found = {name: make() for name, make in KINDS.items()}
    assert len(set(found.values())) == len(found), found


def patched(where: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, value)


def switched(put: Callable[[Any], None], value: Any, back: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        undo.append(lambda: put(back))
        put(value)

    return change


undo: list[Callable[[], None]] = []


def option(module: str, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        import importlib

        context = importlib.import_module(module).patch({name: value})
        context.__enter__()
        undo.append(lambda: context.__exit__(None, None, None))

    return change


@pytest.mark.parametrize(
    "change",
    [
        patched(torch.version, "__version__", "9.9"),
        patched(torch.version, "git_version", "0" * 40),
        patched(torch.version, "cuda", "99.9"),
        patched(segment_key, "_installed", lambda package: "9.9"),
        patched(segment_key, "FORMAT", 10**6),
        patched(segment_key, "_cpu", lambda: "another CPU"),
        patched(segment_key.platform, "python_version", lambda: "9.9"),
        patched(torch.backends.cpu, "get_cpu_capability", lambda: "VAX"),
        switched(torch.set_default_dtype, torch.bfloat16, torch.float32),
        switched(torch.use_deterministic_algorithms, True, False),
        switched(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
        switched(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
        option("torch._inductor.config", "epilogue_fusion", False),
        option("torch._inductor.config", "coordinate_descent_tuning", True),
        option("torch._inductor.config", "triton.max_tiles", 3),
        option("torch._functorch.config", "functionalize_rng_ops", True),
    ],
)
def test_key_follows_versions_machine_and_options(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest()
    try:
        change(monkeypatch)
        assert digest() != before
    finally:
        monkeypatch.undo()
        while undo:
            undo.pop()()
    assert digest() == before


def test_stale_files_are_left_alone_and_missed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)
    with missed():
        run(folder)
    assert len(list(folder.iterdir())) == 2


def test_pass_that_a_user_added_has_no_key() -> None:
    from torch._inductor import config

    class Pass:
        def __call__(self, graph: Any) -> None:
            pass

    with config.patch({"post_grad_custom_post_pass": Pass()}), pytest.raises(AssertionError, match="unnamed"):
        digest()


def test_key_is_the_same_whatever_the_order_of_sets() -> None:
    """Options print in one order in every process."""
    script = "from piecewise_graph import _torch; print(_torch.compile_options())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
