"""Hardware and versions that a figure depends on."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """For the head of a results file; None where there is no GPU."""
    import transformers

    env: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    if torch.cuda.is_available():
        import triton

        env["triton"] = triton.__version__
        env["driver"] = _driver()
    return env


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
