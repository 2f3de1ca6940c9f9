"""`python -m piecewise_graph doctor`: runs what it reports, and says what to do where it failed."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention.batch_buffers import make_batch
from piecewise_graph.custom_ops.attention.call import AttentionCall
from piecewise_graph.custom_ops.attention.implementations import NAMES, load, serve
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable
from piecewise_graph.errors import PiecewiseError

OK, NOTE, BROKEN = "ok", "--", "BROKEN"
# Lowest version that works, first one that nobody tried. Tests of `_torch` tell what differs between them.
_VERSIONS = {"torch": ("2.11", "2.16"), "transformers": ("5", "6"), "triton": ("3.6", "4")}
_HEADS, _DIM, _TOKENS = 2, 64, 5


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it works, what was found, and what to do."""

    name: str
    state: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.state:6s}  {self.name:22s} {self.found}"
        return f"{line}\n{'':8s}{'':22s} what to do: {self.remedy}" if self.remedy else line


def run(_: argparse.Namespace | None = None) -> int:
    """Print a line per check as it ends; 0 where nothing is broken."""
    broken = 0
    for check in (_versions, _backend, _graphs, _compiler, _attention, _transformers, _ranks):
        for finding in _carefully(check):
            print(finding, flush=True)
            broken += finding.state == BROKEN
    print("everything that is here works" if not broken else f"{broken} broken")
    return 1 if broken else 0


def _carefully(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Whatever a check runs into is a finding."""
    try:
        yield from check()
    except Exception as error:
        remedy = (
            error.remedy if isinstance(error, PiecewiseError) else "mend what it says, and run this again"
        )
        yield Finding(check.__name__.strip("_"), BROKEN, _first_line(error), remedy)


def _versions() -> Iterator[Finding]:
    yield Finding("python", OK, platform.python_version())
    for package, (lowest, untried) in _VERSIONS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            yield Finding(package, NOTE, "not installed")
            continue
        if _key(found) < _key(lowest):
            yield Finding(package, BROKEN, f"{found} is too old", f"pip install '{package}>={lowest}'")
        elif _key(found) >= _key(untried):
            remedy = f"if something fails, try {package}<{untried}"
            yield Finding(package, NOTE, f"{found} is newer than what was tried", remedy)
        else:
            yield Finding(package, OK, found)
    name = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "none: stand-ins replace CUDA graphs"
    )
    yield Finding("CUDA device", OK if torch.cuda.is_available() else NOTE, name)
    depyf = importlib.util.find_spec("depyf") is not None
    yield Finding("depyf", OK if depyf else NOTE, "installed" if depyf else "not installed")


def _key(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13)."""
    parts = text.partition("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _backend() -> Iterator[Finding]:
    if "piecewise" not in entry_points(group="torch_dynamo_backends").names:
        remedy = (
            "pip install piecewise-graph, or pip install -e . in a checkout; "
            "pg.compile(model) works without an installation"
        )
        yield Finding("backend 'piecewise'", BROKEN, "torch.compile does not know it", remedy)
        return
    options: Any = {"compiler": "eager", "max_tokens": 8}
    _call(torch.compile(_function, backend="piecewise", options=options))
    yield Finding(
        "backend 'piecewise'", OK, "torch.compile(..., backend='piecewise') ran and agrees with eager"
    )


def _graphs() -> Iterator[Finding]:
    device = _device()
    x = torch.arange(4.0, device=device)
    y = torch.zeros_like(x)
    replay = pg.GraphPool().capture_call(lambda: y.copy_(x * 2), device=device)
    x += 1
    replay()
    agrees = torch.equal(y, x * 2)
    what = "one graph was captured and replayed" if device.type == "cuda" else "a stand-in was replayed"
    yield Finding("capture and replay", OK if agrees else BROKEN, what + ("" if agrees else ", wrongly"))
    fast = pg.compile(_function, token_dim={"x": 0}, compiler="eager", max_tokens=8)
    with pg.counters.expect(replays=2, fallbacks=0):
        _call(fast, calls=3)
    yield Finding("replay of a bucket", OK, "3 tokens in a bucket of 4 agree with eager")


def _compiler() -> Iterator[Finding]:
    config = pg.PiecewiseConfig.from_options({})
    before = pg.counters.snapshot()
    fast = pg.compile(_function, token_dim={"x": 0}, max_tokens=8)
    _call(fast)
    yield Finding("compiler", OK, f"{config.compiler!r} compiled a segment that agrees with eager")
    if config.cache_dir is None:
        yield Finding("cache_dir", NOTE, "not set: every process compiles anew")
        return
    moved = {name: count for name, count in pg.counters.snapshot().items() if count > before.get(name, 0)}
    refused = [name for name in moved if name.startswith(("cache_unsaved:", "cache_rejected:"))]
    if refused:
        remedy = "give it a private folder: chmod 700, owned by this user, with room on the disk"
        yield Finding("cache_dir", BROKEN, f"{config.cache_dir}: {', '.join(refused)}", remedy)
    else:
        what = "loaded from" if moved.get("cache_hits") else "written to"
        yield Finding("cache_dir", OK, f"a segment was {what} {config.cache_dir}")


def _attention() -> Iterator[Finding]:
    for name in NAMES:
        missing = load(name).missing
        finding = Finding(f"attention {name!r}", NOTE, f"not used here: {missing}")
        try:
            finding = _attend(name) if missing is None else finding
        except PiecewiseError as error:
            finding = Finding(finding.name, NOTE, f"not used here: {error.what}")
        except Exception as error:  # its own kernels
            remedy = f"reinstall its package, or pass another implementation than {name!r}"
            finding = Finding(finding.name, BROKEN, _first_line(error), remedy)
        yield finding


def _attend(name: str) -> Finding:
    """One prefill of a few tokens beside torch's own attention in float64."""
    device, dtype = _device(), torch.bfloat16 if torch.cuda.is_available() else torch.float32
    cache = PagedKVCache(
        num_layers=1, num_pages=4, page_size=16, kv_heads=_HEADS, head_dim=_DIM, dtype=dtype, device=device
    )
    table = RequestTable.for_cache(cache, max_requests=1, max_seq_len=16)
    slot = table.open()
    table.reserve({slot: _TOKENS})
    batch, _ = make_batch(cache, table, [slot], [_TOKENS], [_TOKENS])
    q, k, v = (torch.randn(_TOKENS, _HEADS, _DIM, device=device).to(dtype) for _ in "qkv")
    out = torch.empty_like(q)
    serve(batch, AttentionCall(q, k, v, out, 0, _DIM**-0.5, implementation=name), captured=False)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    error = float((out.double() - wanted).abs().max())
    if error > 16 * torch.finfo(dtype).eps:
        remedy = f"pass another implementation than {name!r}, and report the versions above"
        return Finding(f"attention {name!r}", BROKEN, f"is off by {error:.2g}", remedy)
    return Finding(f"attention {name!r}", OK, f"agrees with float64 within {error:.1g}")


def _transformers() -> Iterator[Finding]:
    if importlib.util.find_spec("transformers") is not None:
        pg.register_attention()
        yield Finding("register_attention", OK, "attn_implementation='piecewise' is known to transformers")


def _ranks() -> Iterator[Finding]:
    count, name = torch.cuda.device_count(), "several GPUs"
    if count < 2:
        yield Finding(name, NOTE, "one here" if count else "none here")
        return
    reaches = torch.cuda.can_device_access_peer
    apart = [f"{a}-{b}" for a, b in combinations(range(count), 2) if not (reaches(a, b) and reaches(b, a))]
    state, found = OK, "with peer access: sums over ranks, up to a few MiB, are a kernel of ours"
    if apart:
        state, found = NOTE, f"without peer access between {', '.join(apart)}: NCCL sums over ranks there"
    yield Finding(name, state, f"{count} {found}")
    yield from _nccl(pg.PiecewiseConfig.environment("NCCL_"))


def _nccl(variables: Mapping[str, str]) -> Iterator[Finding]:
    """What to set for NCCL depends on what else a process does, which nothing here can see."""
    mixing, multicast = "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_NVLS_ENABLE"
    if variables.get(mixing) == "0":
        found = f"{mixing} is 0: no call outside of a graph may be launched while a graph runs"
        yield Finding("NCCL in graphs", NOTE, found, "unset it, unless every call of the model is replayed")
    else:
        found = f"{mixing} is not 0: 8 KiB over two H100s take NCCL 8.2 us in a graph, not 6.9"
        remedy = f"where every call of the model is replayed, set {mixing}=0 before the process group is made"
        yield Finding("NCCL in graphs", NOTE, found, remedy)
    if variables.get(multicast) != "0":
        remedy = f"set {multicast}=0 where that fails (containers, partitions of a host)"
        yield Finding("NCCL multicast", NOTE, "NCCL may allocate multicast memory", remedy)


def _function(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x) * 2 + x


@torch.no_grad()
def _call(fast: Callable[[Tensor], Tensor], calls: int = 1) -> None:
    x = torch.randn(3, 8, device=_device())
    for _ in range(calls):
        torch.testing.assert_close(fast(x), _function(x), rtol=1e-4, atol=1e-5)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
