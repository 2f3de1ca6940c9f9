"""What random programs are made of: blocks, each a few lines of Python from rows `h` to rows `h`.

`h` is `[T, 8]` or `[batch, T, 8]`. So every block counts from the right: tokens are dimension -2, features
-1. A block can be left out of a program or put after any other.

A catalogue maps a block's name to its text. In a text:

    @line           belongs to __init__; all other lines to forward
    #               the block's number, so that names are unique
    <<a||b||c>>     one of a, b, c
    keep#           a value that the program may return

`x`, `y`, `ids` and `flags` are inputs; a program takes those that its blocks mention.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

WIDTH = 8
WORDS = 12  # ids are in [0, WORDS)


@dataclass(frozen=True)
class Block:
    """A block with its number and its choices filled in.

    Attributes:
        seed: what the generator of random numbers is set to before `setup`, so that a block's weights stay
            what they are when other blocks are left out.
    """

    name: str
    seed: int
    setup: tuple[str, ...]
    body: tuple[str, ...]

    def names(self, pattern: str) -> list[str]:
        """The distinct words of the block that match `pattern`, in order."""
        return list(dict.fromkeys(re.findall(rf"\b{pattern}\b", "\n".join((*self.setup, *self.body)))))


def fill(name: str, text: str, number: int, random: Random) -> Block:
    """A block of the catalogue as the `number`-th of a program."""
    chosen = re.sub(r"<<(.*?)>>", lambda found: random.choice(found[1].split("||")), text)
    lines = [line for line in chosen.replace("#", str(number)).strip().splitlines() if line.strip()]
    lines = [line.strip("\n") for line in lines]
    setup = tuple(line.lstrip("@ ") for line in lines if line.lstrip().startswith("@"))
    body = tuple(line for line in lines if not line.lstrip().startswith("@"))
    return Block(name, random.randrange(2**31), setup, body)


def catalogue(entries: Mapping[str, str]) -> dict[str, str]:
    """Names to texts, the indentation of a text removed."""
    return {name: "\n".join(_outdented(text)) for name, text in entries.items()}


def _outdented(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return [line[margin:] for line in lines]


# --- what the text of blocks may call ---


def heads(z: Tensor, parts: int) -> Tensor:
    """`[..., T, parts * 8]` -> `[parts, ..., 2, T, 4]`, to be unpacked."""
    return z.unflatten(-1, (parts, 2, WIDTH // 2)).movedim(-3, 0).transpose(-3, -2)


def join(z: Tensor) -> Tensor:
    """`[..., 2, T, 4]` -> `[..., T, 8]`."""
    return z.transpose(-3, -2).flatten(-2)


def rows_of(z: Tensor) -> list[Tensor]:
    """The batches of `z`, each `[T, ...]`, as views: what toy ops take."""
    return [z] if z.ndim == 2 else list(z.unbind(0))


def like_rows(found: list[Tensor], z: Tensor) -> Tensor:
    """Results for `rows_of(z)` in the layout of `z`."""
    return found[0] if z.ndim == 2 else torch.stack(found)


def rows_at(z: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of `z`: `[..., T, 8]` at `[..., n]` -> `[..., n, 8]`. (take_along_dim fixes its sizes.)"""
    return z.gather(-2, index[..., None].expand(*index.shape, z.shape[-1]))
