"""`PiecewiseConfig`: every option of the backend, frozen, checked once."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from piecewise_graph.buckets import DEFAULT_BATCH_SIZES, default_capture_sizes
from piecewise_graph.errors import ConfigError
from piecewise_graph.graph_pool import GraphPool

ENV_PREFIX = "PIECEWISE_GRAPH_"

_CHOICES = {
    "compiler": ("inductor", "aot_eager", "eager"),
    "cuda_graphs": ("auto", "off"),
    "capture": ("lazy", "explicit"),
    "outputs": ("copy", "static"),
    "check": ("off", "first", "always"),
    "padding": ("proved", "tried"),
    "one_token": ("traced", "trusted"),
}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_sizes(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_is_size, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "merge_linears": lambda value: isinstance(value, bool),
    "max_tokens": _is_size,
    "max_graph_bytes": lambda value: value is None or _is_size(value),
    "pool": lambda value: value is None or isinstance(value, GraphPool),
    "capture_sizes": lambda value: value is None or (_are_sizes(value) and len(value) > 0),
    "batch_sizes": lambda value: value is None or _are_sizes(value),
    "specialize": _are_sizes,
    "rank_timeout": lambda value: isinstance(value, (int, float)) and value > 0,
    "cache_dir": lambda path: (
        path is None or (isinstance(path, (str, os.PathLike)) and bool(os.fspath(path)))
    ),
}


@dataclass(frozen=True)
class PiecewiseConfig:
    """Options of the backend; `options={...}` of torch.compile takes the same names.

    Each field but `pool` can also be set by an environment variable `PIECEWISE_GRAPH_<FIELD>`, as a Python
    literal, for stacks that pass no options; an explicit option wins.

    Attributes:
        capture_sizes: token counts to capture, None = a default list up to `max_tokens`.
        batch_sizes: of calls of [batch, tokens] where both vary, the batches to capture; one between two is
            padded where that is proved harmless. None = 1, 2, 4 and so on up to 32, each from its second call
            on; () = none: a combination of sizes that returns has graphs of its own.
        max_tokens: above it a forward runs the compiled segments, counted as a fallback.
        compiler: what compiles a segment: "inductor", "aot_eager" or "eager".
        cuda_graphs: "auto" captures, "off" runs compiled segments only.
        capture: "lazy" captures a bucket at its first call, "explicit" only in `pg.capture`.
        outputs: "copy": the caller owns what it gets; "static": views that the next replay overwrites.
        check: addresses of weights are compared before a replay: "first" and "always" on every call
            through Dynamo, "off" never (a moved weight is then read at its old address), but for what a trace
            writes.
        padding: "proved": what cannot be proved to bear padding is cut out and runs on live rows; "tried": it
            is padded where trials find no difference. Trials can be fooled.
        one_token: of pg.compile: "traced": the first call of one token is traced by itself, and served by the
            trace of several only where the two are alike; "trusted": it is served, as for every model of
            transformers, which spares a trace. So is another size that is 1, a batch for instance.
        specialize: buckets whose segments are compiled for their exact size, kernels tuned by trying: faster
            decode steps for seconds of start-up per size and structure. They have to be among the capture
            sizes. Left out where the compiler is not Inductor, and on several ranks.
        pool: a `GraphPool` to share between models, None = one of the model's own.
        max_graph_bytes: budget for the graphs of this model, in bytes of its pool; the largest buckets that
            do not fit are not captured (see pg.plan), and their calls run compiled. None = no limit.
        cache_dir: a folder for compiled segments, so that the next process starts warm; None = off. What
            lies there is code that will be run: no other user may be able to write to it.
        merge_linears: run linears of one input (q/k/v, gate/up) as one. The model's weights are moved: each
            becomes a view of a merged one. Not for a model with weights that other code's CUDA graph reads.
        rank_timeout: seconds that a rank of a tensor-parallel model waits for the others, where they compile
            and capture together.

    Raises:
        ConfigError: for a value that cannot work.
    """

    capture_sizes: Sequence[int] | None = None
    batch_sizes: Sequence[int] | None = None
    max_tokens: int = 512
    compiler: str = "inductor"
    cuda_graphs: str = "auto"
    capture: str = "lazy"
    outputs: str = "copy"
    check: str = "first"
    padding: str = "proved"
    one_token: str = "traced"
    specialize: Sequence[int] = ()
    pool: GraphPool | None = None
    max_graph_bytes: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    merge_linears: bool = False
    rank_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError.bad_value(name, getattr(self, name), choices)
        for name, fits in _CHECKS.items():
            if not fits(getattr(self, name)):
                raise ConfigError.bad_value(name, getattr(self, name))
        sizes = self.capture_sizes or default_capture_sizes(self.max_tokens)
        if max(sizes) > self.max_tokens:
            raise ConfigError.above_max_tokens(sizes, self.max_tokens)
        if not set(self.specialize) <= set(sizes):
            raise ConfigError.no_capture_sizes(self.specialize, sizes)
        object.__setattr__(self, "capture_sizes", tuple(sorted(set(sizes))))
        if self.batch_sizes is not None:
            object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))
        object.__setattr__(self, "specialize", tuple(sorted(set(self.specialize))))
        if self.cache_dir is not None:  # absolute, so that a later chdir does not lose it
            object.__setattr__(self, "cache_dir", os.path.abspath(os.path.expanduser(self.cache_dir)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The capture sizes, ascending and without repeats."""
        assert isinstance(self.capture_sizes, tuple)
        return self.capture_sizes

    @property
    def batches(self) -> Sequence[int]:
        """The batch sizes, ascending and without repeats."""
        return DEFAULT_BATCH_SIZES if self.batch_sizes is None else self.batch_sizes

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> PiecewiseConfig:
        """Build a config from `options`, then the environment, then the defaults."""
        options = dict(options or {})
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError.unknown_option(name, known)
        return cls(**(_from_environment(known) | options))

    @staticmethod
    def environment(prefix: str) -> dict[str, str]:
        """The environment's variables whose names begin so, those of other libraries (`NCCL_`) too."""
        return {name: text for name, text in os.environ.items() if name.startswith(prefix)}


def _from_environment(known: Sequence[str]) -> dict[str, Any]:
    found = {}
    for variable, text in PiecewiseConfig.environment(ENV_PREFIX).items():
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
