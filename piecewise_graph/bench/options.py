"""The options of `bench serving`, in groups: models, engine, load, output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from piecewise_graph.eagle.head.random_models import MODEL_SHAPES

from .settings import add_setting_options
from .values import number, whole, wholes

_COMPILERS = ("inductor", "aot_eager", "eager")
_DTYPES = ("float32", "bfloat16", "float16")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """`bench` has one benchmark so far; its name is the first argument."""
    parser = argparse.ArgumentParser(prog="python -m piecewise_graph bench")
    kinds = parser.add_subparsers(dest="benchmark", required=True)
    serving = kinds.add_parser("serving", help="throughput and latency of an engine under load, in process")
    _model_options(serving.add_argument_group("models"))
    add_setting_options(serving.add_argument_group("engine"))
    _load_options(serving.add_argument_group("load"))
    _output_options(serving.add_argument_group("output"))
    return parser.parse_args(arguments)


def _model_options(group: argparse._ArgumentGroup) -> None:
    target = group.add_mutually_exclusive_group(required=True)
    target.add_argument("--model", help="directory or hub id of a causal LM, the target")
    target.add_argument("--random-weights", choices=tuple(MODEL_SHAPES), help="a Llama of this shape instead")
    draft = group.add_mutually_exclusive_group()
    draft.add_argument("--draft", help="directory of an EAGLE head")
    draft.add_argument("--random-draft", choices=("eagle1", "eagle3"), help="a head with random weights")
    group.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="default: the model's, float32 if it is small; bfloat16 for random weights",
    )
    group.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    group.add_argument("--compiler", default="inductor", choices=_COMPILERS)
    group.add_argument("--merge-linears", action="store_true", help="run q/k/v and gate/up as one linear")
    group.add_argument("--specialize", type=wholes(1), default=(), help="row counts with code of their own")
    group.add_argument("--prefill", choices=("piecewise", "compiled", "eager"), help="how prompts run")
    group.add_argument("--prefill-rows", type=whole(1), default=512, help="prompt tokens of one step at most")
    group.add_argument("--page-size", type=whole(1), default=1, help="tokens of a page; trees need 1")
    group.add_argument("--num-pages", type=whole(1), help="of the caches (default: enough for everybody)")
    group.add_argument("--batch-sizes", type=wholes(1), help="of rounds (default: powers of 2)")


def _load_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--input-len", type=whole(1), default=256, help="prompt tokens of a request at most")
    group.add_argument("--output-len", type=whole(1), default=128, help="new tokens of a request at most")
    group.add_argument(
        "--range-ratio", type=number(0, 1), default=1.0, help="lengths are drawn from [ratio * len, len]"
    )
    group.add_argument("--num-prompts", type=whole(1), help="requests (default: 5 times the concurrency)")
    group.add_argument(
        "--concurrency",
        type=wholes(1, fewest=1),
        default=(1, 4, 16, 32),
        help="requests at a time, a list",
    )
    group.add_argument(
        "--request-rate",
        type=number(1e-9),
        default=float("inf"),
        help="arrivals per second, or inf",
    )
    group.add_argument("--prompts", default="random", help="'random', or a file with one per line")
    group.add_argument("--seed", type=whole(0), default=0)
    group.add_argument(
        "--warm-up", type=whole(0), help="requests served before any is timed (default: the concurrency)"
    )


def _output_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--compare", help='what a second side changes, such as "overlap=off"')
    group.add_argument("--turns", type=whole(1), help="of each side (default: 5 with --compare, else 1)")
    group.add_argument("--json", type=Path, help="file for all numbers")
    group.add_argument("--plot", type=Path, help="picture: throughput over throughput per user")
    group.add_argument("--trace", type=Path, help="Chrome trace of some steady steps")
