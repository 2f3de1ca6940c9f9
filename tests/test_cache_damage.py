"""cache_dir: files that are damaged, foreign or out of reach do no harm."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_cases import hit, missed, only_file, run

import piecewise_graph as pg
from piecewise_graph.compiler import disk_cache

pytestmark = pytest.mark.usefixtures("no_grad")


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
    """The key would make this a miss. If the key lied, Inductor's own check would still refuse the file."""
    file = only_file(folder)
    entry = disk_cache.unpack(file.read_bytes())
    from torch._inductor.codecache import torch_key

    assert torch_key() in entry.artifact
    stale = entry.artifact.replace(torch_key(), bytes(len(torch_key())))
    file.write_bytes(repacked(artifact=stale)(file.read_bytes()))
    with missed(rejected="load_failed"):
        run(folder)


def test_stale_files_are_left_alone_and_missed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "git_version", "0" * 40)
    with missed():
        run(folder)
    assert len(list(folder.iterdir())) == 2


# --- files and folders of other users -----------------------------------------------------------------


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
    """A link may lead anywhere, and opening a pipe would block for ever."""
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


def test_folder_that_is_only_read_serves_and_is_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system mounted read-only; root may write to every other folder."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with hit():
        run(folder)
    only_file(folder).unlink()
    with missed(unsaved="unwritable"):
        run(folder)


def test_folder_removed_in_between_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(folder)
    with missed():
        run(folder)
    only_file(folder)
    write, made = disk_cache._write_whole, []

    def removed(path: Path, content: bytes) -> None:
        made.append(path)
        shutil.rmtree(folder)  # after it was checked, before it is written to
        write(path, content)

    shutil.rmtree(folder)
    monkeypatch.setattr(disk_cache, "_write_whole", removed)
    with missed(unsaved="unwritable"):
        run(folder)
    assert made


WRITER = """
import sys
from pathlib import Path
from piecewise_graph.compiler import disk_cache
entry = disk_cache.Entry(disk_cache.unpack(Path(sys.argv[2]).read_bytes()).key, bytes(1 << 27), b"", {})
print("ready", flush=True)
while True:
    disk_cache.write_private(sys.argv[1], "other.segment", disk_cache.pack(entry))
"""


def test_killed_writer_leaves_nothing_that_is_read_and_its_rest_is_cleared(folder: Path) -> None:
    """kill -9 in the middle of a file: what it has written so far has another name."""
    command = [sys.executable, "-c", WRITER, str(folder), str(only_file(folder))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        while not list(folder.glob(".partial-*")):
            assert writer.poll() is None
            time.sleep(0.001)
        writer.kill()
    (folder / "other.segment").unlink(missing_ok=True)
    partial = folder / ".partial-left"
    partial.write_bytes(b"half of a file")
    with hit():
        run(folder)
    only_file(folder).unlink()
    for file in folder.glob(".partial-*"):
        os.utime(file, (1, 1))  # long ago
    (folder / ".partial-new").write_bytes(b"another process is about to rename it")
    with missed():
        run(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".partial-new", only_file(folder).name]


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
