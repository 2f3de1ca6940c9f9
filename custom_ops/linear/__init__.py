"""Linear layers of a few rows (decode steps), by whichever kernel reads the weight fastest."""

from .ops import linear_few as linear_few
from .plans import MAX_TOKENS as MAX_TOKENS
from .plans import Plan as Plan

__all__ = ["MAX_TOKENS", "Plan", "linear_few"]
