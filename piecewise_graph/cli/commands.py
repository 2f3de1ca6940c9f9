"""The command line: `python -m piecewise_graph demo | explain | generate | bench | doctor`."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points

import torch

from piecewise_graph.errors import PiecewiseError

from . import arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's) and run the command.

    Returns:
        the exit status; 2 where the options cannot be served.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(given)
    options.command_line = " ".join(["python -m piecewise_graph", *given])
    try:
        module, function = options.run.split(".")  # imported now: most commands load transformers
        status: int = getattr(importlib.import_module(f".{module}", __package__), function)(options)
    except PiecewiseError as error:
        print(error, file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m piecewise_graph", description="Piecewise CUDA graphs")
    commands = parser.add_subparsers(dest="command", required=True)
    add = partial(commands.add_parser, formatter_class=arguments.Help)
    made = add("demo", help="complete text with a causal LM, compare with eager, time and explain it")
    arguments.demo_options(made)
    made.set_defaults(run="demo.run")
    made = add("explain", help="compile and capture a causal LM, and say what was captured")
    arguments.explain_options(made)
    made.set_defaults(run="demo.explain")
    made = add("generate", help="speculative decoding with a draft head, beside plain decoding")
    arguments.generate_options(made)
    made.set_defaults(run="generate_command.run")
    kinds = add("bench", help="measure an engine under load").add_subparsers(dest="benchmark", required=True)
    made = kinds.add_parser(
        "serving", formatter_class=arguments.Help, help="throughput and latency, in this process"
    )
    arguments.serving_options(made)
    made.set_defaults(run="serving_command.run")
    add("doctor", help="say what this environment can do").set_defaults(run="commands.doctor")
    return parser


def doctor(_: object = None) -> int:
    """Print what is installed and what would happen here; 0 when the backend can be used."""
    registered = "piecewise" in entry_points(group="torch_dynamo_backends").names
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
