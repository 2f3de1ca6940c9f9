"""Tiles of the attention kernel, and what programs take in code for Hopper, which compiles without one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attention_cases import Shape, make_case

from piecewise_graph.custom_ops.attention.call import Traits
from piecewise_graph.kernels.launch import interpreted

pytest.importorskip("triton")

import triton

from piecewise_graph.custom_ops.attention.attention_kernels import attend_kernel
from piecewise_graph.custom_ops.attention.tiling import Tiling, tile_batch
from piecewise_graph.custom_ops.attention.triton_attention import prepare

compiled_only = pytest.mark.skipif(interpreted(), reason="compiled kernels only")
SHARED, REGISTERS = 228 << 10, 64 << 10  # bytes and numbers of a multiprocessor
RESERVED = 1 << 10  # bytes of shared memory that each program has beside its own
KEPT_SMALL = 48 << 10  # with more shared memory Triton asks the driver for a small first-level cache


def tiling(head_dim: int, kv_heads: int, requests: int, rows: int = 1, *, uniform: bool = True) -> Tiling:
    traits = Traits("triton", "cuda", torch.bfloat16, 4 * kv_heads, kv_heads, head_dim, None, None, False)
    tiled = tile_batch(traits, requests, requests * rows, rows, 8192, processors=132, uniform=uniform)
    return tiled.tiling


class Needs(NamedTuple):
    """What a program takes: bytes of shared memory, and registers."""

    shared: int
    registers: int


def compiled(head_dim: int, kv_heads: int, tiles: Tiling, folder: Path) -> Needs:
    constants = (
        head_dim, head_dim, kv_heads, 4, 4, 16, 32, tiles.block_m, tiles.block_n, tiles.rows, tiles.parts,
        tiles.split, tiles.unmasked, False, False, "tf32", tiles.stages, False, False, 8, True,
    )  # fmt: skip
    names: list[str] = attend_kernel.arg_names
    constexprs = dict(zip(names[-len(constants) :], constants, strict=True))
    types: dict[str, Any] = dict.fromkeys(names, "i32") | dict.fromkeys(constexprs, "constexpr")
    integers = ("block_table", "seq_lens", "qo_indptr", "slot_mapping", "tree_mask", "counters")
    cached = ("k_cache", "v_cache", "q", "k", "v", "out")
    types |= dict.fromkeys(integers, "*i32") | dict.fromkeys(cached, "*bf16") | {"partials": "*fp32"}
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*cached, "partials")}
    source = triton.compiler.ASTSource(attend_kernel, types, constexprs=constexprs, attrs=aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"launch_pdl": True, "num_warps": tiles.warps}
    code: Any = triton.compile(source, target=target, options=options)
    cubin = folder / "attend.cubin"
    cubin.write_bytes(code.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    each = int(re.findall(r"REG:(\d+)", usage)[-1])
    return Needs(int(code.metadata.shared), -(-each // 8) * 8 * 32 * tiles.warps)


@compiled_only
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "requests"),
    [(64, 8, 1), (128, 8, 1), (128, 8, 4), (64, 8, 32), (128, 8, 32)],
)
def test_as_many_programs_as_the_splits_are_made_for_fit_a_multiprocessor(
    head_dim: int, kv_heads: int, requests: int, tmp_path: Path
) -> None:
    tiles = tiling(head_dim, kv_heads, requests)
    needs = compiled(head_dim, kv_heads, tiles, tmp_path)
    assert min(SHARED // (needs.shared + RESERVED), REGISTERS // needs.registers) >= tiles.resident


@compiled_only
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (128, 8), (64, 32), (128, 32)])
def test_beside_linears_of_one_row_the_first_level_cache_stays(
    head_dim: int, kv_heads: int, tmp_path: Path
) -> None:
    """See Note [Shared memory beside one row]; with 32 heads programs are no longer few."""
    needs = compiled(head_dim, kv_heads, tiling(head_dim, kv_heads, 1), tmp_path)
    assert needs.shared <= KEPT_SMALL


@pytest.mark.parametrize(
    ("requests", "tokens"), [(1, 64), (2, 64), (4, 32), (16, 64), (24, 32), (32, 64), (64, 32)]
)
def test_tiles_of_decode_are_large_for_few_programs_and_full_rounds(requests: int, tokens: int) -> None:
    assert tiling(128, 8, requests).block_n == tokens
    assert tiling(128, 8, requests, uniform=False).block_n == (32 if requests > 2 else 64)
    assert tiling(256, 8, requests).block_n == 32  # not measured


@pytest.mark.parametrize("uniform", [True, False])
def test_prompts_have_one_variant_less(uniform: bool) -> None:
    """A kernel that is announced for prompts serves all of them: theirs know no full rounds."""
    lengths = ((5, 1),) * 16  # on 8 multiprocessors, as without a GPU
    shape = Shape(lengths, heads=1, kv_heads=1, uniform=uniform)
    case = make_case(shape, dtype=torch.bfloat16, device=torch.device("cpu"), implementation="triton")
    assert (case.batch.query_len is not None) == uniform
    assert prepare(case.batch, case.call).config.constants[8] == (128 if uniform else 64)
