"""Logits of few rows as graphs: vLLM computes them outside of its own, one cuBLAS call per step.

On an H100 torch needs 140 us of host time for that call, a tenth of a decode step of a 1B model, because
cuBLAS looks for a kernel each time. A graph is captured per number of rows: padded rows could have another
kernel, and so other roundings than vLLM has without us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.integrations.stacks import VLLM

MOST_ROWS = 64  # above, the device takes longer than the host


class ServedLogits:
    """What stands in place of a model's `compute_logits`.

    Its graphs have a pool of their own: vLLM reads hidden states, which lie in the model's, after logits.

    Args:
        module: the model.
        rows: the most rows to capture; 0 = none.

    Raises:
        IntegrationError: the model has no such method.
    """

    def __init__(self, module: nn.Module, rows: int) -> None:
        self._compute: Callable[..., Any] = VLLM.required(module, "compute_logits", type(module).__name__)
        self._most, self._pool = rows, pg.GraphPool()
        self._example: Tensor | None = None
        self._row_bytes = 0  # of logits
        self._graphs: dict[int, _Logits] = {}
        module.compute_logits = self  # type: ignore[assignment]

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        graph = self._graphs.get(hidden_states.shape[0])
        if graph is None or args or options or not graph.takes(hidden_states):
            return self._computed(hidden_states, *args, **options)
        graph.rows.copy_(hidden_states)
        graph.replay()
        # Samplers convert logits to float32 before they write or keep them, but for those that are float32.
        return graph.logits.clone() if graph.logits.dtype is torch.float32 else graph.logits

    def _computed(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """As vLLM does; the first call, of the profile run, shows what the logits are like."""
        logits = self._compute(hidden_states, *args, **options)
        if self._example is None and isinstance(logits, Tensor):
            self._example, self._row_bytes = hidden_states[:1].clone(), logits[:1].nbytes
        return logits

    def planned_bytes(self) -> int:
        """What `capture` will take."""
        return 0 if self._example is None else self._most * (self._example.nbytes + self._row_bytes)

    def capture(self) -> None:
        """A graph per number of rows, the largest first, as those share memory.

        Raises:
            RuntimeError: the method cannot be captured.
        """
        if self._example is None:
            return
        rows = self._example.repeat(self._most, 1)
        for count in range(self._most, 0, -1):
            self._graphs[count] = _Logits(self._compute, rows[:count], self._pool)

    def forget(self) -> None:
        """Weights or memory are about to go."""
        self._graphs.clear()
        self._pool.release()


class _Logits:
    """Of one number of rows.

    Attributes:
        rows: hidden states, written before a replay.
        logits: overwritten by each replay of the pool.
    """

    def __init__(self, compute: Callable[..., Tensor], rows: Tensor, pool: pg.GraphPool) -> None:
        self.rows, self._compute = rows, compute
        self.replay = pool.capture_call(self._run, device=rows.device, name=f"logits of {len(rows)} rows")

    def takes(self, hidden_states: Tensor) -> bool:
        return hidden_states.shape == self.rows.shape and hidden_states.dtype is self.rows.dtype

    def _run(self) -> None:
        logits = self._compute(self.rows)
        self.logits = _torch.weak_alias(logits) if logits.is_cuda else logits
