"""Triton kernels without a GPU: a test file runs itself once more in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so the interpreter needs a process of its own.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What OpenBLAS has for some processors rounds a column of a product otherwise at another place in its block.
# This, which all of x86 can run, does not.
_OTHERS = {"OPENBLAS_CORETYPE": "Prescott"}
needs_kernels = [] if INTERPRETED else pytest.mark.gpu
starts_the_interpreter = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="the kernels run in this process"
)


def assert_passes_interpreted(*files: str) -> None:
    """All tests of `files` pass in a process whose kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, **_OTHERS, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def make_interpreter_cheap() -> None:
    """Save what the interpreter does again with every call between functions: a quarter of its time.

    It goes through all of Triton's functions to make them its own. Within one launch they are that already.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_builtin
    first: dict[Any, str] = {}

    def patch_once(package: Any, builder: Any, scope: Any) -> None:
        if package not in first:
            first[package] = next(n for n, value in inspect.getmembers(package) if tl.core.is_builtin(value))
        if tl.core.is_builtin(getattr(package, first[package])):
            patch(package, builder, scope)

    interpreter._patch_builtin = patch_once
