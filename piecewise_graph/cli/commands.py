"""The command line: `python -m piecewise_graph demo | explain | generate | bench | doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import torch

from piecewise_graph.cli import demo


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's) and run the command; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:  # its options are its own
        from piecewise_graph.bench import command

        return command.main(given[1:])
    parser = argparse.ArgumentParser(prog="python -m piecewise_graph", description="Piecewise CUDA graphs")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("demo", "complete text with a causal LM, compare with eager, time it and explain what was captured"),
        ("explain", "compile and capture a causal LM, print what became of it"),
    ):
        _model_options(commands.add_parser(name, help=text))
    _generate_options(
        commands.add_parser("generate", help="speculative decoding with a draft head, beside plain decoding")
    )
    commands.add_parser("bench", help="measure: `bench serving`, an engine under load")
    commands.add_parser("doctor", help="say what this environment can do")
    options = parser.parse_args(given)
    if options.command == "doctor":
        return doctor()
    if options.command == "generate":
        from piecewise_graph.eagle import generate_command

        return generate_command.run(options)
    return demo.run(demo.DemoOptions.from_namespace(options))


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=None, help="directory or hub id of a causal LM (default: the repository's)"
    )
    parser.add_argument("--prompt", default=None, help="text to complete")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=256, help="largest bucket")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument(
        "--dtype", default=None, help="float32, bfloat16, ... (default: float32 for small models)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="directory or hub id of a causal LM, the target")
    parser.add_argument("--draft", help="directory of an EAGLE head; left out: plain decoding")
    parser.add_argument("--steps", help="tokens that a round drafts, or 'auto' (default: 3)")
    parser.add_argument("--topk", type=int, default=1, help="branches per level; 1 = a chain")
    parser.add_argument("--num-draft-tokens", type=int, help="rows that the target verifies, root included")
    parser.add_argument("--prompt", default=demo.PROMPT, help="text to go on with")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", default="full", choices=("full", "piecewise", "compiled", "eager"))
    parser.add_argument(
        "--synthetic-accept-length",
        type=float,
        help="decree acceptance, for random weights: the text is void",
    )
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "aot_eager", "eager"))
    parser.add_argument("--dtype", help="float32, bfloat16, ... (default: float32 for small models)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def doctor() -> int:
    """Print what is installed and what would happen here; 0 when the backend can be used."""
    backends = entry_points(group="torch_dynamo_backends").names
    registered = "piecewise" in backends
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "none: stand-ins replace CUDA graphs"
    )
    rows = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA device": device,
        "backend 'piecewise'": "registered" if registered else "NOT registered: pip install piecewise-graph",
        **{
            name: "yes" if importlib.util.find_spec(name) else "no"
            for name in ("triton", "transformers", "depyf")
        },
    }
    print("\n".join(f"{name:20s} {value}" for name, value in rows.items()))
    return 0 if registered else 1
