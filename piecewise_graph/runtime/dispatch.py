"""Which way a call goes: a pure function of what is known, with a reason."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from piecewise_graph.buckets import bucket_for
from piecewise_graph.recorder.mode import FULL, PIECEWISE, Mode


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
        mode: of the tape.
        not_full: why the mode is not FULL, where the caller asked for that.
    """

    action: Action
    bucket: int | None = None
    reason: str | None = None
    mode: Mode = PIECEWISE
    not_full: str | None = None


@dataclass(frozen=True)
class Captured:
    """The tapes of one mode (and one key, in FULL mode).

    Attributes:
        proven: bucket -> whether its tape is proven to tolerate padding.
        failed: bucket -> why its capture failed.
        unpaddable: bucket -> why it serves its exact size only.
    """

    proven: Mapping[int, bool] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    unpaddable: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Situation:
    """What a decision depends on, besides the token count.

    Attributes:
        sizes: the buckets, ascending.
        may_capture: lazily, or because pg.capture is under way.
        piecewise, full: what is captured in either mode; `full` is None where the call did not ask for it.
        blocked: why no call of this trace can be replayed.
        not_full: why no call of this trace can be one graph.
        invalid: buckets outside of the sizes that the trace is valid for.
        over_budget: buckets that max_graph_bytes has no room for.
        returning: token counts that came before, and could not be padded.
    """

    sizes: Sequence[int]
    may_capture: bool
    piecewise: Captured = Captured()
    full: Captured | None = None
    blocked: str | None = None
    not_full: str | None = None
    invalid: frozenset[int] = frozenset()
    over_budget: Container[int] = ()
    returning: Container[int] = ()


def bucket_of(num_tokens: int, sizes: Sequence[int], invalid: Container[int]) -> int | None:
    """The bucket that a call is padded to; None where the trace is valid at none that is large enough."""
    return bucket_for(num_tokens, [size for size in sizes if size not in invalid])


def never_replayed(num_tokens: int, sizes: Sequence[int], blocked: str | None) -> str | None:
    """Why no such call is ever replayed, whatever is captured; or None. A long prompt asks at every call."""
    if blocked or num_tokens == 0:
        return blocked or "no_tokens"
    return "above_max_tokens" if num_tokens > max(sizes) else None


def decide(num_tokens: int, given: Situation) -> Decision:
    """Choose for a call of `num_tokens` tokens.

    The reasons, in the order in which they are tried: the trace's own (`blocked`), `no_tokens`,
    `above_max_tokens`; then, per mode, why the call cannot be padded (at the first call of a size:
    `bucket_outside_trace`, or why the trace cannot), `capture_failed`, `over_budget`, `not_captured`. A call
    that asked for a full graph and cannot have one is decided as a piecewise one.
    """
    if reason := never_replayed(num_tokens, given.sizes, given.blocked):
        return Decision(Action.COMPILED, reason=reason)
    bucket = bucket_of(num_tokens, given.sizes, given.invalid)
    not_full = None
    if given.full is not None:
        full = _decide_mode(num_tokens, bucket, given.full, replace(given, returning=()))
        not_full = given.not_full or full.reason
        if not_full is None:
            return replace(full, mode=FULL)
    return replace(_decide_mode(num_tokens, bucket, given.piecewise, given), not_full=not_full)


def _decide_mode(num_tokens: int, bucket: int | None, captured: Captured, given: Situation) -> Decision:
    alone = "bucket_outside_trace" if bucket is None else captured.unpaddable.get(bucket)
    if alone is not None and bucket != num_tokens:
        known = num_tokens in captured.proven or num_tokens in captured.failed
        if not known and not (given.may_capture and num_tokens in given.returning):
            return Decision(Action.COMPILED, reason=alone)
        bucket = num_tokens  # graphs for this size alone, from its second call on
    assert bucket is not None
    if bucket in captured.failed:
        return Decision(Action.COMPILED, reason="capture_failed")
    if bucket in captured.proven and (captured.proven[bucket] or bucket == num_tokens):
        return Decision(Action.REPLAY, bucket)
    if bucket in given.over_budget:
        return Decision(Action.COMPILED, reason="over_budget")
    if given.may_capture:
        return Decision(Action.CAPTURE, bucket)
    return Decision(Action.COMPILED, reason="not_captured")
