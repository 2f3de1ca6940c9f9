"""What can be wrong with a look at a model: what happened, where, what to do."""

from __future__ import annotations

from piecewise_graph.errors import PiecewiseError


class BisectError(PiecewiseError):
    """pg.bisect has nothing to compare."""

    @classmethod
    def no_graph(cls) -> BisectError:
        return cls(
            "this call reached no graph of backend 'piecewise'.",
            "pass tokens, and look for torch.compiler.disable or the recompile limit.",
        )
