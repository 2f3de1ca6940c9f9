"""The command line: `python -m piecewise_graph demo | explain | generate | serve | bench | doctor`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from piecewise_graph.errors import PiecewiseError

from . import arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's) and run the command.

    Returns:
        the exit status; 2 where the options cannot be served.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(given)
    options.given = given
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
    made.add_argument("--html", type=Path, help="file for a page that a browser shows")
    made.set_defaults(run="demo.explain")
    made = add("generate", help="speculative decoding with a draft head, beside plain decoding")
    arguments.generate_options(made)
    made.set_defaults(run="generate_command.run")
    made = add("serve", help="transformers' server, its continuous batching on graphs")
    arguments.serve_options(made)
    made.set_defaults(run="serve_command.run")
    kinds = add("bench", help="measure an engine under load").add_subparsers(dest="benchmark", required=True)
    made = kinds.add_parser("serving", formatter_class=arguments.Help, help="throughput and latency")
    arguments.serving_options(made)
    made.set_defaults(run="serving_command.run")
    add("doctor", help="run what this environment can do").set_defaults(run="doctor_command.run")
    return parser
