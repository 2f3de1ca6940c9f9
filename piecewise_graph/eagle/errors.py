"""What can go wrong in speculative decoding: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise_graph.errors import PiecewiseError


class EagleError(PiecewiseError, ValueError):
    """A draft head, or its use, that does not fit the target model or the checkpoint."""

    @classmethod
    def bad_config(cls, field: str, value: object, expected: str) -> EagleError:
        return cls(f"DraftConfig({field}={value!r}) cannot work.", f"pass {expected}.")

    @classmethod
    def wrong_module(cls, name: str, found: Sequence[int], expected: Sequence[int]) -> EagleError:
        return cls(
            f"{name} to be shared has a weight of shape {tuple(found)}, the draft needs {tuple(expected)}.",
            f"pass the target's module of the same vocabulary and hidden size, or {name}=None: "
            "the draft then makes its own.",
        )

    @classmethod
    def no_mapping(cls, draft_vocabulary: int, vocabulary: int) -> EagleError:
        return cls(
            f"the draft has {draft_vocabulary} tokens, the target {vocabulary}, and there is no d2t between them.",
            "pass d2t, int64, target id minus draft id of every draft token.",
        )

    @classmethod
    def wrong_mapping(cls, what: str) -> EagleError:
        return cls(
            f"d2t cannot be right: {what}.",
            "d2t holds offsets, not ids: target id = draft id + d2t[draft id]. Use the d2t that the head was "
            "trained with, for this target's vocabulary.",
        )
