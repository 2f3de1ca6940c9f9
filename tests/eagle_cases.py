"""Targets, drafts of known acceptance and greedy decoding, for tests of the EAGLE loop."""

from __future__ import annotations

import bisect
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import strategies as st
from paged_generation import Alone, alone
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.eagle import DraftConfig, DraftModel, DraftShape, Engine, Speculator, load_draft
from piecewise_graph.eagle.rounds.prefill import Prefill
from piecewise_graph.eagle.rounds.resources import Resources
from piecewise_graph.eagle.serving.scheduler import Scheduler

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRAPH_MODES = ("full", "piecewise", "compiled", "eager")
QUICK: dict[str, Any] = {"options": {"compiler": "eager"}, "draft_options": {"compiler": "eager"}}
VOCABULARY = 64  # of small targets
# Two ways to add up the same float32 numbers may order two tokens differently whose logits are this close.
TIE = 1e-4


@contextmanager
def one_state_for_all_tests() -> Iterator[None]:
    """What conftest's `fresh_process_state` does around a test, around a file: compiled loops are shared."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("PIECEWISE_GRAPH_")]:
            patch.delenv(variable)
        torch._dynamo.reset()
        pg.reset()
        torch.manual_seed(0)
        yield
    torch._dynamo.reset()
    pg.reset()


# Targets.


def byte_llama(attention: str = "piecewise", dtype: Any = torch.float32) -> Any:
    """The trained model of this repository."""
    pg.register_attention()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / "byte-llama", attn_implementation=attention, dtype=dtype
    )
    return model.to(DEVICE).eval()


def byte_prompts(count: int, longest: int) -> list[list[int]]:
    """Pieces of Python source text, of 1 to `longest` bytes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / "byte-llama")
    ids = tokenizer(Path(bisect.__file__).read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    lengths = [1 + index * (longest - 1) // max(count - 1, 1) for index in range(count)]
    room = len(ids) - longest
    return [ids[start : start + n] for start, n in zip(range(0, room, room // count), lengths, strict=False)]


def small_target(
    attention: str = "piecewise",
    *,
    window: int | None = None,
    bigram: bool = False,
    layers: int = 1,
    dtype: Any = torch.float32,
) -> Any:
    """A Mistral with random weights, always the same ones, and sharp distributions.

    Args:
        window: of its attention.
        bigram: attention adds nothing: the next token depends on the latest alone.
    """
    pg.register_attention()
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=window,
        max_position_embeddings=512, attn_implementation=attention,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = transformers.MistralForCausalLM(config)
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
            if bigram and "o_proj" in name:
                weight.zero_()
        model.lm_head.weight.mul_(100)
    return model.to(DEVICE, dtype).eval()


def small_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


# Drafts.


def shared(target: Any) -> dict[str, nn.Module]:
    return {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}


@torch.no_grad()
def twin(target: Any) -> DraftModel:
    """The target itself as an EAGLE-1 head. All that it lacks is the first token of every sequence.

    So it is always right where that token makes no difference, behind a window for instance, and elsewhere
    as often as the target would be without it.
    """
    config = target.config
    made = DraftConfig.for_target(
        config, "eagle1", num_layers=config.num_hidden_layers, layernorms=True,
        sliding_window=getattr(config, "sliding_window", None),
    )  # fmt: skip
    weight = next(target.parameters())
    draft = DraftModel(made, **shared(target), dtype=weight.dtype, device=weight.device)
    draft.embedding_layernorm = None
    identity = torch.eye(config.hidden_size)
    draft.fc.weight.copy_(torch.cat([identity, torch.zeros_like(identity)], 1))
    for own, layer in zip(draft.layers, target.model.layers, strict=True):
        own.load_state_dict(layer.state_dict())
    draft.norm.load_state_dict(target.model.norm.state_dict())
    return draft.eval()


def random_head(target: Any, kind: str, *, vocabulary: int | None = None) -> DraftModel:
    """A head that knows nothing. An "eagle3" one has `vocabulary` tokens, every other of the target's."""
    changes: dict[str, Any] = {}
    d2t = None
    if kind == "eagle3":
        layers = target.config.num_hidden_layers
        changes["feature_layers"] = tuple(sorted({0, layers // 2, layers - 1}))
    if vocabulary is not None:
        changes["draft_vocab_size"] = vocabulary
        d2t = torch.arange(vocabulary)
    config = DraftConfig.for_target(target.config, kind, **changes)
    modules = shared(target) if vocabulary is None else {"embed_tokens": target.get_input_embeddings()}
    weight = next(target.parameters())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        draft = DraftModel(config, **modules, d2t=d2t, dtype=weight.dtype, device=weight.device)
    return draft.eval()


def trained_head(target: Any, kind: str) -> DraftModel:
    """The head of `byte_llama` that is in this repository."""
    folder = MODELS / f"byte-llama-{kind}"
    if not folder.exists():
        pytest.skip(f"there is no {folder.name}")
    return load_draft(folder, target)


# What they are compared with.


@torch.no_grad()
def greedy(
    model: Callable[..., Any], prompts: Sequence[list[int]], counts: int | Sequence[int]
) -> list[Alone]:
    """New tokens for each prompt, by a plain model without any cache."""
    wanted = [counts] * len(prompts) if isinstance(counts, int) else counts
    return [alone(model, prompt, count, DEVICE) for prompt, count in zip(prompts, wanted, strict=True)]


def assert_greedy(
    found: Sequence[list[int]], wanted: Sequence[Alone], counts: Sequence[int], tie: float = TIE
) -> None:
    """Token for token what plain decoding says. A difference is allowed at a tie only, and is listed."""
    ties = []
    for index, (tokens, reference, count) in enumerate(zip(found, wanted, counts, strict=True)):
        assert len(tokens) == count, f"request {index}: {len(tokens)} tokens, not {count}"
        pairs = enumerate(zip(tokens, reference.tokens, strict=False))
        at = next((place for place, (one, other) in pairs if one != other), None)
        if at is not None:
            gap = reference.gaps[at]
            assert gap < tie, f"request {index}: token {at} of {tokens} is not that of {reference.tokens}"
            ties.append((index, at, gap))
    for index, at, gap in ties:
        print(f"request {index}, token {at}: two tokens whose logits are {gap:.1e} apart")
    assert len(ties) <= len(found) // 4


def resources(speculator: Speculator) -> Resources:
    """Its caches, table, state and models: the one way of tests into a speculator."""
    return speculator._resources


def prefill(speculator: Speculator) -> Prefill:
    return speculator._prefill


def scheduler(engine: Engine) -> Scheduler:
    return engine._scheduler


def all_free(speculator: Speculator) -> bool:
    """No request has kept a slot or a page."""
    table = resources(speculator).table
    return table.free_pages == table.total_pages and not table.open_slots


def spoil(speculator: Speculator) -> None:
    """NaN wherever no request has written: in the caches, the null page included, and in padding's state.

    Integers of row 0 become what cannot be a token, a length or a page. Call it while nothing runs.
    """
    for tensor in cache_tensors(speculator):
        tensor.fill_(float("nan"))
    for made in speculator._rounds.made.values():
        fill_floats(made.tensors.buffers.values())
    fill_floats(resources(speculator).state.values())
    spoil_padding(speculator)


def spoil_padding(speculator: Speculator) -> None:
    """The same for what padding alone may read and write; requests may run."""
    for tensor in cache_tensors(speculator):
        tensor[0, 0] = float("nan")
    for tensor in resources(speculator).state.values():
        tensor[0] = float("nan") if tensor.is_floating_point() else 10**8


def cache_tensors(speculator: Speculator) -> Iterator[Tensor]:
    """K and V of every layer, of target and draft."""
    for kept in (resources(speculator).cache, resources(speculator).draft_cache):
        if kept is not None:
            yield from (*kept.k, *kept.v)


def fill_floats(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def rounds_of(new_tokens: int, accept_length: int) -> int:
    """Rounds that a request takes when each makes `accept_length` tokens; prefill makes the first one."""
    return -(-(new_tokens - 1) // accept_length)


CHAINS = [DraftShape(steps) for steps in (1, 2, 3, 4, 5)]
TREES = [
    DraftShape(2, 2), DraftShape(5, 2, 12), DraftShape(3, 4, 16), DraftShape(4, 4, 10), DraftShape(2, 8, 16),
    DraftShape(3, 8, 32),
]  # fmt: skip


@st.composite
def shapes_of_rounds(draw: st.DrawFn, topk: int = 8) -> DraftShape:
    """Chains, and trees of up to 24 tokens."""
    steps, k = draw(st.integers(1, 5)), draw(st.integers(1, topk))
    candidates = DraftShape(steps, k).candidates
    nodes = draw(st.integers(2, min(24, 1 + candidates))) if k > 1 else None
    return DraftShape(steps, k, nodes)


@cache
def small_pair(kind: str) -> tuple[Any, Any, DraftModel]:
    """(target, the same with plain attention, draft), of three layers."""
    target, plain = small_target(layers=3), small_target("sdpa", layers=3)
    drafts: dict[str, Callable[[], DraftModel]] = {
        "twin": lambda: twin(target),
        "eagle1": lambda: random_head(target, "eagle1"),
        "eagle3": lambda: random_head(target, "eagle3", vocabulary=VOCABULARY // 2),
    }
    return target, plain, drafts[kind]()
