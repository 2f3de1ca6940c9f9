"""Small bugs that the suite has to notice: `make mutants` puts them in one at a time, and runs their tests.

    python tests/mutants.py             all of them
    python tests/mutants.py kv_write    those whose name or file contains the word

A mutant goes into a temporary copy of the checkout, never into the checkout. test_mutants.py holds that every
mutant still fits its file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 300  # seconds per mutant; a bug that hangs is noticed too


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        name: what is wrong with it in.
        file: from the root of the checkout.
        old, new: the text to replace, which occurs once, and what stands there with the bug.
        tests: arguments of pytest; at least one of these tests has to fail.
        interpreted: the tests run kernels in Triton's interpreter.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    interpreted: bool = False


def copy_checkout(to: Path) -> None:
    """Everything that git knows or would add, importable from `to`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    # The installed project would otherwise be asked for this package, and answer with the checkout's.
    (to / "piecewise_graph" / "custom_ops").symlink_to(to / "custom_ops")


@contextmanager
def put_in(mutant: Mutant, folder: Path) -> Iterator[None]:
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.name}: {text.count(mutant.old)} places in {mutant.file}"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def tests_pass(folder: Path, tests: str, *, interpreted: bool = False) -> tuple[bool, str]:
    """Whether tests pass in a copy of the checkout, and the end of what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *_split(tests)]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if interpreted:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return False, "no end"
    if done.returncode > 1:  # nothing was collected, a mistake in the arguments; below 0, a kernel ran wild
        raise SystemExit(f"pytest {tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, done.stdout[-2000:]


def _split(tests: str) -> list[str]:
    """File names and, after -k, one expression."""
    files, _, expression = tests.partition(" -k ")
    return [*files.split(), *(["-k", expression] if expression else [])]


def run(mutants: Sequence[Mutant]) -> int:
    """Print which mutants are noticed; how many are missed."""
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_checkout(folder)
        for mutant in mutants:
            began = time.perf_counter()
            with put_in(mutant, folder):
                passed, _ = tests_pass(folder, mutant.tests, interpreted=mutant.interpreted)
            missed += passed
            verdict, taken = "MISSED " if passed else "noticed", time.perf_counter() - began
            print(f"{verdict} {taken:5.1f} s  {mutant.file}: {mutant.name}", flush=True)
    print(f"{len(mutants) - missed} of {len(mutants)} noticed")
    return missed


if __name__ == "__main__":
    from mutant_list import MUTANTS

    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(w in f"{m.file}: {m.name}" for w in words)]
    sys.exit(bool(run(chosen)))
