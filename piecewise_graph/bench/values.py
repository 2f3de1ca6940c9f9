"""Values of options, from text; what is wrong with one says what to pass."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence


def whole(least: int) -> Callable[[str], int]:
    """Reads whole numbers from `least` up."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} cannot be; pass a whole number from {least} up")
        return int(text)

    return parse


def wholes(least: int, *, fewest: int = 0) -> Callable[[str], tuple[int, ...]]:
    """Reads lists such as "1,4,16", of `fewest` numbers and more."""

    def parse(text: str) -> tuple[int, ...]:
        found = tuple(whole(least)(part.strip()) for part in text.split(",") if part.strip())
        if len(found) < fewest:
            raise ArgumentTypeError(f"{text!r} names none; pass numbers, such as 1,4,16")
        return found

    return parse


def number(least: float, most: float = float("inf")) -> Callable[[str], float]:
    """Reads numbers from `least` to `most`, "inf" where that is the most."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            above = " up" if most == float("inf") else f" to {most:g}"
            raise ArgumentTypeError(f"{text!r} cannot be; pass a number from {least:g}{above}")
        return value

    return parse


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Reads one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r} is none of them; pass one of {', '.join(names)}")
        return text

    return parse


def on_or_off(text: str) -> bool:
    return one_of(("on", "off"))(text) == "on"
