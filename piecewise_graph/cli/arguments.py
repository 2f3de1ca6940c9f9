"""The options of all commands, in groups: models, engine, load, output."""

from __future__ import annotations

import argparse
from argparse import _ActionsContainer as Group
from pathlib import Path

import torch

from piecewise_graph.bench.setting import add_setting_options, number, whole, wholes
from piecewise_graph.eagle.head.random_models import MODEL_SHAPES

PROMPT = "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self, "
_HELD_BY_PHASE = ("draft_decode", "verify", "extend", "overlap")  # settings of `bench serving` alone

_PAGE_SIZES = tuple(2**power for power in range(2, 11))  # what both transformers and our attention take


class Help(argparse.HelpFormatter):
    """Help that ends with the default of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        told = default is None or default is False or default in ("", argparse.SUPPRESS) or "default" in text
        return text if told else f"{text} (default: %(default)s)"


def _text(given: str) -> str:
    if not given:
        raise argparse.ArgumentTypeError("an empty prompt has no tokens to go on from; pass some text")
    try:
        given.encode()  # Python keeps bytes of a command line that are no text
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("the prompt is not valid UTF-8; pass text") from None
    return given


def _port(given: str) -> int:
    if not given.isdecimal() or int(given) > 65535:
        raise argparse.ArgumentTypeError(
            f"{given!r} cannot be; pass a port from 1 to 65535, or 0 for a free one"
        )
    return int(given)


def demo_options(parser: Group) -> None:
    """Of `demo`."""
    explain_options(parser)
    parser.add_argument("--prompt", type=_text, default=PROMPT, help="to complete (default: some Python)")
    parser.add_argument("--new-tokens", type=whole(1), default=48, help="tokens to complete it with")


def explain_options(parser: Group) -> None:
    """Of `explain`."""
    parser.add_argument("--model", help="directory or hub id of a causal LM (default: the repository's)")
    parser.add_argument("--max-tokens", type=whole(1), default=256, help="largest bucket")
    _compile_options(parser)


def generate_options(parser: Group) -> None:
    """Of `generate`."""
    parser.add_argument("--model", required=True, help="directory or hub id of a causal LM, the target")
    parser.add_argument("--draft", help="directory of an EAGLE head; left out: plain decoding")
    add_setting_options(parser, leave_out=_HELD_BY_PHASE)
    parser.add_argument("--prompt", type=_text, default=PROMPT, help="to complete (default: some Python)")
    parser.add_argument("--max-new-tokens", type=whole(1), default=128, help="tokens to generate")
    parser.add_argument("--seed", type=whole(0), default=0, help="of sampling")
    _compile_options(parser)


def serve_options(parser: Group) -> None:
    """Of `serve`."""
    parser.add_argument("model", metavar="MODEL", help="directory or hub id of a causal LM")
    parser.add_argument("--host", default="localhost", help="to listen on")
    parser.add_argument("--port", type=_port, default=8000, help="to listen on")
    parser.add_argument(
        "--max-batch-tokens", type=whole(1), default=512, help="largest number of tokens in a step"
    )
    parser.add_argument("--page-size", type=int, choices=_PAGE_SIZES, default=16, help="tokens of a page")
    parser.add_argument(
        "--num-blocks", type=whole(1), help="pages of the cache (default: what transformers finds room for)"
    )
    _compile_options(parser)


def serving_options(parser: argparse.ArgumentParser) -> None:
    """Of `bench serving`."""
    _served_models(parser.add_argument_group("models"))
    add_setting_options(parser.add_argument_group("engine"))
    _load_options(parser.add_argument_group("load"))
    group = parser.add_argument_group("output")
    group.add_argument("--compare", help='what a second side changes, such as "overlap=off"')
    group.add_argument("--turns", type=whole(1), help="of each side (default: 5 with --compare, else 1)")
    group.add_argument("--json", type=Path, help="file for all numbers")
    group.add_argument("--plot", type=Path, help="picture: throughput over throughput per user")
    group.add_argument("--trace", type=Path, help="Chrome trace of some steady steps")


def _compile_options(group: Group) -> None:
    group.add_argument(
        "--compiler", default="inductor", choices=("inductor", "aot_eager", "eager"), help="of the segments"
    )
    group.add_argument(
        "--dtype",
        help="such as float32 (default: the model's, float32 if it is small; bfloat16 for random weights)",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    group.add_argument("--device", default=device, help="that the models run on")


def _served_models(group: argparse._ArgumentGroup) -> None:
    target = group.add_mutually_exclusive_group(required=True)
    target.add_argument("--model", help="directory or hub id of a causal LM, the target")
    target.add_argument("--random-weights", choices=tuple(MODEL_SHAPES), help="a Llama of this shape instead")
    draft = group.add_mutually_exclusive_group()
    draft.add_argument("--draft", help="directory of an EAGLE head")
    draft.add_argument("--random-draft", choices=("eagle1", "eagle3"), help="a head with random weights")
    _compile_options(group)
    group.add_argument("--tp", type=whole(1), default=1, help="GPUs that share the target (tensor parallel)")
    group.add_argument("--merge-linears", action="store_true", help="run q/k/v and gate/up as one linear")
    group.add_argument("--specialize", type=wholes(1), default="", help="row counts with code of their own")
    group.add_argument("--prefill", choices=("piecewise", "compiled", "eager"), help="graph mode of prefill")
    group.add_argument(
        "--prefill-rows", type=whole(1), default=512, help="largest number of prompt tokens in a step"
    )
    group.add_argument("--page-size", type=whole(1), default=1, help="tokens of a page; trees need 1")
    group.add_argument(
        "--num-pages", type=whole(1), help="of the caches (default: enough for all requests at full length)"
    )
    group.add_argument("--batch-sizes", type=wholes(1), help="of rounds (default: powers of 2)")


def _load_options(group: Group) -> None:
    group.add_argument("--input-len", type=whole(1), default=256, help="largest number of prompt tokens")
    group.add_argument("--output-len", type=whole(1), default=128, help="largest number of new tokens")
    group.add_argument(
        "--range-ratio", type=number(0, 1), default=1.0, help="lengths are drawn from [ratio * len, len]"
    )
    group.add_argument("--num-prompts", type=whole(1), help="requests (default: 5 times the concurrency)")
    group.add_argument(
        "--concurrency", type=wholes(1, fewest=1), default="1,4,16,32", help="requests at a time, a list"
    )
    group.add_argument(
        "--request-rate", type=number(1e-9), default=float("inf"), help="arrivals per second, or inf"
    )
    group.add_argument("--prompts", default="random", help="'random', or a file with one per line")
    group.add_argument("--seed", type=whole(0), default=0, help="of the load, of sampling, of random weights")
    group.add_argument(
        "--warm-up", type=whole(0), help="requests served before any is timed (default: the concurrency)"
    )
