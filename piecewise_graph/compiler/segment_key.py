"""Keys for what a segment computes: one for this process, one that is valid in any other.

Note [Structure, not weights]
A segment takes its weights as arguments, so two layers whose graphs are equal up to names share one compiled
function. The key holds everything that the compiled code depends on: ops, constants, dtypes, devices,
layouts, which inputs share storage, ranges of size symbols and conditions on them, and the switches of torch
that change generated code. Symbols are renamed in order of appearance. Names of nodes, stack traces and the
values of symbols while tracing are left out. Functions and objects whose name or text another one may have
stand for themselves: in this process by what they are, and for other processes such a segment has no key.

Note [Conditions that come with code]
Inductor may rely on conditions on sizes (rows * 4096 < 2**31, so that 32 bits index them). It adds them to
the guards of the trace, and a call that breaks them gets another trace. When another trace, of this process
or the next, uses the code, the same conditions must hold there. So they are kept with the code: either they
hold and become part of that trace, or the code is not used. Keys are made before anything is compiled, so
that they hold the conditions of the model alone.

Note [Key for other processes]
More can change between processes than between two layers, so the key of a file in cache_dir holds more: what
every node returns, the schemas of custom ops (an op may be edited), the magnitude of sizes while tracing
(Inductor picks block sizes by it, rounded to powers of two), and the machine, versions and options below. A
segment has no such key if a part of it has no name in another process: bodies of higher-order ops, functions
of the user's, and custom ops that tracing opens up, because their code may change under the same name.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from piecewise_graph import _torch

# Counts up when what is stored, or how segments are compiled, changes.
FORMAT = 8


@dataclass(frozen=True)
class Key:
    """Names what a segment computes.

    Attributes:
        digest: hash of everything in the notes above.
        symbols: size symbol of this trace -> its name in every trace.
    """

    digest: str
    symbols: Mapping[sympy.Symbol, str]


# Conditions on sizes, each with the names of its symbols (Note [Conditions that come with code]).
Conditions: TypeAlias = "tuple[tuple[sympy.Basic, dict[sympy.Symbol, str]], ...]"


def structure_key(gm: GraphModule, compiler: str, device: torch.device) -> Key:
    """The key of `gm` in this process.

    Args:
        device: where graphs of its trace run. They hold nothing of what lies elsewhere.
    """
    writer = _KeyWriter(gm, compiler)
    elsewhere = [f"beside graphs on {device}"] if set(_devices(gm)) - {device} else []
    return writer.key([*writer.lines(), *elsewhere], digits=16)


def portable_key(gm: GraphModule) -> Key | str:
    """The key of `gm` for other processes, or the reason why it has none."""
    reason = next(filter(None, map(_unportable, gm.graph.nodes)), None)
    if reason is not None:
        return reason
    writer = _KeyWriter(gm, "inductor")
    lines = [*writer.lines(), *writer.details(), *surroundings(_devices(gm)), *_torch.compile_options()]
    return "unnamed_object" if any(" at 0x" in line for line in lines) else writer.key(lines)


def conditions_since(given: int, key: Key, shape_env: Any | None) -> Conditions | None:
    """What the trace relies on beyond its first `given` guards, where it concerns the segment of `key`.

    None: some also concern sizes that the segment does not have, so no other trace can check them.
    """
    if shape_env is None:
        return ()
    mine = set(key.symbols)
    relied_on = [*_torch.guards_since(shape_env, given), *_torch.found_sizes(shape_env, key.symbols)]
    added = [condition for condition in relied_on if condition.free_symbols & mine]
    if not all(condition.free_symbols <= mine for condition in added):
        return None
    return tuple((c, {symbol: key.symbols[symbol] for symbol in c.free_symbols}) for c in added)


def accept(conditions: Conditions | None, key: Key, shape_env: Any | None) -> bool:
    """Make `conditions` part of a trace; False, and nothing is changed, where they do not hold in it."""
    if conditions is None:
        return False
    mine = {name: symbol for symbol, name in key.symbols.items()}
    here = [c.xreplace({theirs: mine[name] for theirs, name in names.items()}) for c, names in conditions]
    if not all(_torch.holds(shape_env, condition) for condition in here):
        return False
    for condition in here:
        _torch.assume(shape_env, condition)
    return True


# Types whose text is their whole value.
_EXACT = (
    bool, int, float, complex, str, bytes, range, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_NAMESPACES = ("torch", "operator", "_operator", "math", "builtins")


def _unportable(node: Node) -> str | None:
    """Why another process could take `node` for something else."""
    if node.op in ("get_attr", "call_module"):
        return "holds_objects"
    if node.op != "call_function" or _torch.op_schemas(node.target) is not None:
        return None
    if not isinstance(node.target, _FUNCTIONS):
        return "not_opaque"
    return None if _is_of_torch(node.target) else "python_function"


def _is_of_torch(target: Any) -> bool:
    """A function of torch or Python that its name leads back to: closures share theirs."""
    if not isinstance(target, _FUNCTIONS):
        return False
    owner = getattr(target, "__objclass__", getattr(target, "__self__", None))
    module = str(getattr(target, "__module__", None) or getattr(owner, "__module__", ""))
    if module.partition(".")[0] not in _NAMESPACES:
        return False
    if isinstance(target, types.BuiltinFunctionType):
        return True
    return getattr(owner or sys.modules.get(module), target.__name__, None) is target


def _devices(gm: GraphModule) -> list[torch.device]:
    values = [_torch.example_value(node) for node in gm.graph.nodes]
    return sorted({_torch.device_of(x) for x in values if isinstance(x, Tensor)}, key=str)


def surroundings(devices: list[torch.device]) -> Iterator[str]:
    """Versions and hardware that compiled code is good for."""
    version = torch.version
    yield f"format {FORMAT}, Python {platform.python_version()} {platform.machine()} {platform.libc_ver()}"
    yield f"torch {version.__version__} {version.git_version} cuda {version.cuda} hip {version.hip}"
    yield f"triton {[(n, _installed(n)) for n in ('triton', 'pytorch-triton', 'pytorch-triton-rocm')]}"
    yield f"cpu {torch.backends.cpu.get_cpu_capability()} {_cpu()}"
    for device in devices:
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            yield f"{found.name} {found.major}.{found.minor}, {found.multi_processor_count} processors"
        elif device.type == "cpu":
            yield f"{torch.get_num_threads()} threads"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _cpu() -> str:
    """C++ kernels are built for exactly the machine's CPU (-march=native)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return " ".join(sorted({line for line in lines if line.startswith(wanted)}))


class _KeyWriter:
    def __init__(self, gm: GraphModule, compiler: str) -> None:
        self.gm, self.compiler = gm, compiler
        self.index = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.storages: dict[int, int] = {}

    def lines(self) -> list[str]:
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.compiler, *_switches())
        body = [self._line(node) for node in self.gm.graph.nodes]
        return [repr(state), *body, *self._relied_on()]

    def key(self, lines: list[str], digits: int = 64) -> Key:
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:digits]
        return Key(digest, {old: str(new) for old, new in self.symbols.items()})

    def _line(self, node: Node) -> str:
        if node.op == "placeholder":
            value = _torch.example_value(node)
            if _torch.is_opaque(value):  # which object it is, each call says
                return f"placeholder {type(_torch.real_object(value)).__qualname__}"
            return f"placeholder {self._operand(value)}"
        if node.op == "get_attr":
            # Bodies and constants have no structure to compare: equal only where they are one object.
            return f"get_attr {id(getattr(self.gm, str(node.target)))}"
        target = node.target if isinstance(node.target, str) else _named(node.target)
        return f"{node.op} {target} {self._operand(node.args)} {self._operand(node.kwargs)}"

    def _tensor(self, value: Tensor) -> str:
        storage = self.storages.setdefault(_torch.storage_id(value), len(self.storages))
        layout = [self._operand(list(part)) for part in (value.shape, value.stride())]
        offset = self._operand(value.storage_offset())
        kind = f"{type(value).__name__} {value.dtype} {value.device} {value.requires_grad}"
        return f"{kind} {layout} {offset} s{storage}"

    def _operand(self, value: Any) -> str:
        if isinstance(value, Node):
            return f"%{self.index[value]}"
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._expression(value.node.expr)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k}: {self._operand(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}[" + ", ".join(map(self._operand, value)) + "]"
        if isinstance(value, slice):
            return f"slice{self._operand((value.start, value.stop, value.step))}"
        if value is None or value is ... or isinstance(value, _EXACT):
            return f"{type(value).__name__}:{value!r}"
        return _identity(value)

    def _expression(self, expr: sympy.Expr) -> str:
        for symbol in sorted(expr.free_symbols, key=str):
            self.symbols.setdefault(symbol, sympy.Symbol(f"c{len(self.symbols)}"))
        return str(expr.xreplace(self.symbols))

    def _relied_on(self) -> list[str]:
        shape_env = _torch.shape_env_of(self.gm)
        if shape_env is None:
            return []
        ranges = [f"{new} {_torch.value_range(shape_env, old)}" for old, new in self.symbols.items()]
        mine = set(self.symbols)
        guards = [guard for guard in _torch.shape_guards(shape_env) if guard.free_symbols & mine]
        return ranges + sorted({self._expression(guard) for guard in guards})

    def details(self) -> Iterator[str]:
        """What only a key for other processes says (Note [Key for other processes])."""
        for node in self.gm.graph.nodes:
            yield f"{self._operand(_torch.example_value(node))} {_custom_schemas(node)}"
        shape_env = _torch.shape_env_of(self.gm)
        if shape_env is not None:
            for symbol, name in self.symbols.items():
                hint = _torch.size_hint(shape_env, symbol)
                yield f"{name} {None if hint is None else (hint - 1).bit_length()}"


def _named(target: Any) -> str:
    """Ops and functions of torch by name; others, which may share a name, by what they are."""
    names = [getattr(target, name, "") for name in ("__module__", "__name__", "__qualname__")]
    if _torch.op_schemas(target) is not None or _is_of_torch(target):
        return f"{names} {target}".split(" at 0x")[0]
    return _identity(target)


def _identity(value: Any) -> str:
    """Of an object that its text may not tell from another. The stored segment's graph keeps it alive."""
    if isinstance(value, types.MethodType):  # made anew each time that it is asked for
        return f"{_identity(value.__self__)}.{_identity(value.__func__)}"
    return f"{type(value).__qualname__} at {id(value):#x}"


def _switches() -> tuple[Any, ...]:
    """Process-wide settings of torch that change what Inductor generates or which kernels it calls."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.__version__,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def _custom_schemas(node: Node) -> list[str]:
    """Signatures of an op that does not come with torch; torch's version stands for its own."""
    schemas = _torch.op_schemas(node.target) if node.op == "call_function" else None
    return [s for s in schemas or () if not s.startswith(("aten::", "prims::"))]
