"""Linears of one input by the library (cuBLAS), with one launch for two of one shape where that is faster.

Note [Two addresses]
A batched product wants its matrices at equal distances. Two always are, wherever they lie. So two weights are
handed over as one tensor whose first stride is the distance between them, and two results likewise. Such a
tensor is made of an address; it owns no memory, and does not outlive the call.

Note [One launch or two]
Where all programs of one product run at once, one launch for two is faster (bench_linears_prompts). With more
work it takes 0.84 to 1.5 times as long, by which kernels the library picks for one and for two. So it is
timed then, when code is compiled and the sizes of its graphs are known. Never timed, or under
`torch.use_deterministic_algorithms`, two launches stay.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.launch import kernels_serve, multiprocessors

_TILE = 128  # rows and columns of a result that one program of the library computes, more or less
_GAIN = 0.97  # one launch is taken where it needs at most so much of the time of two
_BIASED = 0.2  # rounds; with more, copying the biases costs what one launch saves
_ROUNDS, _REPEATS = 4, 3  # of timing
_DTYPES = {str(dtype): dtype for dtype in (torch.bfloat16, torch.float16)}


class _Case(NamedTuple):
    """Two products of one shape.

    Attributes:
        tokens: rows of x.
        rows, columns: of each weight.
    """

    device: torch.device
    dtype: torch.dtype
    tokens: int
    rows: int
    columns: int

    def name(self) -> str:
        return f"{self.dtype} {self.tokens} {self.rows} {self.columns}"

    def rounds(self) -> float:
        """Programs of one of them alone, over those that run at once."""
        return -(-self.tokens // _TILE) * -(-self.rows // _TILE) / multiprocessors(self.device)


_timed: dict[_Case, bool] = {}  # in this process: one launch is faster


@cache
def _has_numpy() -> bool:
    """Torch makes tensors of addresses with it."""
    try:
        torch.zeros(1, device="cpu").numpy()
    except RuntimeError:
        return False
    return True


def by_library(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """`torch.nn.functional.linear` of `x` and each weight.

    Neighbours of one shape are one launch where that is faster (Note [One launch or two]).
    """
    operands, found = list(zip(weights, biases, strict=True)), list[Tensor]()
    while len(found) < len(operands):
        pair = slice(len(found), len(found) + 2)
        if _are_one_launch(x, weights[pair], biases[pair]):
            found += _both(x, weights[pair], biases[pair])
        else:
            found.append(functional.linear(x, *operands[pair.start]))
    return found


def are_plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    """Weights `[rows, columns]` and biases `[rows]`, or none, that lie as kernels read them."""
    for weight, bias in zip(weights, biases, strict=True):
        fits = weight.shape[1:] == x.shape[-1:] and weight.is_contiguous()
        if not fits or (bias is None) != (biases[0] is None):
            return False
        if bias is not None and bias.shape != weight.shape[:1]:
            return False
        if any(
            (each.dtype, each.device) != (x.dtype, x.device) for each in (weight, bias) if each is not None
        ):
            return False
    return x.dim() > 0


def time_pairs(like: Tensor, tokens: int, rows: Sequence[int], columns: int) -> None:
    """Have `by_library` know what is faster for `tokens` rows of x (Note [One launch or two]).

    It makes some forty launches on random operands, and waits for them.

    Args:
        like: a tensor of the dtype, and on the device, of all operands.
        rows: of each weight. columns: of all.
    """
    if not _reads_addresses(like) or torch.are_deterministic_algorithms_enabled():
        return
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    for one, other in itertools.pairwise(rows):
        case = _Case(like.device, like.dtype, tokens, one, columns)
        if one == other and case not in _timed and case.rounds() > 1:
            with suppress(RuntimeError):  # for want of memory: two launches stay
                _timed[case] = _one_launch_is_faster(case)


def timed_on(device: torch.device) -> dict[str, bool]:
    """What `time_pairs` knows of `device`: dtype and sizes -> one launch is faster."""
    return {case.name(): faster for case, faster in _timed.items() if case.device == device}


def remember(device: torch.device, found: Mapping[str, bool]) -> None:
    """Have `by_library` know what was timed in another process.

    Args:
        found: as `timed_on` gave it there.

    Raises:
        ValueError, TypeError, AttributeError, KeyError: it is something else; nothing is remembered.
    """
    known = {}
    for name, faster in found.items():
        dtype, *sizes = name.split()
        tokens, rows, columns = map(int, sizes)
        known[_Case(device, _DTYPES[dtype], tokens, rows, columns)] = bool(faster)
    _timed.update(known)


def _reads_addresses(x: Tensor) -> bool:
    """Torch can be handed two addresses as one tensor. TunableOp would copy all that lies between them."""
    if x.is_cuda and torch.cuda.tunable.is_enabled():
        return False
    return kernels_serve(x) and x.dtype in _DTYPES.values() and _has_numpy()


def _one_launch_is_faster(case: _Case) -> bool:
    device, dtype, tokens, rows, columns = case
    numbers = torch.Generator(device).manual_seed(0)  # those of the user's generator stay
    x, weights, out = (
        torch.empty(shape, device=device, dtype=dtype).normal_(generator=numbers)
        for shape in ((1, tokens, columns), (2, rows, columns), (2, tokens, rows))
    )

    def apart() -> None:
        for weight, result in zip(weights, out, strict=True):
            torch.mm(x[0], weight.T, out=result)

    def together() -> None:
        torch.bmm(x.expand(2, -1, -1), weights.mT, out=out)

    one, two = _seconds((together, apart), device)
    return one <= _GAIN * two


def _seconds(works: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """The least that some calls of each took. They take turns, because clocks change."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    def once(work: Callable[[], None]) -> float:
        began = wait()
        for _ in range(_REPEATS):
            work()
        return wait() - began

    rounds = [[once(work) for work in works] for _ in range(_ROUNDS + 1)]
    return [min(times) for times in zip(*rounds[1:], strict=True)]  # the first one loads kernels


def _are_one_launch(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
    if len(weights) != 2 or weights[0].shape != weights[1].shape or not weights[0].numel() or not x.numel():
        return False
    if not _reads_addresses(x) or not are_plain(x, weights, biases):
        return False
    case = _Case(x.device, x.dtype, x.numel() // x.shape[-1], *weights[0].shape)
    if biases[0] is not None:
        return case.rounds() <= _BIASED
    return case.rounds() <= 1 or (
        _timed.get(case, False) and not torch.are_deterministic_algorithms_enabled()
    )


def _both(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """A linear for each of two weights of one shape, by one launch."""
    found = [x.new_empty([*x.shape[:-1], len(weight)]) for weight in weights]
    if (weights[0].data_ptr() < weights[1].data_ptr()) != (found[0].data_ptr() < found[1].data_ptr()):
        found.reverse()
    for result, bias in zip(found, biases, strict=True):
        if bias is not None:
            result.copy_(bias)
    flat = x.reshape(-1, x.shape[-1])
    operands = flat.expand(2, *flat.shape), _spanned(*weights).mT
    _spanned(*found).baddbmm_(*operands, beta=0 if biases[0] is None else 1)
    return found


def _spanned(first: Tensor, second: Tensor) -> Tensor:
    """Both as `[2, rows, columns]`, the one at the lower address first (Note [Two addresses]).

    Args:
        first, second: contiguous, of one shape and dtype, on one device.
    """
    low, high = sorted((first, second), key=Tensor.data_ptr)
    columns, size = low.shape[-1], low.element_size()
    shape, between = (2, low.numel() // columns, columns), high.data_ptr() - low.data_ptr()
    if not low.is_cuda:
        memory = (ctypes.c_byte * (between + low.nbytes)).from_address(low.data_ptr())
        return torch.frombuffer(memory, dtype=low.dtype).as_strided(shape, (between // size, columns, 1))
    strides = between, columns * size, size
    described = {"data": (low.data_ptr(), False), "typestr": f"<i{size}", "shape": shape, "strides": strides}
    holder = SimpleNamespace(__cuda_array_interface__={"version": 3, **described})
    return torch.as_tensor(holder, device=low.device).view(low.dtype)  # it has no name for bfloat16
