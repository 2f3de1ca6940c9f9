"""Random modules: a seed becomes a program, and a program prints as the Python source that is run."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import torch
from torch import nn

from fuzz.attention_blocks import CUT, UNCUT
from fuzz.blocks import Block, fill
from fuzz.integer_blocks import INTEGERS
from fuzz.row_blocks import FEATURES, STATE, VIEWS
from fuzz.token_blocks import SIZES, TOKENS

# How often a block comes from each catalogue. Half of all programs are cut at least once.
CATALOGUES: tuple[tuple[int, Mapping[str, str]], ...] = (
    (30, CUT),
    (10, UNCUT),
    (26, TOKENS),
    (14, FEATURES),
    (4, STATE),
    (8, VIEWS),
    (8, SIZES),
    (12, INTEGERS),
)
BLOCKS = {name: text for _, entries in CATALOGUES for name, text in entries.items()}
ENTRIES = ("rows", "one_batch", "two_batches", "ids")
ENDINGS = (
    "h",
    "h",
    "h * 2",
    "(h, {keeps})",
    "{{'h': h, 'kept': [{keeps}]}}",
    "[h, {{'more': ({keeps},), 'x': x}}]",
    "(h, h)",
    "(x, h)",
    "(h, h[..., :4], x[..., :1])",
    "(h, h.view(h.shape))",
    "(h.transpose(-1, -2), h)",
    "{{'last': h[..., -1, :], 'h': h, 'none': None}}",
    "(h[..., :1, :], h)",
    "(h, T)",
    "(h.mean(-2), h)",
    "x",
)
_HEADER = """import math
import torch
import torch.nn.functional as F
from torch import nn
from toys import ops
from fuzz.blocks import heads, join, like_rows, rows_at, rows_of
"""


@dataclass(frozen=True)
class Program:
    """A module as data. Blocks may be left out; what remains is a program too.

    Attributes:
        entry: what `x` is: "rows" `[T, 8]`, "one_batch" `[1, T, 8]`, "two_batches" `[2, T, 8]`, "ids" `[T]`.
        ending: the expression that is returned; `{keeps}` stands for the values that blocks kept.
    """

    entry: str
    blocks: tuple[Block, ...]
    ending: str

    @property
    def batch(self) -> tuple[int, ...]:
        return {"one_batch": (1,), "two_batches": (2,)}.get(self.entry, ())

    @property
    def token_dim(self) -> dict[str, int]:
        """What pg.compile is told: where the first input counts tokens; the others follow by size."""
        return {"x": len(self.batch)}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of forward's arguments."""
        used = {name for block in self.blocks for name in block.names("y|ids|flags")}
        return ("x", *sorted(used))

    @cached_property
    def casts(self) -> bool:
        """Floats become integers somewhere."""
        return any(block.names(r"long|int8") for block in self.blocks)

    @cached_property
    def source(self) -> str:
        """The module as Python."""
        setup, body = [], []
        for block in self.blocks:
            if block.setup:
                setup += [f"torch.manual_seed({block.seed})", *block.setup]
            body += [f"# {block.name}", *block.body]
        kept = [name for block in self.blocks for name in block.names(r"keep\d+")]
        ending = self.ending.format(keeps=", ".join(kept) or "h.sum(-1)")
        if self.entry == "ids":
            setup = ["torch.manual_seed(1)", "self.words = nn.Embedding(12, 8)", *setup]
            body = ["T = x.shape[0]", "h = self.words(x)", *self._ties(), *body]
        else:
            body = ["T = x.shape[-2]", "h = x", *self._ties(), *body]
        return "\n".join(
            [
                _HEADER,
                "class Program(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in setup),
                "",
                f"    def forward(self, {', '.join(self.inputs)}):",
                *(f"        {line}" for line in body),
                f"        return {ending}",
                "",
            ]
        )

    def _ties(self) -> list[str]:
        """Without them a second input that meets `x` nowhere would count as a second dynamic dimension."""
        dims = {name: -2 if name == "y" else -1 for name in self.inputs[1:]}
        return [f"torch._check({name}.shape[{dim}] == T)" for name, dim in dims.items()]

    def build(self) -> nn.Module:
        """The module, in eval mode, with the same weights at every call; two calls make two classes."""
        name = f"<program {abs(hash(self.source)):x}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)  # tracebacks
        namespace = {"__name__": "program"}
        with torch.random.fork_rng(devices=[]):
            exec(compile(self.source, name, "exec"), namespace)
            module: nn.Module = namespace["Program"]().eval()  # type: ignore[operator]
        return module

    def without(self, index: int) -> Program:
        """The program less one block."""
        return replace(self, blocks=self.blocks[:index] + self.blocks[index + 1 :])


def random_program(random: Random) -> Program:
    """A program of 1 to 5 blocks."""
    weights = [weight for weight, _ in CATALOGUES]
    chosen = random.choices(
        [entries for _, entries in CATALOGUES], weights, k=random.choice((1, 2, 2, 3, 3, 4, 5))
    )
    blocks = []
    for number, entries in enumerate(chosen):
        name = random.choice(list(entries))
        blocks.append(fill(name, entries[name], number, random))
    entry = random.choices(ENTRIES, (5, 3, 1, 2))[0]
    ending = random.choice(ENDINGS)
    if entry == "ids":  # no rows of features there
        ending = ending.replace("x[..., :1]", "x[:2]")
    return Program(entry, tuple(blocks), ending)
