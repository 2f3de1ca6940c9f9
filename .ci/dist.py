"""`make dist`: build sdist and wheel, install the wheel into an empty environment, run README's first block.

The wheel is built from the unpacked sdist, so that the sdist is known to be complete. The environment lies
outside of the checkout. It sees the packages of the environment that runs this (torch is gigabytes), but not
an editable install in it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
_BUILT = (".git", ".venv", "venv", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
_BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="dist_") as folder:
        scratch = Path(folder)
        wheel = build(scratch)
        check_contents(wheel)
        python = install(wheel, scratch / "environment")
        run_readme(python, scratch)


def build(scratch: Path) -> Path:
    """Build both from a copy of the checkout, which stays as it is; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.copytree(ROOT, scratch / "checkout", ignore=shutil.ignore_patterns(*_BUILT), symlinks=True)
    run([sys.executable, "-c", _BUILD, "build_sdist", DIST], cwd=scratch / "checkout")
    (sdist,) = DIST.glob("*.tar.gz")
    shutil.unpack_archive(sdist, scratch / "sdist")
    (unpacked,) = (scratch / "sdist").iterdir()
    run([sys.executable, "-c", _BUILD, "build_wheel", DIST], cwd=unpacked)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every module of the checkout is in the wheel, and nothing outside of the package."""
    sources = [*(ROOT / "piecewise_graph").rglob("*.py"), ROOT / "piecewise_graph" / "py.typed"]
    wanted = {path.relative_to(ROOT) for path in sources}
    ops = (ROOT / "custom_ops").rglob("*.py")
    wanted |= {Path("piecewise_graph") / path.relative_to(ROOT) for path in ops}
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    found = {name for name in names if not name.parts[0].endswith(".dist-info")}
    if found != wanted:
        missing, more = sorted(map(str, wanted - found)), sorted(map(str, found - wanted))
        raise SystemExit(f"{wheel.name} lacks {missing} and holds {more} beside the package.")
    print(f"{wheel.name}: {len(found)} files, complete")


def install(wheel: Path, folder: Path) -> Path:
    """An environment with the wheel in it; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    run([sys.executable, "-m", "pip", "--python", python, "install", *quiet, wheel])
    own = run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]).strip()
    # Folders that a .pth file names are searched, but .pth files in them are not read.
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(own) / "shared.pth").write_text("\n".join(shared) + "\n")
    return python


def run_readme(python: Path, scratch: Path) -> None:
    """Run the first Python block of README as it is written, beside the model that it loads."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    folder = scratch / "elsewhere"
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks" / "models").symlink_to(ROOT / "benchmarks" / "models")
    where = (
        "import piecewise_graph as pg, piecewise_graph.custom_ops as ops; print(pg.__file__, ops.__file__)"
    )
    environment = str(python.parents[1])
    files = run([python, "-c", where], cwd=folder).split()
    assert all(file.startswith(environment) for file in files), files
    print(run([python, "-m", "piecewise_graph", "doctor"], cwd=folder))
    (folder / "block.py").write_text(block[1], encoding="utf-8")
    print(run([python, "block.py"], cwd=folder))


def run(command: list[object], cwd: Path = ROOT) -> str:
    """The output of a command, which is printed if it fails. PYTHONPATH is not passed on."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise SystemExit(f"{' '.join(map(str, command))} ended with status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
