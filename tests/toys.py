"""Toy splitting ops, models and callers that tests share.

The ops live in the namespace `toy` and take tokens in dimension 0. Misuse shows in their results: ops that
mix tokens subtract the mean, so one padded row changes every live row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecewise_graph as pg

LIBRARY = torch.library.Library("toy", "FRAGMENT")
WIDTH = 8
SIZES = [4, 8]
COUNTS = (3, 3, 4, 1, 2, 6, 8, 5, 6, 9)  # first calls, replays, both edges of both buckets, above them
BUCKETS, ABOVE = 2, 1  # of COUNTS: buckets that are met, calls above them
REPLAYS = len(COUNTS) - BUCKETS - ABOVE


@dataclass(frozen=True)
class Seen:
    """One call of a toy op: its name, the tokens it saw, and a copy of what it saw."""

    op: str
    tokens: int
    value: Tensor


_seen: list[Seen] | None = None


@contextmanager
def watching() -> Iterator[list[Seen]]:
    """Collect the calls of toy ops that ran. Tracing runs their fakes, which are not collected."""
    global _seen  # noqa: PLW0603
    _seen = found = []
    try:
        yield found
    finally:
        _seen = None


def note(op: str, x: Tensor) -> None:
    if _seen is not None:
        _seen.append(Seen(op, x.shape[0], x.clone()))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0, keepdim=True)


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Define `toy::...` with a kernel for all devices and a fake; returns its qualified name."""
    name = f"toy::{schema.partition('(')[0]}"
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=LIBRARY)
    return name


def _mix(x: Tensor) -> Tensor:
    note("mix", x)
    return centred(x)


def _mix_out(x: Tensor, out: Tensor) -> None:
    note("mix_out", x)
    out.copy_(centred(x))


def _mix_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    note("mix_pair", x)
    return centred(x), x.mean(0, keepdim=True) + x


def _places(x: Tensor, most: int) -> Tensor:
    """Indices up to `most`, a row each; the last row gets the largest."""
    return (torch.arange(x.shape[0], device=x.device) + most + 1 - x.shape[0]).clamp(0, most)


def _mix_strided(x: Tensor) -> Tensor:
    note("mix_strided", x)
    return centred(x).t().contiguous().t()


def _mix_padded(x: Tensor) -> Tensor:
    note("mix_padded", x)
    return x * 2


def _count_padded(x: Tensor, out: Tensor) -> None:
    """Number the rows, padded ones too."""
    note("count_padded", x)
    out.copy_(torch.arange(x.shape[0], device=x.device))


def _point_to_last(rows: Tensor) -> None:
    note("point_to_last", rows)
    rows.fill_(-1)


def _windows(x: Tensor) -> Tensor:
    """[0, 1, 2], [1, 2, 3], ...: windows that share memory."""
    note("windows", x)
    return torch.arange(x.shape[0] + 2, device=x.device).unfold(0, 3, 1)


def _fake_windows(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] + 2, dtype=torch.int64).unfold(0, 3, 1)


def _halve(x: Tensor) -> None:
    note("halve", x)
    x.mul_(0.5)


def _choose(x: Tensor, out: Tensor) -> None:
    note("choose", x)
    out.copy_(x.argmax(-1))


def _append(x: Tensor, cache: Tensor) -> None:
    """Add up the rows: a second call, or a call with padded rows, changes the sum."""
    note("append", x)
    cache.add_(x.sum(0))


HOOK: list[Callable[[Tensor], Tensor]] = [lambda x: x]  # what toy::call_back runs


def _call_back(x: Tensor) -> Tensor:
    return HOOK[0](x)


def _stack(xs: Sequence[Tensor]) -> Tensor:
    note("stack", xs[0])
    return centred(sum(xs, torch.zeros_like(xs[0])))


define("mix(Tensor x) -> Tensor", _mix, torch.empty_like)
define("mix_out(Tensor x, Tensor(a!) out) -> ()", _mix_out, lambda x, out: None)
define("choose(Tensor x, Tensor(a!) out) -> ()", _choose, lambda x, out: None)
define("mix_pair(Tensor x) -> (Tensor, Tensor)", _mix_pair, lambda x: (x.clone(), x.clone()))
define("mix_strided(Tensor x) -> Tensor", _mix_strided, torch.empty_like)
define("mix_padded(Tensor x) -> Tensor", _mix_padded, torch.empty_like)
define("count_padded(Tensor x, Tensor(a!) out) -> ()", _count_padded, lambda x, out: None)
define("point_to_last(Tensor(a!) rows) -> ()", _point_to_last, lambda rows: None)
define("windows(Tensor x) -> Tensor", _windows, _fake_windows)
define("halve(Tensor(a!) x) -> ()", _halve, lambda x: None)
define("append(Tensor x, Tensor(a!) cache) -> ()", _append, lambda x, cache: None)
define("call_back(Tensor x) -> Tensor", _call_back, torch.empty_like)
define(
    "places(Tensor x, int most) -> Tensor",
    _places,
    lambda x, most: x.new_empty(x.shape[0], dtype=torch.int64),
)
define("mix_list(Tensor[] xs) -> Tensor", _stack, lambda xs: torch.empty_like(xs[0]))

for _op in (
    "mix",
    "places",
    "mix_out",
    "choose",
    "mix_pair",
    "mix_strided",
    "windows",
    "halve",
    "point_to_last",
    "append",
    "mix_list",
    "call_back",
):
    pg.register_splitting_op(f"toy::{_op}")
pg.register_splitting_op("toy::mix_padded", padded=True)
pg.register_splitting_op("toy::count_padded", padded=True)

ops = torch.ops.toy


class Blocks(nn.Module):
    """`layers` residual blocks, each around one functional splitting op: layers + 1 segments."""

    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = x + ops.mix(linear(x))
        return x * 2


class Weighs(nn.Module):
    """Two inputs with tokens in dimension 0; one goes through an op."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x * 2) + y


class Chooses(nn.Module):
    """An op fills indices, and the next segment looks them up.

    Args:
        inline: the segment that allocates the indices does nothing else.
    """

    def __init__(self, inline: bool = False) -> None:
        super().__init__()
        self.inline, self.table = inline, nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        ops.choose(x if self.inline else x * 2, out)
        return ops.mix(self.table(out)) + x


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    """`pg.compile` a model of `x` with tokens in dimension 0; by default without Inductor, at SIZES."""
    token_dim = options.pop("token_dim", {"x": 0})
    defaults = {"compiler": "eager", "capture_sizes": SIZES, "max_tokens": SIZES[-1], "pool": new_pool()}
    return pg.compile(model, token_dim=token_dim, **(defaults | options))


def through_torch(model: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Any:
    """Plain `torch.compile` with our backend, with the same defaults as `compiled`."""
    defaults = {"compiler": "eager", "capture_sizes": SIZES, "max_tokens": SIZES[-1]}
    return torch.compile(model, backend="piecewise", dynamic=dynamic, options=defaults | options)


BOTH = pytest.mark.parametrize(
    "entry", [compiled, partial(through_torch, dynamic=True)], ids=["pg.compile", "torch.compile"]
)


def called(model: Callable[..., Any], device: torch.device, **options: Any) -> Any:
    """A compiled model that was traced by one call and has captured nothing."""
    fast = compiled(model, **({"capture": "explicit"} | options))
    fast(rows(3, device))
    return fast


def captured(fast: Any, device: torch.device, **options: Any) -> Any:
    """The report of `pg.capture` for a model of one input `x`."""
    return pg.capture(fast, lambda n: rows(n, device), progress=False, **options)


def frozen(model: Callable[..., Any], device: torch.device, **options: Any) -> Any:
    """The frozen call of a model of one input `x`."""
    return pg.freeze(compiled(model, **options), rows(3, device))


def new_pool() -> pg.GraphPool:
    """A pool that on a CPU overwrites memory which must not be read any more."""
    return pg.GraphPool(poison=not torch.cuda.is_available())


def rows(count: int, device: torch.device, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, device=device)


def assert_same(found: Any, wanted: Any) -> None:
    """Assert equality within rounding; tuples and lists element by element."""
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    elif isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


def check(
    model: Callable[..., Any],
    device: torch.device,
    *,
    counts: Sequence[int] = COUNTS,
    expect: dict[str, int] | None = None,
    **options: Any,
) -> Any:
    """Compile `model`, compare it with eager at every count, and return the compiled model.

    Args:
        counts: tokens of each call, in order.
        expect: counter -> by how much all calls together move it.
    """
    fast = compiled(model, **options)
    with pg.counters.expect(**(expect or {})):
        for count in counts:
            x = rows(count, device)
            wanted = model(x.clone())
            assert_same(fast(x.clone()), wanted)
    return fast


def counts_of(segments: int, op_steps: int, *, inline: int = 0) -> dict[str, int]:
    """The counters that `check` moves for a model of `segments` segments, all of them padded."""
    return {
        "traces": 1,
        "segments": segments,
        "inline_segments": inline,
        "op_steps": op_steps,
        "tapes": BUCKETS,
        "captures": BUCKETS * segments,
        "replays": REPLAYS,
        "fallbacks": ABOVE,
        "unpadded_segments": 0,
    }


def fallbacks(fast: Any) -> dict[str, int]:
    """Reason -> calls, summed over all traces of a model."""
    found: dict[str, int] = {}
    report = pg.explain(fast)
    found.update(report.fallbacks)
    for trace in report.traces:
        for reason, calls in trace.fallbacks.items():
            found[reason] = found.get(reason, 0) + calls
    return found
