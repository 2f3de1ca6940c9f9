"""cache_dir: what the key of a compiled segment depends on, and what has no key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import WIDTH, assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.compiler import segment_key
from piecewise_graph.splitter.split import split

pytestmark = pytest.mark.usefixtures("no_grad")


# --- what has no key ----------------------------------------------------------------------------------


def unsaved(reason: str) -> Any:
    counts = {"cache_misses": 0, "cache_hits": 0, f"cache_unsaved:{reason}": 1}
    return pg.counters.expect(**counts)


def test_graph_that_holds_graphs_has_no_key() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,))

    with pytest.raises(AssertionError, match="holds_objects"):
        digest(branch)


@torch.compiler.allow_in_graph
def allowed(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_function_of_the_users_has_no_key() -> None:
    with pytest.raises(AssertionError, match="python_function"):
        digest(lambda x: allowed(x) + 1)


def test_op_that_tracing_opens_is_not_saved(tmp_path: Path) -> None:
    """Tracing compiles the op's Python code, which may change while the name stays."""
    with torch.library._scoped_library("opened", "FRAGMENT") as library, unsaved("not_opaque"):
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        torch._dynamo.reset()
        x = rows(3, torch.device("cpu"))
        fast = compiled(lambda x: ops.mix(torch.ops.opened.twice(x)), compiler="inductor", cache_dir=tmp_path)
        assert_same(fast(x), ops.mix(x + x))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", ["decomposition", "lowering"])
def test_op_that_the_user_teaches_inductor_is_not_saved(by: str, tmp_path: Path) -> None:
    from torch._inductor import decomposition, lowering

    with torch.library._scoped_library("taught", "FRAGMENT") as library, unsaved("not_opaque"):
        library.define(f"{by}(Tensor x) -> Tensor")
        library.impl(by, lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake(f"taught::{by}", torch.empty_like, lib=library)
        pg.register_padding_rule(f"taught::{by}", rows={"x": 0})
        op = getattr(torch.ops.taught, by)
        if by == "lowering":
            multiply = lowering.lowerings[torch.ops.aten.mul.Tensor]
            lowering.register_lowering(op.default, type_promotion_kind=None)(lambda x: multiply(x, 2))
        else:
            decomposition.register_decomposition([op.default])(lambda x: x * 2)
        x = rows(3, torch.device("cpu"))
        fast = compiled(lambda x: ops.mix(op(x)), compiler="inductor", cache_dir=tmp_path)
        assert_same(fast(x), ops.mix(x * 2))
    assert list(tmp_path.iterdir()) == []


# --- the key ------------------------------------------------------------------------------------------


def digest(function: Callable[..., Any] = torch.sin, x: Any = None, **mark: int) -> str:
    """The key of the first segment of `function(x)`, without compiling it."""
    found: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.append(segment_key.portable_key(split(gm).segments[0].gm))
        return gm.forward

    torch._dynamo.reset()
    x = rows(5, torch.device("cpu")) if x is None else x
    torch._dynamo.mark_dynamic(x, 0, **mark)
    torch.compile(function, backend=backend)(x)
    assert isinstance(found[0], segment_key.Key), found[0]
    return found[0].digest


def test_key_does_not_depend_on_values_or_names() -> None:
    def named(tokens: torch.Tensor) -> torch.Tensor:
        other_name = torch.sin(tokens)
        return other_name

    assert len({digest(), digest(), digest(named), digest(x=rows(7, torch.device("cpu")))}) == 1


KINDS: dict[str, Callable[[], str]] = {
    "as it is": digest,
    "op": lambda: digest(torch.cos),
    "constant": lambda: digest(lambda x: x.sin() * 2),
    "other constant": lambda: digest(lambda x: x.sin() * 3),
    "type of a constant": lambda: digest(lambda x: x.sin() * 2.0),
    "dtype": lambda: digest(x=torch.ones(5, WIDTH, dtype=torch.bfloat16)),
    "width": lambda: digest(x=torch.ones(5, 2 * WIDTH)),
    "strides": lambda: digest(x=torch.ones(5, 2 * WIDTH)[:, ::2]),
    "offset": lambda: digest(x=torch.ones(5 * WIDTH + 1)[1:].view(5, WIDTH)),
    "parameter": lambda: digest(x=torch.nn.Parameter(torch.ones(5, WIDTH), requires_grad=False)),
    "range": lambda: digest(min=3, max=100),
    "magnitude while tracing": lambda: digest(x=torch.ones(300, WIDTH)),
    "condition of the trace": lambda: digest(lambda x: x.sin() if x.shape[0] % 4 == 1 else x),
}


def test_key_tells_structures_apart() -> None:
    found = {name: make() for name, make in KINDS.items()}
    assert len(set(found.values())) == len(found), found


def patched(where: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, value)


def switched(put: Callable[[Any], None], value: Any, back: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        undo.append(lambda: put(back))
        put(value)

    return change


undo: list[Callable[[], None]] = []


def option(module: str, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        import importlib

        context = importlib.import_module(module).patch({name: value})
        context.__enter__()
        undo.append(lambda: context.__exit__(None, None, None))

    return change


@pytest.mark.parametrize(
    "change",
    [
        patched(torch.version, "__version__", "9.9"),
        patched(torch.version, "git_version", "0" * 40),
        patched(torch.version, "cuda", "99.9"),
        patched(segment_key, "_installed", lambda package: "9.9"),
        patched(segment_key, "FORMAT", 10**6),
        patched(segment_key, "_cpu", lambda: "another CPU"),
        patched(segment_key.platform, "python_version", lambda: "9.9"),
        patched(torch.backends.cpu, "get_cpu_capability", lambda: "VAX"),
        switched(torch.set_default_dtype, torch.bfloat16, torch.float32),
        switched(torch.use_deterministic_algorithms, True, False),
        switched(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
        switched(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
        option("torch._inductor.config", "epilogue_fusion", False),
        option("torch._inductor.config", "coordinate_descent_tuning", True),
        option("torch._inductor.config", "triton.max_tiles", 3),
        option("torch._functorch.config", "functionalize_rng_ops", True),
    ],
)
def test_key_follows_versions_machine_and_options(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest()
    try:
        change(monkeypatch)
        assert digest() != before
    finally:
        monkeypatch.undo()
        while undo:
            undo.pop()()
    assert digest() == before


def test_pass_that_a_user_added_has_no_key() -> None:
    from torch._inductor import config

    class Pass:
        def __call__(self, graph: Any) -> None:
            pass

    with config.patch({"post_grad_custom_post_pass": Pass()}), pytest.raises(AssertionError, match="unnamed"):
        digest()


@pytest.mark.slow
def test_key_is_the_same_whatever_the_order_of_sets() -> None:
    """Options print in one order in every process."""
    script = "from piecewise_graph import _torch; print(_torch.compile_options())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
