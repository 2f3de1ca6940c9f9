"""What can be wrong with a setting, a load or a trace: what happened, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from piecewise_graph.errors import PiecewiseError

_EXAMPLE = 'write it as "overlap=off,steps=0".'


class BenchError(PiecewiseError, ValueError):
    """A setting, a load or a trace that cannot be served."""

    @classmethod
    def no_draft(cls, option: str) -> BenchError:
        return cls(
            f"{option} needs a draft model and there is none.",
            "pass --draft DIR, or --random-draft eagle1 to `bench serving`; --steps 0 is plain decoding.",
        )

    @classmethod
    def bad_steps(cls, steps: str) -> BenchError:
        return cls(f"--steps {steps} cannot be read.", "pass a whole number from 0 up, or auto.")

    @classmethod
    def unreadable_prompts(cls, file: Path, error: Exception) -> BenchError:
        return cls(
            f"--prompts {file} cannot be read: {error}.", "name a UTF-8 file with one prompt per line."
        )

    @classmethod
    def blank_prompts(cls, file: Path) -> BenchError:
        return cls(
            f"--prompts {file} has no prompt: every line is blank.", "write one prompt per line into it."
        )

    @classmethod
    def unwritable(cls, option: str, file: Path, error: OSError) -> BenchError:
        return cls(
            f"{option} {file} cannot be written: {error.strerror or error}.",
            "name a file that this user may write.",
        )

    @classmethod
    def no_picture(cls, file: Path, kinds: Iterable[str]) -> BenchError:
        return cls(
            f"--plot {file} cannot be drawn: matplotlib has no pictures of that kind.",
            f"name a file that ends with one of: {', '.join(sorted(kinds))}.",
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
            f"{hint}It changes one or more of: {', '.join(known)}. An option of the models or the caches "
            "takes a run of its own.",
        )

    @classmethod
    def no_value(cls, changes: str, part: str) -> BenchError:
        return cls(f"--compare {changes!r} cannot be read: {part!r} has no '='.", _EXAMPLE)

    @classmethod
    def bad_value(cls, changes: str, name: str, error: Exception) -> BenchError:
        return cls(f"--compare {changes!r} cannot be read: {name}: {error}.", _EXAMPLE)

    @classmethod
    def nothing_to_compare(cls, changes: str) -> BenchError:
        return cls(
            f"--compare {changes!r} changes nothing.", "name a value that differs from what was given."
        )
