"""A reference EAGLE loop: draft, verify and draft-extend on paged KV, each phase a graph.

    from piecewise_graph.eagle import Speculator, load_draft

    pg.register_attention()
    target = AutoModelForCausalLM.from_pretrained(path, attn_implementation="piecewise").eval()
    speculator = Speculator(target, load_draft(draft_path, target))
    tokens, statistics = speculator.generate(prompts, max_new_tokens=64, return_stats=True)

Read it in this order:

    options, request      what users choose; one request and how far it is
    head/                 the draft: its config, its model, and checkpoints
    rounds/               one round on static buffers
      target, round_models, compiled_forward    the models, each compiled once, in every graph mode
      resources           models, caches, request table and state, which all rounds share
      round_tensors       the buffers of one batch size and draft shape (round_buffers: as data)
      phases              the algorithm: draft, verify, draft-extend (sampling, synthetic)
      prefill             prompts, alone or in the forwards of a round
      round               three phases as graphs (phase_runner, weights)
      round_launch        a result on its way to the host
    serving/              requests over rounds
      round_store         the rounds made so far, and which one serves a batch
      shape_planner       how much to draft
      scheduler, engine   slots and pages; requests in, tokens out
    speculator            puts it all together (serving.model_checks)
"""

from typing import Any

_HOME = {
    "DraftConfig": "head.draft_config",
    "DraftModel": "head.draft",
    "DraftShape": "options",
    "EagleError": "errors",
    "Engine": "serving.engine",
    "EngineOptions": "options",
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
