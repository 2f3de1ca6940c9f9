"""How far two results lie apart, and what pg.bisect found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# A side departs where its error exceeds that of eager by this factor, and rounding of this many units.
_TIMES_EAGER = 4.0
_UNITS = 16.0


@dataclass(frozen=True)
class Difference:
    """One tensor beside the reference.

    Attributes:
        error: largest difference over the largest value of the reference; of integers and booleans the share
            that differs; infinite where shapes, NaN or infinities differ.
        at: index of the largest difference.
        tensor: dtype and shape, as people write them.
        unit: rounding of its dtype.
    """

    error: float
    at: tuple[int, ...]
    tensor: str
    unit: float

    def departs(self, eager: Difference | None) -> bool:
        """Rounding does not explain it, as far as the error of eager tells."""
        return self.error > _TIMES_EAGER * (eager.error if eager else 0.0) + _UNITS * self.unit


def difference(found: Tensor, wanted: Tensor) -> Difference:
    """`found` beside the reference's tensor of the same slot."""
    name = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
    unit = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    if found.shape != wanted.shape:
        return Difference(float("inf"), (), name, unit)
    if not found.numel():
        return Difference(0.0, (), name, unit)
    apart, scale = _apart(found, wanted)
    worst = int(apart.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), tuple(found.shape)))
    if found.is_floating_point() or found.is_complex():
        return Difference(float(apart.flatten()[worst]) / scale, at, name, unit)
    return Difference(float(apart.mean()), at, name, unit)


def _apart(found: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """(differences, scale): infinite where one of the two alone is finite."""
    if not (found.is_floating_point() or found.is_complex()):
        return (found != wanted).double().cpu(), 1.0
    found, wanted = found.detach().to(wanted.dtype), wanted.detach()
    same = (found == wanted) | ((found != found) & (wanted != wanted))
    finite = found.isfinite() & wanted.isfinite()
    apart = torch.where(finite, (found - wanted).abs(), float("inf")).masked_fill(same, 0.0)
    sized = wanted.abs()[wanted.isfinite()]
    scale = float(sized.max()) if sized.numel() else 1.0
    return apart, scale or 1.0


@dataclass(frozen=True)
class Departure:
    """The first step after which a side is not where rounding would leave it.

    Attributes:
        step: `segment_4`, the names of splitting ops, `outputs` of the trace, or the `trace` as a whole.
        error, eager_error: of the tensor that is furthest off, relative to the reference.
        tensor, at: its dtype and shape, and the index of the largest difference.
        nearer: the side that lies nearer to the reference there.
        ops: what the step calls, in order, with the paths of their modules.
    """

    side: str
    step: str
    error: float
    eager_error: float
    tensor: str
    at: tuple[int, ...]
    nearer: str
    ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" at {list(self.at)}" if self.at else ""
        lines = [
            f"{self.side} departs at {self.step}: error {self.error:.2g}, of eager {self.eager_error:.2g}; "
            f"{self.nearer} is nearer to the reference",
            f"  largest difference{where} of {self.tensor}",
        ]
        return "\n".join(lines + [f"  calls {', '.join(self.ops)}"] * bool(self.ops))


@dataclass(frozen=True)
class Side:
    """One way to run a trace.

    Attributes:
        name: "eager", "compiled", "tape" (the replay's calls without graphs), "piecewise" or "full".
        error: largest error of its outputs beside the reference; None where it did not run.
        departure: where it first departs from eager and the reference, or None.
        note: why it did not run, or which bucket ran.
    """

    name: str
    error: float | None = None
    departure: Departure | None = None
    note: str = ""


@dataclass(frozen=True)
class TraceSides:
    """All ways to run one graph that Dynamo traced, on the arguments of one call.

    Attributes:
        tokens: of the call; 0 where the trace was not split.
        steps: segments and splitting ops between them.
        reference: the dtype of the reference.
    """

    tokens: int
    steps: int
    reference: str
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Bisection:
    """What pg.bisect found.

    Attributes:
        model_error: largest difference between the traced graphs run in eager and the model itself.
        departure: of the traces as a whole from the model, or of the first side of a trace; None where
            everything agrees.
    """

    traces: tuple[TraceSides, ...]
    model_error: float
    departure: Departure | None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for json.dump."""
        return asdict(self)

    def __str__(self) -> str:
        lines = []
        for number, trace in enumerate(self.traces):
            lines.append(
                f"graph {number}: {trace.tokens} tokens, {trace.steps} steps, reference {trace.reference}"
            )
            lines += map(_side_line, trace.sides)
        lines.append(f"the model itself, beside its graphs in eager: error {self.model_error:.2g}")
        found = [side.departure for trace in self.traces for side in trace.sides if side.departure]
        if self.departure is not None and self.departure not in found:
            found.insert(0, self.departure)
        return "\n".join([*lines, *(map(str, found) if found else ["nothing departs"])])


def _side_line(side: Side) -> str:
    error = "not run" if side.error is None else f"error {side.error:.2g}"
    departs = f", departs at {side.departure.step}" if side.departure else ""
    return f"  {side.name:10s} {error}{departs}" + (f" ({side.note})" if side.note else "")


def whole_model(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[float, Departure | None]:
    """(largest error, departure) of the traces run in eager beside the model run in eager."""
    if len(found) != len(wanted):
        return float("inf"), _trace_departure(Difference(float("inf"), (), f"{len(found)} tensors", 0.0))
    all_of = [difference(one, other) for one, other in zip(found, wanted, strict=True)]
    worst = max(all_of, key=lambda each: each.error, default=None)
    off = next((each for each in all_of if each.departs(None)), None)
    return (worst.error if worst else 0.0), (None if off is None else _trace_departure(off))


def _trace_departure(off: Difference) -> Departure:
    return Departure("eager", "trace", off.error, 0.0, off.tensor, off.at, "the model itself")
