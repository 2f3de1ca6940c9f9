"""Result: what a launch will have found, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """Copies into pinned memory that the device makes when it gets there, and the event after them.

    Attributes:
        rounds: int32 `[B, S + 2]`: of each request the tokens that it accepted, padded, then how many; None
            without a round.
        first: int32 `[n]`: of each prompt that ended, the token after it; None without prompts.
        arrived: None where the copies are the tensors themselves (CPU).
    """

    rounds: Tensor | None
    first: Tensor | None
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, rounds: Tensor | None, first: Tensor | None) -> Result:
        """Send device tensors on their way; they may be overwritten by what is launched next."""
        sent = [None if tensor is None else _sent(tensor) for tensor in (rounds, first)]
        arrived = None
        if any(tensor is not None and tensor.is_cuda for tensor in (rounds, first)):
            arrived = torch.cuda.Event()
            arrived.record()
        return cls(sent[0], sent[1], arrived)

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. Of a CPU never: it stands in for a device that is busy."""
        return self.arrived is not None and self.arrived.query()

    def wait(self) -> None:
        """Until the copies are there; whatever was launched after them goes on."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def accepted(self) -> list[list[int]]:
        """Tokens of each request of the round, the bonus last. After `wait`."""
        rows = [] if self.rounds is None else self.rounds.tolist()
        return [row[: row[-1]] for row in rows]

    def first_tokens(self) -> list[int]:
        """After `wait`."""
        found: list[int] = [] if self.first is None else self.first.tolist()
        return found


def _sent(tensor: Tensor) -> Tensor:
    """torch copies to pinned memory where the host need not wait."""
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()
