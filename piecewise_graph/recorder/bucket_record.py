"""BucketRecord: one bucket of one trace, as pg.plan, pg.capture and pg.explain report it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BucketRecord:
    """What a bucket takes, planned or captured.

    Attributes:
        tokens: the bucket.
        graphs: how many graphs it has.
        graph_bytes: what it adds to the pool when the larger buckets were captured before it.
        mode: "piecewise", or "full" with the graph_key.
        trace: number of its trace in pg.explain.
        seconds: time of its rehearsal and capture; 0 in a plan.
        buffer_bytes: in a plan, what it adds to the owned buffers; the first bucket of a trace brings the
            static inputs.
        planned_bytes: what pg.plan said of `graph_bytes` before; None where it was not asked, or when full.
        replays: forwards served so far.
        token_counts: how many its tape is bound to: at most the bucket.
        bind_seconds: host time of binding them, each once.
        pool_bytes: of the pool after its capture; 0 in a plan.
        unpadded: reason -> segments that its replays run uncaptured at the exact size.
    """

    tokens: int
    graphs: int
    graph_bytes: int
    mode: str = "piecewise"
    trace: int = 0
    seconds: float = 0.0
    buffer_bytes: int = 0
    planned_bytes: int | None = None
    replays: int = 0
    token_counts: int = 0
    bind_seconds: float = 0.0
    pool_bytes: int = 0
    unpadded: dict[str, int] = field(default_factory=dict)
