"""Which way a call goes: a pure function of what is known, with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from piecewise_graph.buckets import bucket_for


class Action(Enum):
    """REPLAY runs a tape, CAPTURE records one first, COMPILED runs the segments without graphs."""

    REPLAY = "replay"
    CAPTURE = "capture"
    COMPILED = "compiled"


@dataclass(frozen=True)
class Decision:
    """What to do with one call.

    Attributes:
        bucket: size to pad to; None when COMPILED.
        reason: why it is COMPILED; None otherwise.
    """

    action: Action
    bucket: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Situation:
    """What a decision depends on, besides the token count.

    Attributes:
        sizes: the buckets, ascending.
        captured: bucket -> whether its tape is proven to tolerate padding.
        failed: bucket -> why its capture failed.
        may_capture: lazily, or because pg.capture is under way.
        blocked: why no call of this trace can be replayed.
        unpaddable: bucket -> why it serves its exact size only.
        invalid: buckets outside of the sizes that the trace is valid for.
    """

    sizes: Sequence[int]
    captured: Mapping[int, bool]
    failed: Mapping[int, str]
    may_capture: bool
    blocked: str | None = None
    unpaddable: Mapping[int, str] = field(default_factory=dict)
    invalid: frozenset[int] = frozenset()


def decide(num_tokens: int, given: Situation) -> Decision:
    """Choose for a call of `num_tokens` tokens.

    The reasons, in the order in which they are tried: the trace's own (`blocked`), `no_tokens`,
    `above_max_tokens`, why the trace cannot be padded, `bucket_outside_trace`, `capture_failed`,
    `not_captured`.
    """
    if given.blocked:
        return _compiled(given.blocked)
    if num_tokens == 0:
        return _compiled("no_tokens")
    bucket = bucket_for(num_tokens, [size for size in given.sizes if size not in given.invalid])
    if bucket is None:
        above = num_tokens > max(given.sizes)
        return _compiled("above_max_tokens" if above else "bucket_outside_trace")
    if bucket in given.unpaddable and bucket != num_tokens:
        return _compiled(given.unpaddable[bucket])
    if bucket in given.failed:
        return _compiled("capture_failed")
    if bucket in given.captured and (given.captured[bucket] or bucket == num_tokens):
        return Decision(Action.REPLAY, bucket)
    return Decision(Action.CAPTURE, bucket) if given.may_capture else _compiled("not_captured")


def _compiled(reason: str) -> Decision:
    return Decision(Action.COMPILED, None, reason)
