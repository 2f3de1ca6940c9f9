"""The command line: `python -m piecewise_graph demo | explain | generate | serve | bench | doctor`."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from piecewise_graph.errors import PiecewiseError

from . import arguments
from .errors import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the process's) and run the command.

    Returns:
        the exit status; 2 where the options cannot be served. As shells say it: 130 where Ctrl-C ended the
        command, 141 where nobody reads what it prints any more.
    """
    try:
        return _status(argv)
    except BrokenPipeError:
        gone = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not gone:
            raise  # of another pipe
        for stream in gone:  # what is left in it is written at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


def _status(argv: Sequence[str] | None) -> int:
    """Run the command, and print all that it has to say."""
    try:
        return _run(argv)
    except PiecewiseError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print(CommandError.no_transformers(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        print(end="", flush=True)


def _has_no_reader(stream: TextIO | None) -> bool:
    """Whether it is a pipe whose other end is closed."""
    if stream is None:  # closed from the start
        return False
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # it is no file, or closed
        return False
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(given)
    options.given = given
    options.command_line = " ".join(["python -m piecewise_graph", *given])
    module, function = options.run.split(".")  # imported now: most commands load transformers
    status: int = getattr(importlib.import_module(f".{module}", __package__), function)(options)
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
