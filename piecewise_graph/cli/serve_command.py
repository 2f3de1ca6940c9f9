"""`python -m piecewise_graph serve`: transformers' server, its continuous batching on our graphs.

Note [How the server gets our model]
transformers' `Serve` makes a `ModelManager`, which checks the name of the attention against a list of its
own and loads the model. `Serve` looks `ModelManager` up in its module when it is called, so for that call a
subclass stands in its place. No function of transformers is replaced. What the subclass relies on is looked
for first.

Note [How the server ends]
`Serve(non_blocking=True)` builds the server and calls `start_server`, which would run it in a thread; ours
does not. `run` runs it in the main thread, where it handles signals. After the first signal it answers the
requests under way. Then it raises the signal again, and SIGTERM would end the process before anything is
printed.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import transformers

import piecewise_graph as pg
from piecewise_graph.custom_ops.errors import AttentionError, CacheError
from piecewise_graph.errors import NotCompiledError, PiecewiseError

from .errors import CommandError
from .loading import check_model, in_dtype, named_device, named_dtype

_PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
_SERVER = "transformers.cli.serve"
_MANAGER = "transformers.cli.serving.model_manager"


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it, then print what became of the steps.

    Returns:
        0.

    Raises:
        CommandError: an option, the model, a package or this version of transformers cannot be used.
        AttentionError: `pg.continuous_batching` refuses the model.
    """
    _check(options)
    base = _manager_class()
    pg.register_attention()
    served: dict[Any, Any] = {}
    server = _build(options, _with_graphs(base, options, served), served)
    _answer_refusals(server)
    try:
        with _sigterm_as_sigint():
            server.server.run()
    except KeyboardInterrupt:  # after a shutdown in order, see Note [How the server ends]
        pass
    finally:
        server.kill_server()  # ends the thread of continuous batching, which would keep the process alive
    _report(next(iter(served.values())))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise before a model is loaded."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise CommandError.no_server(missing)
    if options.dtype is not None:
        named_dtype(options.dtype)
    named_device(options.device)
    path, _, revision = options.model.partition("@")
    check_model(path if revision and not Path(options.model).exists() else options.model)


def _manager_class() -> Any:
    """transformers' `ModelManager`, after a look at all that the rest of this file relies on."""
    for name in ("start_server", "kill_server"):
        _hook(_SERVER, "Serve", name)
    for name in ("_validate_args", "_load_model"):
        _hook(_MANAGER, "ModelManager", name)
    return _hook(_MANAGER, "ModelManager")


def _hook(module: str, *names: str) -> Any:
    """An attribute of a module of transformers.

    Raises:
        CommandError: this version has no such module or attribute.
    """
    try:
        found: Any = import_module(module)
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise _missing(".".join((module, *names))) from error
    return found


_missing = partial(CommandError.no_hook, version=transformers.__version__)
_unused = partial(CommandError.unused_hook, f"{_MANAGER}.ModelManager", version=transformers.__version__)


def _with_graphs(base: Any, options: argparse.Namespace, served: dict[Any, Any]) -> Any:
    """A `ModelManager` that puts the models that it loads on graphs, and into `served`."""

    class GraphModelManager(base):
        attn_implementation: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().__init__(*args, **kwargs)
            except PiecewiseError:
                raise
            except Exception as error:  # of transformers, safetensors, tokenizers or the hub
                raise CommandError.no_model(options.model, error) from error

        def _validate_args(self) -> None:
            # The list of names is transformers' own; what else it checks is checked.
            name, self.attn_implementation = self.attn_implementation, None
            super()._validate_args()
            self.attn_implementation = name

        def _load_model(self, name: str, *args: Any, **kwargs: Any) -> Any:
            # The thread of continuous batching keeps its model when the server is told to drop all: a second
            # one would only take memory.
            key = (name, kwargs.get("gguf_file"))
            if key not in served:
                model = in_dtype(super()._load_model(name, *args, **kwargs), options.dtype)
                served[key] = pg.continuous_batching(
                    model, max_tokens=options.max_batch_tokens, compiler=options.compiler
                )
            return served[key]

    return GraphModelManager


def _build(options: argparse.Namespace, manager: Any, served: dict[Any, Any]) -> Any:
    """transformers' server with that manager, built and not started."""
    base = _hook(_SERVER, "Serve")
    asked = _asked(options)
    for name in asked.keys() - signature(base).parameters.keys():
        raise _missing(f"{_SERVER}.Serve({name}=)")

    class Server(base):  # type: ignore[misc, valid-type]
        def start_server(self) -> None:
            self._thread = None  # `kill_server` looks whether there is one

    with _standing_in(manager):
        try:
            server = Server(**asked)
        except ValueError as error:  # of the ModelManager that does not know our attention
            if served or isinstance(error, PiecewiseError):
                raise
            raise _unused() from error
    if not served:
        raise _unused()
    if not hasattr(server, "server"):
        raise _missing(f"{_SERVER}.Serve.server")
    return server


def _answer_refusals(server: Any) -> None:
    """Have a client told what this library refuses in its request: more tokens than the cache holds.

    A server that is built in another way answers the status 500, as it does to any error.
    """
    app: Any = getattr(getattr(server.server, "config", None), "app", None)
    if hasattr(app, "add_exception_handler"):
        for kind in (AttentionError, CacheError):
            app.add_exception_handler(kind, _refused)


async def _refused(_: Any, error: Exception) -> Any:
    from fastapi.responses import JSONResponse  # `_check` has looked for the package

    return JSONResponse({"error": str(error)}, status_code=400)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "force_model": options.model,
        "continuous_batching": True,
        "attn_implementation": "piecewise",
        "device": options.device,
        "dtype": options.dtype or "auto",
        "cb_block_size": options.page_size,
        "cb_num_blocks": options.num_blocks,
        "cb_max_batch_tokens": options.max_batch_tokens,
        "host": options.host,
        "port": options.port,
        "non_blocking": True,
    }


@contextmanager
def _standing_in(manager: Any) -> Iterator[None]:
    """`manager` where `Serve` looks for `ModelManager`."""
    module = import_module(_MANAGER)
    before, module.ModelManager = module.ModelManager, manager  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.ModelManager = before  # type: ignore[attr-defined]


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(served: Any) -> None:
    try:
        print(pg.explain(served.compiled_body).summary(), flush=True)
    except NotCompiledError:
        print("no request came, so nothing was compiled", flush=True)
