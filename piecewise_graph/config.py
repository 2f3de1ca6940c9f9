"""`PiecewiseConfig`: every option of the backend, frozen, checked once."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from piecewise_graph.buckets import default_capture_sizes
from piecewise_graph.errors import ConfigError
from piecewise_graph.graph_pool import GraphPool

ENV_PREFIX = "PIECEWISE_GRAPH_"

_CHOICES = {
    "compiler": ("inductor", "aot_eager", "eager"),
    "cuda_graphs": ("auto", "off"),
    "capture": ("lazy", "explicit"),
    "outputs": ("copy", "static"),
    "check": ("off", "first", "always"),
}


@dataclass(frozen=True)
class PiecewiseConfig:
    """Options of the backend; `options={...}` of torch.compile takes the same names.

    Each field can also be set by an environment variable `PIECEWISE_GRAPH_<FIELD>`, for stacks that
    pass no options; an explicit option wins.

    Attributes:
        capture_sizes: token counts to capture, None = a default list up to `max_tokens`.
        max_tokens: above it a forward runs the compiled segments, counted as a fallback.
        compiler: what compiles a segment: "inductor", "aot_eager" or "eager".
        cuda_graphs: "auto" captures, "off" runs compiled segments only.
        capture: "lazy" captures a bucket at its first call, "explicit" only in `pg.capture`.
        outputs: "copy": the caller owns what it gets; "static": views that the next replay overwrites.
        check: addresses of weights are compared before a replay: "first" and "always" on every call
            through Dynamo, "off" never (a moved weight is then read at its old address).
        specialize: buckets whose segments are compiled for their exact size, kernels tuned by trying: faster
            decode steps for seconds of start-up per size. They have to be among the capture sizes.
        pool: a `GraphPool` to share between models, None = one of the model's own.
        max_graph_bytes: budget for the graphs of this model, in bytes of its pool; the largest buckets that
            do not fit are not captured (see pg.plan), and their calls run compiled. None = no limit.
        cache_dir: a folder for compiled segments, so that the next process starts warm; None = off. What
            lies there is code that will be run: nobody else may be able to write to it.
        merge_linears: run linears of one input (q/k/v, gate/up) as one. The model's weights are moved: each
            becomes a view of a merged one. Not for a model whose weights somebody else's CUDA graph reads.

    Raises:
        ConfigError: for a value that cannot work.
    """

    capture_sizes: Sequence[int] | None = None
    max_tokens: int = 512
    compiler: str = "inductor"
    cuda_graphs: str = "auto"
    capture: str = "lazy"
    outputs: str = "copy"
    check: str = "first"
    specialize: Sequence[int] = ()
    pool: GraphPool | None = None
    max_graph_bytes: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    merge_linears: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError.bad_value(name, value, "one of " + ", ".join(map(repr, choices)))
        if not isinstance(self.merge_linears, bool):
            raise ConfigError.bad_value("merge_linears", self.merge_linears, "True or False")
        if not _is_size(self.max_tokens):
            raise ConfigError.bad_value("max_tokens", self.max_tokens, "a whole number from 1 up")
        if self.max_graph_bytes is not None and not _is_size(self.max_graph_bytes):
            raise ConfigError.bad_value(
                "max_graph_bytes", self.max_graph_bytes, "a whole number of bytes from 1 up, or None"
            )
        if self.pool is not None and not isinstance(self.pool, GraphPool):
            raise ConfigError.bad_value("pool", self.pool, "a pg.GraphPool() or None")
        object.__setattr__(self, "capture_sizes", self._checked_sizes())
        object.__setattr__(self, "specialize", self._checked_specialize())
        object.__setattr__(self, "cache_dir", self._checked_cache_dir())

    def _checked_sizes(self) -> tuple[int, ...]:
        given = self.capture_sizes
        if given is None:
            return default_capture_sizes(self.max_tokens)
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigError.bad_value(
                "capture_sizes", given, "a list of token counts, such as [1, 2, 4, 8]"
            )
        if not all(_is_size(size) for size in given):
            raise ConfigError.bad_value("capture_sizes", given, "whole numbers from 1 up")
        if max(given) > self.max_tokens:
            raise ConfigError.bad_value(
                "capture_sizes", given, f"sizes up to max_tokens={self.max_tokens}, or raise max_tokens"
            )
        return tuple(sorted(set(given)))

    def _checked_specialize(self) -> tuple[int, ...]:
        given = self.specialize
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(map(self._is_bucket, given)):
            raise ConfigError.bad_value("specialize", given, f"sizes out of the capture sizes {self.sizes}")
        return tuple(sorted(set(given)))

    def _is_bucket(self, value: object) -> bool:
        return _is_size(value) and value in self.sizes

    @property
    def artifact_dir(self) -> str | None:
        """`cache_dir` as an absolute path."""
        assert self.cache_dir is None or isinstance(self.cache_dir, str)
        return self.cache_dir

    def _checked_cache_dir(self) -> str | None:
        """Absolute, so that a later chdir does not lose it."""
        given = self.cache_dir
        if given is None:
            return None
        if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
            raise ConfigError.bad_value("cache_dir", given, "the path of a folder, or None")
        return os.path.abspath(os.path.expanduser(os.fspath(given)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The capture sizes, ascending and without repeats."""
        assert isinstance(self.capture_sizes, tuple)
        return self.capture_sizes

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> PiecewiseConfig:
        """Build a config from `options`, then the environment, then the defaults."""
        options = dict(options or {})
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError.unknown_option(name, known)
        return cls(**(_from_environment(known) | options))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _from_environment(known: Sequence[str]) -> dict[str, Any]:
    found = {}
    for variable, text in os.environ.items():
        if variable.startswith(ENV_PREFIX):
            name = variable.removeprefix(ENV_PREFIX).lower()
            if name not in known:
                raise ConfigError.unknown_option(variable, [ENV_PREFIX + k.upper() for k in known])
            found[name] = _parse(text)
    return found


def _parse(text: str) -> Any:
    """A Python literal where it is one (512, [1, 2, 4], None), else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
