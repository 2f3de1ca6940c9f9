"""Logits of few rows as graphs: vLLM computes them outside of its own, one cuBLAS call per step.

On an H100 torch needs 140 us of host time for that call, a tenth of a decode step of a 1B model, because
cuBLAS looks for a kernel each time. A graph is captured per number of rows: padded rows could have another
kernel, and so other roundings than vLLM has without us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph import _torch

log = logging.getLogger("vllm.piecewise_graph")

MOST_ROWS = 64  # above, the device takes longer than the host


class ServedLogits:
    """What stands in place of a model's `compute_logits`.

    Its graphs have a pool of their own: vLLM reads hidden states, which lie in the model's, after logits.

    Args:
        module: the model.
        example: tells a row of its hidden states; None before it was called.
        rows: the most rows to capture.
    """

    def __init__(self, module: Any, example: Callable[[], Tensor | None], rows: int) -> None:
        self._compute: Callable[..., Any] = module.compute_logits
        self._example, self._most, self._pool = example, rows, pg.GraphPool()
        self._graphs: dict[int, _Logits] = {}
        module.compute_logits = self

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        graph = self._graphs.get(hidden_states.shape[0])
        if graph is None or args or options or not graph.takes(hidden_states):
            return self._compute(hidden_states, *args, **options)
        graph.rows.copy_(hidden_states)
        graph.replay()
        # What samplers keep they convert to float32 first, which makes no copy of what is float32.
        return graph.logits.clone() if graph.logits.dtype is torch.float32 else graph.logits

    def planned_bytes(self) -> int:
        """What `capture` will take, temporaries of the method apart; 0 where it takes other arguments."""
        example = self._example()
        if example is None:
            return 0
        try:
            with torch.inference_mode():
                return self._most * (example.nbytes + int(self._compute(example).nbytes))
        except Exception as error:  # whatever it was: vLLM computes them
            log.info("logits are computed without graphs: %s", error)
            self._most = 0
            return 0

    def capture(self) -> None:
        """A graph per number of rows, the largest first, as those share memory.

        Raises:
            Exception: whatever the method raises where it cannot be captured.
        """
        example = self._example()
        if example is None or not self._most:
            return
        rows = example.repeat(self._most, 1)
        for count in range(self._most, 0, -1):
            self._graphs[count] = _Logits(self._compute, rows[:count], self._pool)

    def forget(self) -> None:
        """Weights or memory are about to go, or a capture failed."""
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
        """Of this kind, where rows made in inference mode may be written."""
        is_alike = hidden_states.shape == self.rows.shape and hidden_states.dtype is self.rows.dtype
        return is_alike and torch.is_inference_mode_enabled()

    def _run(self) -> None:
        logits = self._compute(self.rows)
        self.logits = _torch.weak_alias(logits) if logits.is_cuda else logits
