"""The models of bench_vllm as settings of `vllm.LLM`, and the features that it tries on one of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.eagle_pair import MODELS
from benchmarks.llama import SHAPES
from benchmarks.vllm_engine import Row

LLAMA: dict[str, Any] = {  # beside its sizes
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "vocab_size": 128256, "num_key_value_heads": 8, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 8192,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
FOLDERS = Path(tempfile.gettempdir()) / "bench_vllm_models"
FEATURES: dict[str, Row] = {
    "fp8 KV cache": {"kv_cache_dtype": "fp8"},
    "cached prefixes": {"enable_prefix_caching": True},
    "chunked prefill": {"max_num_batched_tokens": 96},
    "preemption": {"num_gpu_blocks_override": 160},
    "abort": {},
    "EAGLE-1": {"speculative_config": {"method": "eagle", "model": "byte-llama-eagle1"}},
    "EAGLE-3": {"speculative_config": {"method": "eagle3", "model": "byte-llama-eagle3"}},
    "sleep": {"enable_sleep_mode": True},
}
WAYS = {  # of asking for answers, where it is not once
    "cached prefixes": ("answers", "answers"),  # the first time fills the cache
    "abort": ("answers_beside_aborted",),
    "sleep": ("answers", "answers_after_sleep"),
}


def model_folder(name: str, **changes: Any) -> str:
    """A folder with the configuration of a shape, which vLLM fills with random weights."""
    folder = FOLDERS / "-".join([name, *map(str, changes.values())])
    return _with_config(folder, {**LLAMA, **SHAPES[name].config, **changes})


def random_weights(shape: str, sides: int) -> Row:
    """Settings of vllm.LLM; so many engines share the GPU."""
    return {
        "model": model_folder(shape), "load_format": "dummy", "skip_tokenizer_init": True,
        "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64, "enable_prefix_caching": False,
        "seed": 0, "gpu_memory_utilization": 0.88 / sides,
    }  # fmt: skip


def trained_model() -> Row:
    """Settings of vllm.LLM for the repository's model. Engines start side by side: memory is not measured."""
    return {
        "model": str(MODELS / "byte-llama"), "skip_tokenizer_init": True, "max_model_len": 1024, "seed": 0,
        "max_num_seqs": 64, "enable_prefix_caching": False, "dtype": "bfloat16",
        "gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 2**29,
    }  # fmt: skip


def with_feature(name: str) -> Row:
    """Settings of vllm.LLM for the repository's model, with a feature of `FEATURES`."""
    settings = trained_model() | FEATURES[name]
    drafts = settings.get("speculative_config")
    if drafts is not None:
        head = _head_folder(drafts["model"])
        settings["speculative_config"] = {**drafts, "model": head, "num_speculative_tokens": 3}
    return settings


def _head_folder(name: str) -> str:
    """The repository's head under the name of an architecture that vLLM knows."""
    config = json.loads((MODELS / name / "config.json").read_text())
    known = [each.removesuffix("Eagle") for each in config["architectures"]]
    folder = _with_config(FOLDERS / name, {**config, "architectures": known})
    weights = FOLDERS / name / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(MODELS / name / "model.safetensors")
    return folder


def _with_config(folder: Path, config: Mapping[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
