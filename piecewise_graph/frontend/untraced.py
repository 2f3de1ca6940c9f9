"""Compiled models and frozen callables inside of somebody else's torch.compile.

Dynamo would trace through their Python: it refuses pg.compile's marks, and makes traces of their checks. So a
call that Dynamo meets while it traces is a graph break, and then runs as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def untraced() -> Callable[..., Any]:
    """A function that calls what it is given, and which Dynamo does not look into.

    Made per object: `torch.compiler.disable` imports Dynamo, which importing the package must not.
    """
    return torch.compiler.disable(_call, reason="piecewise_graph: a call of a compiled model")


def _call(what: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return what(*args, **kwargs)
