"""A reference EAGLE loop: draft, verify and draft-extend on paged KV, each phase a graph.

    from piecewise_graph.eagle import Speculator, load_draft

    pg.register_attention()
    target = AutoModelForCausalLM.from_pretrained(path, attn_implementation="piecewise").eval()
    speculator = Speculator(target, load_draft(draft_path, target))
    tokens, statistics = speculator.generate(prompts, max_new_tokens=64, return_stats=True)

A file per stage, read in this order:

    shapes, buffers   what a round looks like; static buffers as data
    target, draft     the two models (draft_config, checkpoints), compiled once each (models, forward)
    phases            the algorithm: draft, verify, extend (sampling, synthetic)
    round, runner     its tensors; a phase as a graph (weights); ready: a round of three of them
    prefill, mixed    prompts, alone or in the forwards of a round
    engine            requests in, tokens out (request, scheduler, results, statistics, planner)
    speculator        puts it all together (workshop)
"""

from typing import Any

_HOME = {
    "DraftConfig": "head.draft_config",
    "DraftModel": "head.draft",
    "DraftShape": "options",
    "EagleError": "errors",
    "Engine": "serving.engine",
    "Request": "request",
    "Sampling": "options",
    "Speculator": "speculator",
    "SpeculatorError": "errors",
    "Statistics": "statistics",
    "TargetModel": "rounds.target",
    "load_draft": "head.checkpoints",
    "save_draft": "head.checkpoints",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Lazily: the draft model needs transformers, whose import takes seconds."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
