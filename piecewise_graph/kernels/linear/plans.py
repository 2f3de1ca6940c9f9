"""How a linear layer of a few rows may be computed: the candidates that are measured against each other."""

from __future__ import annotations

from typing import NamedTuple

MAX_TOKENS = 64


class Plan(NamedTuple):
    """Blocks and launch of a kernel; an op takes it as a list of integers, empty = the library's kernel.

    Attributes:
        block_n: rows of the weight per program.
        block_k: columns per step.
        splits: parts into which the columns are cut (Note [Splits are summed by the reader]).
        warps: of 32 threads, per program.
        stages: loads in flight, of the kernel for several tokens.
        trigger: let dependents start early (Note [Dependent launches] in dependent.py).
    """

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    trigger: int = 1

    @property
    def name(self) -> str:
        """Its fields as text, by which measured times are kept."""
        return " ".join(map(str, self))


_ONE_ROW = (
    Plan(1, 2048, 1, 8, 1),
    Plan(1, 2048, 1, 4, 1),
    Plan(1, 1024, 1, 8, 1),
    Plan(1, 1024, 1, 4, 1),
    Plan(1, 512, 1, 4, 1),
    Plan(1, 512, 4, 4, 1),
    Plan(1, 512, 4, 8, 1),
    Plan(4, 512, 4, 4, 1),
)
_FEW_ROWS = (
    Plan(64, 128, 1, 4, 3),
    Plan(64, 128, 1, 4, 5),
    Plan(64, 128, 2, 4, 5),
    Plan(64, 128, 4, 4, 3),
    Plan(64, 128, 4, 4, 5),
    Plan(128, 128, 1, 8, 3),
    Plan(128, 128, 1, 4, 5),
    Plan(128, 128, 2, 4, 5),
)


def candidates(tokens: int, rows: int, columns: int) -> list[Plan]:
    """Plans that can serve `x [tokens, columns]` and `weight [rows, columns]`, likely ones only."""
    if tokens > MAX_TOKENS:
        return []
    fitting = [
        plan
        for plan in (_ONE_ROW if tokens == 1 else _FEW_ROWS)
        if plan.block_k * plan.splits <= columns and plan.block_n <= rows
    ]
    return [plan for plan in fitting if plan.splits == 1 or rows // plan.block_n * plan.splits <= 16384]


def is_plan(text: str) -> bool:
    """Whether `text` is the name of one of the candidates."""
    known = (*_ONE_ROW, *_FEW_ROWS)
    return any(text == plan._replace(trigger=t).name for plan in known for t in (0, 1))
