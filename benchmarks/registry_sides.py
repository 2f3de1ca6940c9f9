"""A model of transformers' registry beside what its rows should be: the judge of bench_registry."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from piecewise_graph.buckets import bucket_for

BUCKETS = (8, 16, 32)
TOLERANCE = 2e-3  # of the largest logit


class EagerRaisesError(Exception):
    """The model cannot be built small, or not be called at this size, compiled or not."""


class Verdict(IntEnum):
    """Of one call. AS_COMPILED: it differs from the eager model as plain torch.compile does."""

    RIGHT, AS_COMPILED, WRONG = range(3)


@dataclass(frozen=True)
class Sides:
    """A model in float32 on a CPU, the eager model, and the compiled one."""

    name: str
    exact: torch.nn.Module
    model: torch.nn.Module
    fast: Any

    @torch.no_grad()
    def verdict(self, size: int) -> Verdict:
        """One call of all of them.

        Raises:
            EagerRaisesError: the model itself raises.
        """
        import tiny_models

        ids = tiny_models.random_ids(size)
        try:
            wanted, eagers = self._rows(self.exact, ids), self._eagers_distance(ids)
        except Exception as problem:
            raise EagerRaisesError(f"{type(problem).__name__}: {str(problem)[:200]}") from problem
        found = self._rows(self.fast, ids)
        near = max(TOLERANCE, 2 * eagers)
        if _distance(found, wanted) <= near:
            return Verdict.RIGHT
        plain = torch.compile(self.model, backend="eager", dynamic=False)
        as_plain = any(_distance(found, rows) <= near for rows in self._ways(plain, ids))
        return Verdict.AS_COMPILED if as_plain else Verdict.WRONG

    def _eagers_distance(self, ids: torch.Tensor) -> float:
        """How far the eager model is off."""
        wanted = self._rows(self.exact, ids)
        return max(_distance(rows, wanted) for rows in self._ways(self.model, ids))

    def _ways(self, run: Any, ids: torch.Tensor) -> list[torch.Tensor]:
        """The rows of `ids` at their size and, of a model that rounds more than float32, in their bucket.

        Kernels for another number of rows round in another way, and then a router may choose other experts.
        """
        import tiny_models

        size = ids.shape[1]
        found = [self._rows(run, ids)]
        bucket = bucket_for(size, BUCKETS)
        causal = self.name not in tiny_models.ENCODERS
        if bucket is not None and causal and next(self.model.parameters()).dtype != torch.float32:
            padded = torch.cat([ids, tiny_models.random_ids(bucket - size)], 1)
            found.append(self._rows(run, padded)[:, :size])
        return found

    def _rows(self, run: Any, ids: torch.Tensor) -> torch.Tensor:
        import tiny_models

        there = ids.to(next(run.parameters()).device)
        return tiny_models.rows(run(**tiny_models.call(self.name, there))).cpu().float()


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, by the largest element; NaN is equal to itself."""
    if found.shape != wanted.shape or not torch.equal(found.isnan(), wanted.isnan()):
        return float("inf")
    return (
        (found - wanted).nan_to_num().abs().max() / wanted.nan_to_num().abs().max().clamp(min=1e-3)
    ).item()
