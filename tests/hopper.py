"""Kernels compiled for Hopper, which takes no GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

SHARED, REGISTERS = 228 << 10, 64 << 10  # bytes and numbers of a multiprocessor
RESERVED = 1 << 10  # bytes of shared memory that each program has beside its own


def compiled(kernel: Any, types: Sequence[str], constants: Sequence[Any], **options: int) -> Any:
    """Triton's compiled kernel, launched as a dependent.

    Args:
        types: of the arguments before the constexprs. All pointers are multiples of 16 bytes.
        constants: the constexprs, in order.
        options: num_warps, num_stages.
    """
    import triton

    constexprs = dict(zip(kernel.arg_names[len(types) :], constants, strict=True))
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] == "*"}
    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    source = _source_of(kernel)(kernel, signature, constexprs=constexprs, attrs=aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"launch_pdl": True, **options})


def _source_of(kernel: Any) -> Any:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    import triton

    return triton.compiler.ASTSource


def sass(made: Any) -> str:
    """The machine's code of a compiled kernel."""
    import triton

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        return subprocess.run([disassembler, file.name], check=True, capture_output=True, text=True).stdout


def assert_skips_the_first_wait(made: Any) -> str:
    """Where its argument `early` is not 0. Returns the code without what stands for debuggers."""
    lines = (line.split("//")[0].strip() for line in made.asm["ptx"].splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith((".loc", "$L__tmp")))
    skip = re.search(
        r"setp\.ne\.b32\s+(%p\d+), (%r\d+), 0;\n@\1 bra\s+(\S+);\n(?:griddepcontrol\.wait.*\n)\3:", code
    )
    number = made.src.fn.arg_names.index("early")
    assert skip and re.search(rf"ld\.param\.b32\s+{skip[2]}, \[\w+_param_{number}\];", code)
    assert code.index("griddepcontrol.wait") > skip.start()
    return code
