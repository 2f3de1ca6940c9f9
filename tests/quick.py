"""The test files of `make quick`: for every package of the house some that exercise it, quick ones.

python tests/quick.py prints them; test_quick.py holds that no package is left out.
"""

from __future__ import annotations

from pathlib import Path

QUICK = {
    "piecewise_graph": ("test_buckets", "test_config", "test_counters", "test_context"),
    "piecewise_graph._torch": ("test_torch_gates_tensors",),
    "piecewise_graph.splitter": ("test_splitter_steps",),
    "piecewise_graph.analysis": ("test_padding_rules",),
    "piecewise_graph.compiler": ("test_compiler",),
    "piecewise_graph.recorder": ("test_bridge_buffers",),
    "piecewise_graph.runtime": ("test_dispatch", "test_runtime"),
    "piecewise_graph.frontend": ("test_capture", "test_freeze"),
    "piecewise_graph.ranks": ("test_ranks",),
    "piecewise_graph.inspection": ("test_report", "test_bisect"),
    "piecewise_graph.integrations": ("test_vllm_plugin",),
    "piecewise_graph.kernels": ("test_copies",),
    "piecewise_graph.kernels.linear": ("test_linear",),
    "piecewise_graph.custom_ops": ("test_kv_cache",),
    "piecewise_graph.custom_ops.attention": ("test_attention_op",),
    "piecewise_graph.custom_ops.metadata": ("test_metadata_kernels",),
    "piecewise_graph.eagle": ("test_eagle_requests",),
    "piecewise_graph.eagle.head": ("test_eagle_checkpoints",),
    "piecewise_graph.eagle.rounds": ("test_eagle_branches",),
    "piecewise_graph.eagle.serving": ("test_eagle_planner",),
    "piecewise_graph.bench": ("test_serving_metrics", "test_serving_load"),
    "piecewise_graph.cli": ("test_command_line",),
}


def files() -> list[Path]:
    folder = Path(__file__).parent
    return [folder / f"{name}.py" for name in dict.fromkeys(n for names in QUICK.values() for n in names)]


if __name__ == "__main__":
    print(*(path.relative_to(Path(__file__).parents[1]) for path in files()))
