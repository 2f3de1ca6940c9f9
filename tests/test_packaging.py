"""Where piecewise_graph.custom_ops comes from: a checkout that is not installed, and an installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, without .pth files: an editable install is not seen, its packages are."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(packages)}
    return subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as a wheel lays it out, with the user's own `custom_ops` beside it."""
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "piecewise_graph", tmp_path / "piecewise_graph", ignore=unwanted)
    shutil.copytree(ROOT / "custom_ops", tmp_path / "piecewise_graph" / "custom_ops", ignore=unwanted)
    (tmp_path / "custom_ops").mkdir()
    (tmp_path / "custom_ops" / "__init__.py").write_text("mine = True\n")
    return tmp_path


def test_a_checkout_runs_without_being_installed() -> None:
    code = "import piecewise_graph.custom_ops.attention as ops; import piecewise_graph; "
    found = python(ROOT, code + "print(ops.__file__); print(piecewise_graph.__file__)")
    assert found.returncode == 0, found.stderr
    attention, core = found.stdout.split()
    assert Path(attention) == ROOT / "custom_ops" / "attention" / "__init__.py"
    assert Path(core) == ROOT / "piecewise_graph" / "__init__.py"


def test_a_checkout_without_installation_can_be_walked() -> None:
    """As TORCH_LOGS=+piecewise_graph does: each module once, the rest of the checkout not at all."""
    code = "import pkgutil, piecewise_graph as pg\n"
    code += "for found in pkgutil.walk_packages(pg.__path__, 'piecewise_graph.'): print(found.name)"
    found = python(ROOT, code)
    assert found.returncode == 0, found.stderr
    names = found.stdout.splitlines()
    assert len(names) == len(set(names))
    assert "piecewise_graph.runtime.dispatch" in names
    assert not [name for name in names if "tests" in name]


def test_the_users_own_custom_ops_stay_apart(installed: Path) -> None:
    code = "import piecewise_graph.custom_ops as ours, custom_ops; print(ours.__file__, custom_ops.mine); "
    found = python(installed, code + "import piecewise_graph; print(len(piecewise_graph.__path__))")
    assert found.returncode == 0, found.stderr
    file, mine, paths = found.stdout.split()
    assert Path(file) == installed / "piecewise_graph" / "custom_ops" / "__init__.py"
    assert (mine, paths) == ("True", "1")


def test_the_users_custom_ops_never_stand_in_for_missing_ones(installed: Path) -> None:
    shutil.rmtree(installed / "piecewise_graph" / "custom_ops")
    found = python(installed, "import piecewise_graph.custom_ops")
    assert "No module named 'piecewise_graph.custom_ops'" in found.stderr
