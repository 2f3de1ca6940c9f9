"""Which token counts of vLLM's models get graphs: vLLM's own, and some of prompts beyond them.

vLLM captures up to 512 tokens, or twice the requests that it serves at a time. A step of prompts above that
launches each kernel. Where the model is small for its GPU, launching takes longer than computing. Beside a
slow host that holds for 4,096 tokens of a 1B model on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecewise_graph.integrations.stacks import VLLM
from piecewise_graph.integrations.vllm_settings import setting, settle

SETTING = "piecewise_prompt_tokens"
# Narrow models have graphs of more tokens: a token of theirs is computed sooner, and takes less memory.
_MOST_TOKENS, _MOST_ELEMENTS = 4096, 2048 * 4096  # of a step, and of its hidden states
_USUAL_WIDTH = 4096  # of a model that does not tell its own
_FINE, _FINE_UP_TO, _COARSE = 64, 512, 128  # tokens from one size to the next


def configure_prompts(config: Any) -> None:
    """Settle, before vLLM makes its capture sizes, up to how many tokens prompts get graphs.

    Where the user chose capture sizes, those are all there are.

    Raises:
        IntegrationError: the user's setting is no number of tokens; or vLLM has no such settings.
    """
    compilation = config.compilation_config
    chosen = (
        VLLM.required(compilation, "cudagraph_capture_sizes", "CompilationConfig"),
        VLLM.required(compilation, "max_cudagraph_capture_size", "CompilationConfig"),
    )
    usual = _default_tokens(config) if chosen == (None, None) else 0
    settle(config, SETTING, usual, "give a number of tokens.")


def _default_tokens(config: Any) -> int:
    model = VLLM.required(config, "model_config", "VllmConfig")
    width = VLLM.required(model, "get_hidden_size", "ModelConfig")() if model is not None else 0
    return min(_MOST_TOKENS, _MOST_ELEMENTS // (width or _USUAL_WIDTH) // _COARSE * _COARSE)


def graph_sizes(sizes: Sequence[int], rows: int) -> list[int]:
    """vLLM's capture sizes, and the multiples of `rows`, tokens of one decode step, that it makes of them."""
    largest = max(sizes, default=0)
    rounded = {-(-size // rows) * rows for size in sizes}
    return sorted({*sizes, *(size for size in rounded if size <= largest)})


def prompt_sizes(sizes: Sequence[int], config: Any, most: int) -> list[int]:
    """Token counts beyond `sizes`, for prompts; none where there are no graphs.

    Args:
        config: vLLM's, after `configure_prompts`.
        most: tokens of vLLM's longest step.
    """
    if not sizes:
        return []
    limit = min(setting(config, SETTING) or 0, most)
    return [size for size in sorted({*_multiples(limit), limit}) if size > max(sizes)]


def _multiples(limit: int) -> list[int]:
    """GPUs multiply in tiles of 64 or 128 rows, so padding up to the next multiple costs little."""
    return [n for n in range(_FINE, limit + 1, _FINE) if n <= _FINE_UP_TO or n % _COARSE == 0]
