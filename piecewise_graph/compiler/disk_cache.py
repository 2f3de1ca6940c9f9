"""Compiled segments on disk, so that the next process starts warm (option `cache_dir`).

One file per distinct structure, named by its key (Note [Key for other processes] in segment_key.py). A file
is written under another name and then renamed, so processes may share a folder. Files may be deleted at any
time: a missing one is compiled again. Weights are not in them.

Note [Trust]
Loading a file runs code: Python, GPU binaries, shared libraries. So a file is read only if it belongs to the
user who runs the process, its folder belongs to that user or to root, and no other user can write to either.
The checksum guards against damage, not against an attacker, who could compute it too.

Never an error: a bad file or folder (absent, damaged, of another torch or user, disk full) costs the time of
a compile. Its reason is counted, and the next write replaces it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.segment_key import Conditions, Key, accept, conditions_since
from piecewise_graph.telemetry import counters

_MAGIC = b"piecewise-graph segment 2\n"
_LENGTH = 8
_DIGEST = 32
_HEADER = len(_MAGIC) + _LENGTH + _DIGEST
_SUFFIX, _PARTIAL = ".segment", ".partial-"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Made:
    """A segment ready to run; `reason` says why a file was there and not used, or none was written."""

    run: Callable[..., Any]
    from_cache: bool
    reason: str | None


@dataclass(frozen=True)
class Entry:
    """What a file holds.

    Attributes:
        key: digest of the Key.
        artifact: Inductor's.
        conditions: pickled, Note [Conditions that come with code] in segment_key.py.
        libraries: C++ kernels, which Inductor's artefact lacks: path in Inductor's cache -> content.
    """

    key: str
    artifact: bytes
    conditions: bytes
    libraries: Mapping[str, bytes]


def load_or_compile(
    folder: Folder, key: Key | str, gm: GraphModule, inputs: Sequence[Any], given: int
) -> Made:
    """The compiled segment `gm`, from `folder` if it is there, else compiled and left there.

    Args:
        key: for other processes, or the reason why there is none.
        given: how many guards on sizes the model's trace came with.

    Raises:
        what `_torch.compile_segment` raises; the cache adds nothing.
    """
    if isinstance(key, str):
        counters.add("cache_unsaved", reason=key)
        return Made(_torch.compile_segment(gm, inputs, "inductor"), False, key)
    found = _load(folder, key, _torch.shape_env_of(gm))
    if callable(found):
        counters.add("cache_hits")
        return Made(found, True, None)
    counters.add("cache_misses")
    if found is not None:
        counters.add("cache_rejected", reason=found)
    known = len(_torch.code_modules())
    run = _torch.compile_segment(gm, inputs, "inductor")
    unsaved = _save(folder, key, run, known, conditions_since(given, key, _torch.shape_env_of(gm)))
    if unsaved is not None:
        counters.add("cache_unsaved", reason=unsaved)
    return Made(run, False, found or unsaved)


def is_filled(folder: Folder | None) -> bool:
    """Whether the folder holds compiled segments; they may be of other models."""
    try:
        return folder is not None and any(entry.name.endswith(_SUFFIX) for entry in os.scandir(folder))
    except OSError:
        return False


def _load(folder: Folder, key: Key, shape_env: Any) -> Callable[..., Any] | str | None:
    """The compiled segment, the reason why its file is not used, or None where there is no file."""
    content = read_private(folder, file_name(key.digest))
    entry = unpack(content) if isinstance(content, bytes) else content
    if not isinstance(entry, Entry):
        return entry
    if entry.key != key.digest:
        return "other_key"
    try:
        run, conditions = _run_of(entry), pickle.loads(entry.conditions)
    except Exception:  # loading code may raise anything
        return "load_failed"
    return run if accept(conditions, key, shape_env) else "sizes"


def _run_of(entry: Entry) -> Callable[..., Any]:
    for name, library in entry.libraries.items():
        path = Path(_torch.inductor_cache_dir(), name)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, library)
    with tempfile.TemporaryDirectory() as private:
        path = Path(private, "artifact")
        path.write_bytes(entry.artifact)
        return _torch.load_artifact(str(path))


def _save(folder: Folder, key: Key, run: Any, known: int, conditions: Conditions | None) -> str | None:
    """Leave a segment compiled after the first `known` modules for other processes; or the reason why not."""
    if conditions is None:
        return "sizes_elsewhere"
    try:
        entry = Entry(key.digest, _artifact(run), pickle.dumps(conditions), _libraries(known))
    except Exception:  # torch raises many kinds for what it cannot serialise
        return "not_serializable"
    return write_private(folder, file_name(key.digest), pack(entry))


def _artifact(run: Any) -> bytes:
    with tempfile.TemporaryDirectory() as private:
        path = Path(private, "artifact")
        run.save(path=str(path), format="binary")
        return path.read_bytes()


def _libraries(known: int) -> dict[str, bytes]:
    """Shared libraries that hold the kernels of the modules beyond the first `known`."""
    values = [value for module in _torch.code_modules()[known:] for value in vars(module).values()]
    files = {str(getattr(getattr(value, "__self__", None), "__file__", None)) for value in values}
    root = _torch.inductor_cache_dir()
    return {os.path.relpath(f, root): Path(f).read_bytes() for f in sorted(files) if f.endswith(".so")}


# --- the format -----------------------------------------------------------------------------------


def file_name(digest: str) -> str:
    return digest + _SUFFIX


def pack(entry: Entry) -> bytes:
    """Magic, length and checksum of the rest; the rest is the entry's fields, pickled."""
    body = pickle.dumps(vars(entry))
    return _MAGIC + len(body).to_bytes(_LENGTH, "big") + hashlib.sha256(body).digest() + body


def unpack(content: bytes) -> Entry | str:
    """The opposite of pack; or the reason why `content` is not what pack wrote."""
    body = content[_HEADER:]
    if not content.startswith(_MAGIC):
        return "foreign" if content else "truncated"
    if len(content) < _HEADER or len(body) != int.from_bytes(content[len(_MAGIC) :][:_LENGTH], "big"):
        return "truncated"
    if hashlib.sha256(body).digest() != content[_HEADER - _DIGEST : _HEADER]:
        return "checksum"
    return Entry(**pickle.loads(body))


# --- files ----------------------------------------------------------------------------------------


def read_private(folder: Folder, name: str) -> bytes | str | None:
    """The content of a file that no other user can have written (Note [Trust]).

    The folder and the file are opened once and checked as opened, so that nothing can be swapped between.

    Returns:
        the content, the reason why it is not read, or None where there is no file.
    """
    if not hasattr(os, "geteuid"):
        return "no_file_owners"
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return _not_private(os.fstat(inside), "folder", (os.geteuid(), 0)) or _read(inside, name)
        finally:
            os.close(inside)
    except FileNotFoundError:
        return None
    except OSError:
        return "unreadable"


def _read(folder: int, name: str) -> bytes | str:
    # Not a link, and not a pipe that would keep us waiting.
    handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return "no_file"
        return _not_private(status, "file", (os.geteuid(),)) or file.read()


def _not_private(status: os.stat_result, what: str, owners: Sequence[int]) -> str | None:
    """The reason why others than `owners` may have written it."""
    if status.st_uid not in owners:
        return f"{what}_of_another_user"
    return f"{what}_writable_by_others" if status.st_mode & _OTHERS_WRITE else None


def write_private(folder: Folder, name: str, content: bytes) -> str | None:
    """Put a whole file into `folder`, made if need be; or the reason why not."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        reason = _not_private(os.stat(folder), "folder", (os.geteuid(), 0))
        if reason is None:
            _clear_partials(Path(folder))
            _write_whole(Path(folder, name), content)
        return reason
    except (OSError, AttributeError):  # AttributeError: a system without owners of files
        return "unwritable"


def read_measured(folder: Folder, key: str, suffix: str) -> dict[str, Any]:
    """The fields that `write_measured` has left under `key`; none where the file is missing or bad."""
    content = read_private(folder, _measured_name(key, suffix))
    try:
        found = json.loads(content) if isinstance(content, bytes) else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("key") == key else {}


def write_measured(folder: Folder, key: str, suffix: str, **fields: Any) -> None:
    """Leave what was measured, and all that it depends on (`key`), as JSON."""
    write_private(folder, _measured_name(key, suffix), json.dumps({"key": key, **fields}).encode())


def _measured_name(key: str, suffix: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() + suffix


def _clear_partials(folder: Path) -> None:
    """Remove what writers that were killed have left; nobody writes for an hour."""
    for partial in folder.glob(_PARTIAL + "*"):
        with suppress(OSError):  # another process may be doing the same
            if time.time() - partial.stat().st_mtime > 3600:
                partial.unlink()


def _write_whole(path: Path, content: bytes) -> None:
    """Replace `path` at once: a reader sees all of `content`, or what was there before."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=_PARTIAL)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
