"""Forward: one model of the loop, callable in every graph mode.

A phase is more than a model's forward: the draft phase holds S - 1 of them, with the choice of tokens and the
metadata in between. Mode `full` captures the whole phase, and the compiled model runs inside that capture.
Mode `piecewise` runs the phase's own lines on the host and every forward in it as a tape.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import AttentionBatch

from ..options import EAGER, FULL, PIECEWISE

log = logging.getLogger(__name__)


class Forward:
    """A module that is compiled once and called in one of `GRAPH_MODES`.

    Args:
        module: reads its batch from the forward context if it has attention.
        token_dim: argument -> dimension that counts rows.
        sizes: row counts that may be captured.
        options: of pg.compile, `pool` among them; of `specialize`, the sizes that may be captured are used.
        hold: called once tapes read the module's weights by address: see `Weights.hold`.
        outputs: of piecewise calls: "static" outputs are memory of the pool, which the next tape of any model
            overwrites; "copy" is for outputs that are read after that.
    """

    def __init__(
        self,
        module: nn.Module,
        token_dim: Mapping[str, int],
        sizes: list[int],
        options: Mapping[str, Any],
        hold: Callable[[], None],
        outputs: str = "static",
    ) -> None:
        self.module, self.sizes = module, sizes
        self._token_dim, self._hold = dict(token_dim), hold
        chosen = {
            "capture_sizes": sizes,
            "max_tokens": max(sizes),
            "outputs": outputs,
            "capture": "explicit",
        }
        exact = [size for size in options.get("specialize", ()) if size in sizes]
        self._compiled = pg.compile(
            module, token_dim=self._token_dim, **{**options, **chosen, "specialize": exact}
        )
        self._pool: pg.GraphPool = options["pool"]
        self._frozen: Any = None
        self._captured: set[int] = set()
        self._was_called = False

    def __call__(self, mode: str, batch: AttentionBatch | None, /, **inputs: Tensor) -> Any:
        """Run one forward.

        The first piecewise call with a row count of `sizes` captures its tape: the forward then runs several
        times, with the same result.
        """
        self._was_called = True
        if mode == PIECEWISE:
            rows = self._rows(inputs)
            if rows in self.sizes and rows not in self._captured:
                self.capture(batch, **inputs)
        # The core does not know the phase's graph: asked for a full graph, it would capture its own.
        with pg.forward_context(attention=batch, in_graph=mode == FULL):
            if mode == EAGER:
                return self.module(**inputs)
            if mode == PIECEWISE and self._frozen is not None:
                return self._frozen(**inputs)
            return self._compiled(**inputs)

    def is_prepared(self, mode: str, rows: int) -> bool:
        """Whether such a call compiles and captures nothing."""
        return rows in self._captured if mode == PIECEWISE else self._was_called

    def capture(self, batch: AttentionBatch | None, **inputs: Tensor) -> None:
        """Capture the piecewise tape of these inputs' row count. The forward runs on these inputs.

        Where that fails, calls of this row count run compiled; the core counts them as `capture_failed`.
        """
        rows = self._rows(inputs)
        with suppress(pg.errors.CaptureError):
            pg.capture(
                self._compiled,
                lambda _: inputs,
                sizes=[rows],
                context=lambda _: {"attention": batch},
                progress=False,
            )
        self._hold()
        self._pool.join(inputs[next(iter(inputs))].device, self)
        self._captured.add(rows)
        if self._frozen is None:
            self._frozen = self._try_to_freeze(batch, inputs)

    def _try_to_freeze(self, batch: AttentionBatch | None, inputs: Mapping[str, Tensor]) -> Any:
        try:
            with pg.forward_context(attention=batch):
                return pg.freeze(self._compiled, **inputs)
        except pg.errors.FreezeError as error:
            log.warning("%s is called with Dynamo's checks: %s", type(self.module).__name__, error)
            return None

    def drop_graphs(self) -> None:
        """Called by the pool: the next piecewise calls capture again."""
        self._captured.clear()
        self._frozen = None

    def _rows(self, inputs: Mapping[str, Tensor]) -> int:
        name, dim = next(iter(self._token_dim.items()))
        return inputs[name].shape[dim]
