"""What can be wrong with a benchmark's options: what happened, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from piecewise_graph.errors import PiecewiseError


class BenchError(PiecewiseError, ValueError):
    """Options that cannot be served, or that contradict each other."""

    @classmethod
    def no_draft(cls, steps: object) -> BenchError:
        return cls(
            f"--steps {steps} needs a draft head, and there is none.",
            "pass --draft DIR, or --random-draft eagle1; --steps 0 is plain decoding.",
        )

    @classmethod
    def no_folder(cls, option: str, file: Path) -> BenchError:
        return cls(
            f"{option} {file} cannot be written: its folder does not exist.", "make it, or name another file."
        )

    @classmethod
    def no_tokenizer(cls, file: str) -> BenchError:
        return cls(
            f"--prompts {file} cannot be encoded: a model with random weights has no tokenizer.",
            "pass --model DIR, or --prompts random.",
        )

    @classmethod
    def no_prompts(cls, file: Path, why: object) -> BenchError:
        return cls(
            f"--prompts {file} has no prompt: {why}.", "name a UTF-8 text file with one prompt per line."
        )

    @classmethod
    def nothing_steady(cls, tokens: int) -> BenchError:
        return cls(
            f"the trace holds no steady step: a request ended within {tokens} tokens.",
            "raise --output-len, so that all requests are in their rounds at the same time.",
        )

    @classmethod
    def unknown_setting(cls, name: str, known: Iterable[str]) -> BenchError:
        known = list(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(
            f"--compare cannot change {name!r}.",
            f"{hint}It changes one or more of: {', '.join(known)}. What belongs to the models or the caches "
            "takes a run of its own.",
        )

    @classmethod
    def bad_setting(cls, text: str, why: object) -> BenchError:
        return cls(f"--compare {text!r} cannot be read: {why}.", 'write it as "overlap=off,steps=0".')

    @classmethod
    def nothing_to_compare(cls, text: str) -> BenchError:
        return cls(f"--compare {text!r} changes nothing.", "name a value that differs from what was given.")
