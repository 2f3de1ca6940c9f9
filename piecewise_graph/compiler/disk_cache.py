"""Compiled segments on disk, so that the next process starts warm (option `cache_dir`).

One file per distinct structure, named by its key (Note [Key for other processes] in segment_key.py). A file
is written whole under another name and then renamed, so that processes may share a folder, and is deleted
freely: what is missing is compiled again. Weights are not in it.

Note [Trust]
A file holds code that loading runs: Python, binaries for the GPU, shared libraries. Hence a file is read only
if it belongs to the user who runs the process, in a folder that belongs to him or to root, both of them
writable by nobody else. A checksum guards against damage, not against an attacker, who could make one.

Note [Never an error]
Whatever is wrong with a file or the folder (absent, damaged, by another torch, somebody else's, disk full)
costs the time of a compile and is counted with its reason; the next write replaces what was bad.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.segment_key import Conditions, Key, accept, conditions_since
from piecewise_graph.telemetry import counters

_MAGIC = b"piecewise-graph segment\n"
_LENGTH = 8
_DIGEST = 32
_HEADER = len(_MAGIC) + _LENGTH + _DIGEST
_SUFFIX = ".segment"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class Made:
    """A segment ready to run; `note` says why a file was there and not used, or none was written."""

    run: Callable[..., Any]
    from_cache: bool
    note: str | None


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


class Rejected(Exception):
    """A file is there and cannot be used; the text is the counted reason."""


def load_or_compile(folder: str, key: Key | str, gm: GraphModule, inputs: Sequence[Any], given: int) -> Made:
    """The compiled segment `gm`, from `folder` if it is there, else compiled and left there.

    Args:
        key: for other processes, or why there is none.
        given: conditions on sizes that the model's trace came with.

    Raises:
        what `_torch.compile_segment` raises; the cache adds nothing.
    """
    if isinstance(key, str):
        counters.add("cache_unsaved", reason=key)
        return Made(_torch.compile_segment(gm, inputs, "inductor"), False, key)
    rejected = None
    try:
        run = _load(folder, key, _torch.shape_env_of(gm))
    except Rejected as why:
        run, rejected = None, str(why)
        counters.add("cache_rejected", reason=rejected)
    counters.add("cache_misses" if run is None else "cache_hits")
    if run is not None:
        return Made(run, True, None)
    known = len(_torch.code_modules())
    run = _torch.compile_segment(gm, inputs, "inductor")
    unsaved = _save(folder, key, run, known, conditions_since(given, key, _torch.shape_env_of(gm)))
    if unsaved is not None:
        counters.add("cache_unsaved", reason=unsaved)
    return Made(run, False, rejected or unsaved)


def is_filled(folder: str | None) -> bool:
    """Whether there is anything that could be loaded; a guess, which costs nothing if it is wrong."""
    try:
        return folder is not None and any(entry.name.endswith(_SUFFIX) for entry in os.scandir(folder))
    except OSError:
        return False


def _load(folder: str, key: Key, shape_env: Any) -> Callable[..., Any] | None:
    content = read_private(folder, file_name(key.digest))
    if content is None:
        return None
    entry = unpack(content)
    if entry.key != key.digest:
        raise Rejected("other_key")
    try:
        run, conditions = _run_of(entry), pickle.loads(entry.conditions)
    except Exception as error:
        raise Rejected("load_failed") from error
    if not accept(conditions, key, shape_env):
        raise Rejected("sizes")
    return run


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


def _save(folder: str, key: Key, run: Any, known: int, conditions: Conditions | None) -> str | None:
    """Leave a segment compiled after the first `known` modules for other processes; else say why not."""
    if conditions is None:
        return "sizes_elsewhere"
    try:
        entry = Entry(key.digest, _artifact(run), pickle.dumps(conditions), _libraries(known))
    except Exception:  # of many kinds: whatever torch cannot serialise
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
    """Magic, length and checksum of the rest; the rest is a line of JSON and then plain bytes."""
    parts = [entry.artifact, entry.conditions, *entry.libraries.values()]
    table = {"key": entry.key, "lengths": list(map(len, parts)), "libraries": list(entry.libraries)}
    body = b"".join([json.dumps(table).encode(), b"\n", *parts])
    return _MAGIC + len(body).to_bytes(_LENGTH, "big") + hashlib.sha256(body).digest() + body


def unpack(content: bytes) -> Entry:
    """The opposite of pack.

    Raises:
        Rejected: foreign, truncated, checksum.
    """
    body = content[_HEADER:]
    if not content.startswith(_MAGIC):
        raise Rejected("foreign" if content else "truncated")
    if len(content) < _HEADER or len(body) != int.from_bytes(content[len(_MAGIC) :][:_LENGTH], "big"):
        raise Rejected("truncated")
    if hashlib.sha256(body).digest() != content[_HEADER - _DIGEST : _HEADER]:
        raise Rejected("checksum")
    line, _, rest = body.partition(b"\n")
    table = json.loads(line)
    parts = []
    for length in table["lengths"]:
        parts.append(rest[:length])
        rest = rest[length:]
    artifact, conditions, *libraries = parts
    return Entry(table["key"], artifact, conditions, dict(zip(table["libraries"], libraries, strict=True)))


# --- files ----------------------------------------------------------------------------------------


def read_private(folder: str, name: str) -> bytes | None:
    """The content of a file that nobody else can have written (Note [Trust]); None if there is none.

    The folder and the file are opened once and checked as opened, so that nothing can be swapped between.

    Raises:
        Rejected: somebody else's, writable by others, unreadable.
    """
    if not hasattr(os, "geteuid"):
        raise Rejected("no_file_owners")
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Rejected("unreadable") from error
    try:
        _check_private(os.fstat(inside), "folder", (os.geteuid(), 0))
        # Not a link, and not a pipe that would keep us waiting.
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
        with open(found, "rb") as file:
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode):
                raise Rejected("no_file")
            _check_private(status, "file", (os.geteuid(),))
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Rejected("unreadable") from error
    finally:
        os.close(inside)


def _check_private(status: os.stat_result, what: str, owners: Sequence[int]) -> None:
    if status.st_uid not in owners:
        raise Rejected(f"{what}_of_another_user")
    if status.st_mode & _OTHERS_WRITE:
        raise Rejected(f"{what}_writable_by_others")


def write_private(folder: str, name: str, content: bytes) -> str | None:
    """Put a whole file into `folder`, made if need be; else the reason why not."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _check_private(os.stat(folder), "folder", (os.geteuid(), 0))
        _write_whole(Path(folder, name), content)
    except Rejected as why:
        return str(why)
    except (OSError, AttributeError):  # AttributeError: a system without owners of files
        return "unwritable"
    return None


def _write_whole(path: Path, content: bytes) -> None:
    """Whoever opens `path` sees all of `content`, or what was there before."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
