"""Every op of torch's `op_db` as a function of `[T, ...]`, with tokens as each dimension of its first tensor.

An op is right, or its calls are counted as fallbacks or exact-size segments with a reason.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import piecewise_graph as pg
from fuzz.compare import SHAKES, difference, same, shake, snapshot
from fuzz.pairs import Failure, line_of, place_of, quietly_in_time, served
from fuzz.rows import Row, row_of

TOKENS = (5, 8, 3, 7, 1)
Places = Sequence[tuple[int, int]]  # (leaf, dimension of it that counts tokens)
BUCKETS = [4, 8]
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
# They do not check what indexes memory: on random integers and sizes eager itself reads or writes beyond it.
UNCHECKED = (
    "lu_unpack",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "nn.functional.ctc_loss",
    "_segment_reduce",
)
# Their values are whatever the memory held.
UNINITIALISED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
)


@dataclass(frozen=True)
class OpCase:
    """A sample of an op, with tokens as one dimension of its first tensor."""

    op: str
    variant: str
    dtype: torch.dtype
    sample: int
    dim: int

    def __str__(self) -> str:
        variant = f".{self.variant}" if self.variant else ""
        return f"{self.op}{variant} {str(self.dtype)[6:]} sample {self.sample} dim {self.dim}"


@cache
def _infos() -> dict[tuple[str, str], Any]:
    if find_spec("expecttest") is None:  # torch's test harness imports it; op_db uses nothing of it
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db

    return {(info.name, info.variant_test_name): info for info in op_db}


@lru_cache(maxsize=1)
def _samples(op: str, variant: str, dtype: torch.dtype) -> list[Any]:
    """The samples of an op whose input, or first of its inputs, is a tensor with dimensions."""
    torch.manual_seed(0)
    found = _infos()[op, variant].sample_inputs("cpu", dtype, requires_grad=False)
    samples = []
    for sample in found:
        first = _first(sample)
        if isinstance(first, Tensor) and first.layout == torch.strided and first.ndim and first.numel():
            samples.append(sample)
    return samples


def _first(sample: Any) -> Any:
    return sample.input[0] if isinstance(sample.input, (list, tuple)) and sample.input else sample.input


def op_cases(samples: int, name: str | None = None) -> list[OpCase]:
    """Of each op the `samples` largest samples, and of those every dimension of the first tensor."""
    return [
        case
        for key, info in _infos().items()
        if name in (None, key[0]) and key[0] not in UNCHECKED
        for case in _cases(info, samples)
    ]


def _cases(info: Any, samples: int) -> Iterator[OpCase]:
    dtype = next((d for d in DTYPES if d in info.dtypes), None)
    if dtype is None:
        return
    found = _samples(info.name, info.variant_test_name, dtype)
    order = sorted(range(len(found)), key=lambda i: -_interest(found[i]))
    for index in order[:samples]:
        for dim in range(_first(found[index]).ndim):
            yield OpCase(info.name, info.variant_test_name, dtype, index, dim)


def _interest(sample: Any) -> int:
    """Samples with more elements say more; very large ones take longer."""
    return min(_first(sample).numel(), 4096)


def run_op(case: OpCase, compiler: str, device: torch.device) -> Row:
    """The verdict on an op with tokens in one dimension."""

    def judge() -> tuple[str, str]:
        with quietly_in_time(), torch.random.fork_rng(devices=[]), torch.no_grad():
            right = _Op(case, device).run(compiler)
        return ("right", "") if right else ("invalid", "eager takes no other size there")

    return row_of(str(case), judge)


class _Op:
    """An op's sample as a function of its first tensor, and of the tensors of the same size beside it."""

    def __init__(self, case: OpCase, device: torch.device) -> None:
        self.case, self.device = case, device
        sample = _samples(case.op, case.variant, case.dtype)[case.sample]
        tree = (sample.input, tuple(sample.args), dict(sample.kwargs))
        self.leaves, self.spec = pytree.tree_flatten(tree)
        self.call = _infos()[case.op, case.variant].op
        size, ndim = self.leaves[0].shape[case.dim], self.leaves[0].ndim
        tensors = [(i, leaf) for i, leaf in enumerate(self.leaves) if i and isinstance(leaf, Tensor)]
        by_place = [(i, case.dim) for i, t in tensors if t.ndim > case.dim and t.shape[case.dim] == size]
        from_right = case.dim - ndim  # as broadcasting aligns them
        by_broadcast = [
            (i, t.ndim + from_right)
            for i, t in tensors
            if t.ndim >= -from_right and t.shape[from_right] == size
        ]
        first = [(0, case.dim)]
        self.choices = [first, first + by_place, first + by_broadcast]  # which leaves take tokens, and where

    def run(self, compiler: str) -> bool:
        """Compare calls of several sizes; False where eager takes only the sample's own."""
        for chosen in self.choices:
            sizes = [n for n in TOKENS if self._eager(chosen, n) is not None]
            if len(sizes) > 2:
                self._compare(chosen, sizes, compiler)
                return True
        return False

    def _function(self, chosen: Places, leaves: Sequence[Any]) -> Any:
        call, spec, rest = self.call, self.spec, list(leaves)

        def function(x: Tensor, *others: Tensor) -> Any:
            filled = list(rest)
            for (index, _), value in zip(chosen, (x, *others), strict=True):
                filled[index] = value
            given, args, kwargs = pytree.tree_unflatten(filled, spec)
            return call(given, *args, **kwargs)

        return function

    def _inputs(self, chosen: Places, tokens: int, seed: int = 0) -> list[Tensor]:
        """`tokens` rows drawn from the sample's, then moved, so that no two are equal."""
        generator = torch.Generator().manual_seed(1000 * seed + tokens)
        found = []
        for index, dim in chosen:
            leaf = self.leaves[index]
            rows = torch.randint(leaf.shape[dim], (tokens,), generator=generator)
            value = leaf.detach().index_select(dim, rows)
            if value.is_floating_point() or value.is_complex():
                value = value * (1 + 0.05 * torch.rand(value.shape, generator=generator))
            found.append(value.to(self.device))
        return found

    def _eager(self, chosen: Places, tokens: int) -> Any:
        """Eager's answer with the inputs after the call, or None where it raises."""
        leaves = [leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        given = self._inputs(chosen, tokens)
        try:
            torch.manual_seed(7)
            return snapshot((self._function(chosen, leaves)(*given), given))
        except Exception:
            return None

    def _compare(self, chosen: Places, sizes: Sequence[int], compiler: str) -> None:
        leaves = [leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        pool = pg.GraphPool(poison=self.device.type == "cpu")
        options = {"compiler": compiler, "capture_sizes": BUCKETS, "max_tokens": BUCKETS[-1], "pool": pool}
        function = self._function(chosen, leaves)
        fast = pg.compile(function, token_dim={"x": self.case.dim}, **options)
        for tokens in sizes:
            wanted, given = self._eager(chosen, tokens), self._inputs(chosen, tokens)
            before = served()
            torch.manual_seed(7)
            try:
                got = snapshot((fast(*given), given))
            except Exception as error:
                self._raised(function, chosen, tokens, compiler, error)
                return
            if served() == before:
                raise Failure("error", f"T = {tokens}: neither replayed nor counted as a fallback")
            if self._is_chance():
                got, wanted = _shapes(got), _shapes(wanted)
            told = difference(
                got,
                wanted,
                lambda tokens=tokens: self._exact(chosen, tokens),
                lambda tokens=tokens: self._shaken(chosen, tokens),
            )
            if told is not None:
                self._wrong(function, chosen, tokens, compiler, told)

    def _is_chance(self) -> bool:
        """The op draws numbers, or returns memory as it is: only shapes can be compared."""
        return self.case.op in UNINITIALISED or bool(pg.counters.snapshot().get("fallbacks:random_numbers"))

    def _exact(self, chosen: Places, tokens: int) -> Any:
        leaves = [_wide(leaf) for leaf in self.leaves]
        given = [_wide(t.cpu()) for t in self._inputs(chosen, tokens)]
        try:
            return snapshot((self._function(chosen, leaves)(*given), given))
        except Exception:  # no kernel for float64: eager is what there is
            return self._eager(chosen, tokens)

    def _shaken(self, chosen: Places, tokens: int) -> list[Any]:
        found = []
        for number in range(SHAKES):
            generator = torch.Generator().manual_seed(number)
            given = [shake(t, generator) for t in self._inputs(chosen, tokens)]
            leaves = [leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
            found.append(snapshot((self._function(chosen, leaves)(*given), given)))
        return found

    def _raised(self, function: Any, chosen: Places, tokens: int, compiler: str, error: Exception) -> None:
        told = f"T = {tokens}: {type(error).__name__}: {line_of(error)}{place_of(error)}"
        plain = self._plain(function, chosen, tokens, compiler)
        raise Failure("torch" if isinstance(plain, Exception) else "error", told) from error

    def _is_steady(self, chosen: Places, tokens: int) -> bool:
        """Eager answers the same whatever lies in the memory beside its arguments."""
        first = _tensors(self._eager(chosen, tokens))
        for number in range(8):
            for size in (2**6, 2**9, 2**12, 2**16):  # freed at once, for the next allocations
                torch.full((size,), (-1e30) ** (number % 2) * number)
            if not all(map(same, first, _tensors(self._eager(chosen, tokens)))):
                return False
        return True

    def _wrong(self, function: Any, chosen: Places, tokens: int, compiler: str, told: str) -> None:
        if not self._is_steady(chosen, tokens):
            raise Failure("invalid", f"T = {tokens}: eager's answer depends on what lies in memory")
        plain, wanted = self._plain(function, chosen, tokens, compiler), self._eager(chosen, tokens)
        as_wrong = isinstance(plain, Exception) or difference(
            plain, wanted, lambda: self._exact(chosen, tokens), lambda: self._shaken(chosen, tokens)
        )
        raise Failure("torch" if as_wrong else "wrong", f"T = {tokens}: {told}")

    def _plain(self, function: Any, chosen: Places, tokens: int, compiler: str) -> Any:
        """What plain torch.compile answers, or what it raised."""
        torch._dynamo.reset()
        given = self._inputs(chosen, tokens)
        if tokens > 1:
            torch._dynamo.mark_dynamic(given[0], self.case.dim)
        try:
            torch.manual_seed(7)
            return snapshot((torch.compile(function, backend=compiler)(*given), given))
        except Exception as error:
            return error


def _wide(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_complex():
        return leaf.detach().to(torch.complex128)
    return leaf.detach().double() if leaf.is_floating_point() else leaf.detach().clone()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _shapes(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: (tuple(t.shape), t.dtype), tree)
