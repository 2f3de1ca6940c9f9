"""What can go wrong inside of another stack: what happened, where, what to do."""

from __future__ import annotations

from piecewise_graph.errors import PiecewiseError


class IntegrationError(PiecewiseError):
    """A serving stack and this library do not fit together, or not with these settings."""

    @classmethod
    def hook_missing(cls, hook: str, stack: str, version: str, written_for: str) -> IntegrationError:
        what = f"{stack} {version} has no {hook}, which backend='piecewise' is attached to."
        return cls(what, f"use {stack} {written_for}, which this was written for, or leave the backend out.")

    @classmethod
    def unsupported(cls, setting: str, remedy: str, ours: str = "backend='piecewise'") -> IntegrationError:
        return cls(f"{ours} does not serve a model with {setting}.", remedy)

    @classmethod
    def never_called(cls, part: str) -> IntegrationError:
        what = f"no graph memory can be planned: the profile run did not call the {part} model."
        return cls(
            what, "serve without graphs (-cc.cudagraph_mode=NONE) and report this, with vLLM's version."
        )
