"""How a metadata op is called. Needs torch only; Triton is imported with the first launch.

An op writes declared outputs and returns nothing. It reads no device data on the host and allocates nothing
on CUDA, so it runs inside a CUDA graph. A call, `build_tree(batch, ...)`, dispatches
`torch.ops.piecewise.build_tree`: the torch reference on a CPU, one Triton launch on CUDA. A loop binds the op
once and launches it many times: `launch = build_tree.bind(batch, ...); launch()` skips dispatch, checks and
Triton's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial, update_wrapper
from typing import Any, Generic, ParamSpec

import torch

from piecewise_graph.kernels.launch import Planned, kernels_serve

from .op_signature import Call, Signature, layout_of

Rule = Callable[[Call], None]
P = ParamSpec("P")

_library = torch.library.Library("piecewise", "FRAGMENT")


class MetadataOp(Generic[P]):
    """An op of the namespace `piecewise`: call it, or bind it.

    Args:
        reference: the op in torch, on any device, without a host sync. Its parameters declare the signature.
        rule: what else has to hold of sizes; raises MetadataError.
        writes: tensors written in place, next to those of `out`.

    Attributes:
        name: of the op.
        flatten: (the call's arguments) -> the op's arguments, in the order of its schema.
    """

    def __init__(self, reference: Callable[P, None], rule: Rule, writes: Collection[str]) -> None:
        self.reference, self._rule = reference, rule
        self._signature = Signature(reference, writes)
        self.name, self.flatten = self._signature.name, self._signature.flatten
        self._checked = lru_cache(maxsize=512)(self._check)  # a loop's calls differ in their data alone
        _library.define(self._signature.schema)
        _library.impl(self.name, self._on_cpu, "CPU")
        _library.impl(self.name, lambda *flat: self.kernel(flat)(), "CUDA")
        # It returns nothing, and its outputs have their layout already.
        torch.library.register_fake(f"piecewise::{self.name}", lambda *flat: None, lib=_library)
        self._op = getattr(torch.ops.piecewise, self.name).default
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run once, on the current stream.

        Raises:
            MetadataError: the tensors do not fit together; nothing was written.
        """
        self._op(*self.flatten(*args, **kwargs))

    def bind(self, *args: P.args, **kwargs: P.kwargs) -> Callable[[], None]:
        """A zero-argument launch on these very tensors, which the caller keeps alive.

        Raises:
            MetadataError: the tensors do not fit together. The launch itself checks nothing.
        """
        flat = self.flatten(*args, **kwargs)
        if flat[0].is_cuda:
            return self.kernel(flat)
        self.check(flat)
        return partial(self.reference, *args, **kwargs)

    def compile_ahead(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Have the kernel of such a call compiled in another thread; on a CPU there is none.

        Raises:
            MetadataError: the tensors do not fit together.
        """
        flat = self.flatten(*args, **kwargs)
        if kernels_serve(flat[0]):
            self._plan(flat).compile_ahead()

    def kernel(self, flat: Sequence[Any]) -> Callable[[], None]:
        """A launch of the Triton kernel on flat arguments, wherever they are."""
        return self._plan(flat).bind()

    def _plan(self, flat: Sequence[Any]) -> Planned:
        from . import metadata_launches

        tensors = [flat[0] if value is None else value for value in flat if not isinstance(value, int)]
        return metadata_launches.plan(self.check(flat), tensors)

    def check(self, flat: Sequence[Any]) -> Call:
        """What follows from the layouts of flat arguments; device data is never read.

        Raises:
            MetadataError: they do not fit together.
        """
        return self._checked(tuple(map(layout_of, flat)))

    def _check(self, layouts: tuple[Any, ...]) -> Call:
        call = self._signature.check(layouts)
        self._rule(call)
        return call

    def _on_cpu(self, *flat: Any) -> None:
        self.check(flat)
        reference: Callable[..., None] = self.reference
        reference(**self._signature.unflatten(flat))


def metadata_op(rule: Rule, *, writes: Collection[str] = ()) -> Callable[[Callable[P, None]], MetadataOp[P]]:
    """Make an op of its torch reference; see `MetadataOp`."""
    return lambda reference: MetadataOp(reference, rule, writes)
