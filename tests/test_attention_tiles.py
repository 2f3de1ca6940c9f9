"""Tiles of the attention kernel, and what programs take in code for Hopper, which compiles without one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attention_cases import Shape, make_case
from hopper import REGISTERS, RESERVED, SHARED, compiled

from piecewise_graph.custom_ops.attention.call import Traits
from piecewise_graph.kernels.launch import interpreted

pytest.importorskip("triton")

import triton

from piecewise_graph.custom_ops.attention import triton_attention
from piecewise_graph.custom_ops.attention.attention_kernels import attend_kernel
from piecewise_graph.custom_ops.attention.tiling import Tiling, tile_batch

compiled_only = pytest.mark.skipif(interpreted(), reason="compiled kernels only")
KEPT_SMALL = 48 << 10  # with more shared memory Triton asks the driver for a small first-level cache


def tiling(
    head_dim: int, kv_heads: int, requests: int, rows: int = 1, *, fills_rounds: bool = True
) -> Tiling:
    traits = Traits("triton", "cuda", torch.bfloat16, 4 * kv_heads, kv_heads, head_dim, None, None, False)
    tiled = tile_batch(
        traits, requests, requests * rows, rows, 8192, processors=132, fills_rounds=fills_rounds
    )
    return tiled.tiling


class Needs(NamedTuple):
    """What a program takes: bytes of shared memory, and registers."""

    shared: int
    registers: int


def needs_of(head_dim: int, kv_heads: int, tiles: Tiling, folder: Path) -> Needs:
    constants = (
        head_dim, head_dim, kv_heads, 4, 4, 16, 32, tiles.block_m, tiles.block_n, tiles.rows, tiles.parts,
        tiles.split, tiles.unmasked, False, False, "tf32", tiles.stages, False, False, 8, True,
    )  # fmt: skip
    names: list[str] = attend_kernel.arg_names[: -len(constants)]
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("scale", "softcap"), "fp32")
    types |= dict.fromkeys(("k_cache", "v_cache", "q", "k", "v", "out"), "*bf16") | {"partials": "*fp32"}
    integers = ("block_table", "seq_lens", "qo_indptr", "slot_mapping", "tree_mask", "counters")
    types |= dict.fromkeys(integers, "*i32")
    code = compiled(attend_kernel, list(types.values()), constants, num_warps=tiles.warps)
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
    needs = needs_of(head_dim, kv_heads, tiles, tmp_path)
    assert min(SHARED // (needs.shared + RESERVED), REGISTERS // needs.registers) >= tiles.resident


@compiled_only
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (128, 8), (64, 32), (128, 32)])
def test_beside_linears_of_one_row_the_first_level_cache_stays(
    head_dim: int, kv_heads: int, tmp_path: Path
) -> None:
    """See Note [Shared memory beside one row]; with 32 heads programs are no longer few."""
    needs = needs_of(head_dim, kv_heads, tiling(head_dim, kv_heads, 1), tmp_path)
    assert needs.shared <= KEPT_SMALL


@pytest.mark.parametrize(
    ("requests", "tokens"), [(1, 64), (2, 64), (4, 32), (16, 64), (24, 32), (32, 64), (64, 32)]
)
def test_tiles_of_decode_are_large_for_few_programs_and_full_rounds(requests: int, tokens: int) -> None:
    assert tiling(128, 8, requests).block_n == tokens
    assert tiling(128, 8, requests, fills_rounds=False).block_n == (32 if requests > 2 else 64)
    assert tiling(256, 8, requests).block_n == 32  # not measured


@pytest.mark.parametrize(
    ("uniform", "shared", "tokens"), [(True, 227, 128), (False, 227, 64), (True, 99, 64)]
)
def test_tiles_fill_rounds_in_decode_where_two_programs_fit_a_multiprocessor(
    uniform: bool, shared: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with prompts: a kernel that is announced for some serves all of them."""
    monkeypatch.setattr(triton_attention, "shared_memory", lambda device: shared << 10)
    lengths = ((5, 1),) * 16  # on 8 multiprocessors, as without a GPU
    shape = Shape(lengths, heads=1, kv_heads=1, uniform=uniform)
    case = make_case(shape, dtype=torch.bfloat16, device=torch.device("cpu"), implementation="triton")
    assert (case.batch.query_len is not None) == uniform
    assert triton_attention.prepare(case.batch, case.call).config.constants[8] == tokens
