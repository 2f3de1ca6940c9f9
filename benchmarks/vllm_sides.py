"""The sides of bench_vllm: settings of an engine, and variables of its process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Side:
    """Attributes:
    settings: of `vllm.LLM`.
    environment: variables of the process, beside those of all sides.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


OWN = "own"  # this project's engine, without vLLM
# With several GPUs the engine is a process beside its client's, as vLLM has it by default: in one process it
# stood still.
SEVERAL_GPUS = "v1 apart"
FIRST_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SIDES = {
    "eager": Side({"enforce_eager": True}, FIRST_RUNNER),
    "v1": Side(environment=FIRST_RUNNER),
    SEVERAL_GPUS: Side(environment=FIRST_RUNNER | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    "v2": Side(environment={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "piecewise": Side({"compilation_config": {"backend": "piecewise"}}),
    OWN: Side(),
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def caches_of(side: str) -> Path:
    """A folder of this side alone."""
    return Path(tempfile.gettempdir()) / f"bench_vllm_{side}"


def environment_of(side: str) -> dict[str, str]:
    """Variables of a side's process."""
    caches = caches_of(side)
    places = {
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    return {**ENVIRONMENT, **places, **SIDES[side].environment}
