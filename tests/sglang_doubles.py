"""A double of the parts of SGLang 0.5.17 that the plugin is attached to, and of the order of SGLang's calls.

The modules go into `sys.modules` for one test. The attention op has SGLang's schema, and narrows itself to
the live tokens; KV is really written and read, through the forward context.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

WIDTH, LAYERS, VOCABULARY, LENGTH = 8, 2, 50, 64
SIZES = [4, 8, 16]
OP = "unified_attention_with_output"


@dataclass
class PhaseConfig:
    backend: str = "tc_piecewise"
    tc_compiler: str = "eager"
    bs: list[int] = field(default_factory=lambda: list(SIZES))


@dataclass
class GraphConfig:
    prefill: PhaseConfig = field(default_factory=PhaseConfig)


@dataclass
class ServerArgs:
    cuda_graph_config: GraphConfig = field(default_factory=GraphConfig)
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    enable_lora: bool = False
    enable_memory_saver: bool = False


@dataclass
class ForwardBatch:
    """Tokens of one request behind those that its KV holds already."""

    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor


# --- SGLang's state of a forward ------------------------------------------------------------------------

_flags = {"in_graph": False}
_context: dict[str, Any] = {}


def is_in_graph() -> bool:
    return _flags["in_graph"]


@contextmanager
def enable_graph() -> Iterator[None]:
    _flags["in_graph"] = True
    try:
        yield
    finally:
        _flags["in_graph"] = False


def _attention(
    query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, save: bool, layer: int
) -> None:
    live, cache = _context["raw_num_tokens"], _context["kv"][layer]
    places = _context["positions"][:live]
    assert key is not None and value is not None
    cache[0, places], cache[1, places] = key[:live], value[:live]
    mask = torch.arange(LENGTH) <= places[:, None]
    scores = (query[:live] @ cache[0].T).masked_fill(~mask, -torch.inf)
    output[:live] = scores.softmax(-1) @ cache[1]
    output[live:] = 0


_library = torch.library.Library("sglang", "FRAGMENT")
_library.define(
    f"{OP}(Tensor query, Tensor? key, Tensor? value, Tensor(a!) output, bool save_kv_cache, "
    "SymInt layer_id) -> ()"
)
_library.impl(OP, _attention, "CompositeExplicitAutograd")
torch.library.register_fake(f"sglang::{OP}", lambda *args: None, lib=_library)


# --- models -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.qkv, self.out = number, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(WIDTH, -1)
        output = torch.empty_like(q)
        torch.ops.sglang.unified_attention_with_output(q, k, v, output, True, self.number)
        return x + self.out(output).relu()


class InnerModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(map(Layer, range(LAYERS)))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        **more: float,
    ) -> Tensor:
        x = (self.embed(input_ids) if input_embeds is None else input_embeds) + self.place(positions)
        x = x * more.get("scale", 1.0)
        for layer in self.layers:
            x = layer(x)
        return x


class CausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model, self.head = InnerModel(), nn.Linear(WIDTH, VOCABULARY)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> Tensor:
        hidden = self.model(input_ids, positions, forward_batch, scale=0.5)
        return self.head(hidden[_context["raw_num_tokens"] - 1])


# --- the runner and what it chooses between ----------------------------------------------------------------


class TcPiecewiseCudaGraphBackend:
    """SGLang's own: here it leaves the model uncompiled."""

    def __init__(self, runner: Any) -> None:
        self._compile_config = self.build_compilation_config(runner.model_runner.server_args)
        self.runner, inner = runner, runner.model_runner.model.model
        with enable_graph():
            runner._run_dummy_forward(num_tokens=runner.capture_num_tokens[0])
            self.install_compile(inner, compile_config=self._compile_config, graph_pool=None)
            for size in reversed(runner.capture_num_tokens):
                runner._run_dummy_forward(num_tokens=size)
        self._compiled_fn: Callable[..., Any] | None = runner.model_runner.model.forward

    @staticmethod
    def build_compilation_config(server_args: ServerArgs) -> Any:
        prefill = server_args.cuda_graph_config.prefill
        assert prefill.tc_compiler in ("eager", "inductor"), prefill.tc_compiler
        names = [f"sglang.{OP}", "sglang.moe_that_is_not_there"]
        return types.SimpleNamespace(
            compiler=prefill.tc_compiler, split_ops=names, get_capture_sizes=lambda: prefill.bs
        )

    @staticmethod
    def install_compile(model: nn.Module, *, compile_config: Any, graph_pool: Any) -> None: ...

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        with self.replay_session():
            yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        for _ in range(2):
            forward_fn()

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        with enable_graph():
            yield

    def replay(self, shape_key: Any, batch: ForwardBatch) -> Any:
        assert self._compiled_fn is not None
        return self._compiled_fn(batch.input_ids, batch.positions, batch)

    def cleanup(self) -> None:
        self._compiled_fn = None


def resolve_prefill_backend(runner: Any) -> TcPiecewiseCudaGraphBackend:
    return TcPiecewiseCudaGraphBackend(runner)


class PrefillCudaGraphRunner:
    """Its buffers are persistent, as SGLang's are."""

    def __init__(self, server_args: ServerArgs) -> None:
        self.model_runner = types.SimpleNamespace(server_args=server_args, model=CausalLM())
        self.capture_num_tokens = sorted(server_args.cuda_graph_config.prefill.bs)
        most = self.capture_num_tokens[-1]
        self.ids, self.positions = torch.zeros(most, dtype=torch.long), torch.zeros(most, dtype=torch.long)
        self.kv = torch.zeros(LAYERS, 2, LENGTH, WIDTH)
        module = sys.modules["sglang.srt.model_executor.runner.prefill_cuda_graph_runner"]
        self.backend = module.resolve_prefill_backend(self)
        with self.backend.capture_session(None):
            for size in reversed(self.capture_num_tokens):
                key = types.SimpleNamespace(size=size)
                self.backend.capture_one(key, lambda size=size: self._run_dummy_forward(num_tokens=size))
        self.kv.zero_()

    def _run_dummy_forward(self, num_tokens: int) -> None:
        with self._forward_context(num_tokens):
            batch = self._batch(num_tokens)
            self.model_runner.model(batch.input_ids, batch.positions, batch)

    def _batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(self.ids[:size], self.positions[:size], torch.tensor([size]))

    @contextmanager
    def _forward_context(self, live: int) -> Iterator[None]:
        _context.update(raw_num_tokens=live, kv=self.kv, positions=self.positions)
        yield
        _context.clear()

    def execute(self, tokens: Sequence[int], start: int) -> Tensor:
        """Logits behind these tokens, the first of which is at `start`; above the sizes it runs as it is."""
        live = len(tokens)
        size = next((size for size in self.capture_num_tokens if size >= live), None)
        if size is None:
            ids, positions = torch.tensor(tokens), torch.arange(start, start + live)
            _context.update(raw_num_tokens=live, kv=self.kv, positions=positions)
            found = self.model_runner.model(
                ids, positions, ForwardBatch(ids, positions, torch.tensor([live]))
            )
            _context.clear()
            return found
        self.ids.zero_(), self.positions.zero_()
        self.ids[:live], self.positions[:live] = torch.tensor(tokens), torch.arange(start, start + live)
        with self.backend.replay_session(), self._forward_context(live):
            return self.backend.replay(types.SimpleNamespace(size=size), self._batch(size))


# --- modules ------------------------------------------------------------------------------------------------


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    """A hook is applied when it is registered; SGLang does so when all plugins are loaded."""

    @staticmethod
    def register(target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        module, _, name = target.rpartition(".")
        original = getattr(sys.modules[module], name)
        setattr(sys.modules[module], name, lambda *args: hook(original, *args))


_EXECUTOR = "sglang.srt.model_executor"
MODULES: dict[str, dict[str, Any]] = {
    "sglang": {"__version__": "0.5.17"},
    "sglang.srt": {},
    "sglang.srt.plugins": {},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    _EXECUTOR: {},
    f"{_EXECUTOR}.runner": {},
    f"{_EXECUTOR}.runner.prefill_cuda_graph_runner": {"resolve_prefill_backend": resolve_prefill_backend},
    f"{_EXECUTOR}.runner_backend": {},
    f"{_EXECUTOR}.runner_backend.tc_piecewise_cuda_graph_backend": {
        "TcPiecewiseCudaGraphBackend": TcPiecewiseCudaGraphBackend
    },
    f"{_EXECUTOR}.runner_backend_utils": {},
    f"{_EXECUTOR}.runner_backend_utils.tc_piecewise_cuda_graph": {
        "is_in_tc_piecewise_cuda_graph": is_in_graph
    },
}


def install(monkeypatch: pytest.MonkeyPatch, *, without: Sequence[str] = ()) -> None:
    """Put the modules in place, less the attributes `module:name` that another version lacks."""
    for name, attributes in MODULES.items():
        module = types.ModuleType(name)
        for attribute, value in attributes.items():
            if f"{name}:{attribute}" not in without:
                setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    # it derives from the double of this test
    monkeypatch.delitem(sys.modules, "piecewise_graph.integrations.sglang_backend", raising=False)
