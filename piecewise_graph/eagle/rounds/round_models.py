"""The models of a speculator, each compiled once and shared by all rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .compiled_forward import Forward
from .target import TargetModel
from .weights import DECODER, DRAFT, HEAD

_ROWS = {"input_ids": 0, "positions": 0, "hidden": 0}


@dataclass(frozen=True)
class Models:
    """What phases call: `models.step("full", batch, ...)`.

    Attributes:
        target: (input_ids, position_ids `[1, rows]`) -> hidden `[rows, H]`, features `[rows, F]`.
        target_head: hidden `[n, H]` -> the target's logits `[n, V]`.
        step: (input_ids, positions `[rows]`, hidden `[rows, H]`) -> hidden `[rows, H]`; None without a draft.
        extend: the same from the target's features `[rows, F]`.
        head: hidden `[rows, H]` -> the draft's logits `[rows, draft_vocab_size]`.
        draft: the module behind `step`, `extend` and `head`.
    """

    target: Forward
    target_head: Forward
    step: Forward | None = None
    extend: Forward | None = None
    head: Forward | None = None
    draft: Any = None

    @classmethod
    def make(
        cls,
        target: TargetModel,
        draft: Any,
        rows: Mapping[str, list[int]],
        target_options: Mapping[str, Any],
        draft_options: Mapping[str, Any],
        hold: Callable[[str], None],
    ) -> Models:
        """Prepare to compile.

        Args:
            rows: row counts that each model may be captured for.
            hold: `Weights.hold`.
        """
        ids = {"input_ids": 1, "position_ids": 1}
        decoder, head, drafts = (partial(hold, part) for part in (DECODER, HEAD, DRAFT))
        # The tapes of the head and of the draft run while the target's results are still read.
        of_target = (
            Forward(target, ids, rows["target"], target_options, decoder, outputs="copy"),
            Forward(target.head, {"hidden": 0}, rows["target_head"], target_options, head),
        )
        if draft is None:
            return cls(*of_target)
        extended = {"input_ids": 0, "positions": 0, "features": 0}
        return cls(
            *of_target,
            Forward(draft, _ROWS, rows["step"], draft_options, drafts, outputs="copy"),
            Forward(_Extend(draft), extended, rows["extend"], draft_options, drafts, outputs="copy"),
            Forward(_Head(draft), {"hidden": 0}, rows["head"], draft_options, drafts),
            draft,
        )


class _Extend(nn.Module):
    """A draft forward that starts from the target's features."""

    def __init__(self, draft: Any) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, input_ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        return self.draft(input_ids, positions, self.draft.project(features))


class _Head(nn.Module):
    """The draft's logits, apart from its forward: those over prompts and accepted tokens need none."""

    def __init__(self, draft: Any) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, hidden: Tensor) -> Tensor:
        return self.draft.logits(hidden)
