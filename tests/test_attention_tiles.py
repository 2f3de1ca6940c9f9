"""Tiles of the attention kernel, and what programs take in code for Hopper, which compiles without one."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attention_cases import Shape, make_case
from hopper import REGISTERS, RESERVED, SHARED, assert_skips_the_first_wait, compiled, sass

from piecewise_graph.custom_ops.attention.call import Traits
from piecewise_graph.kernels.launch import CARVEOUT, Launcher, carveout, interpreted

pytest.importorskip("triton")

import triton

from piecewise_graph.custom_ops.attention import triton_attention
from piecewise_graph.custom_ops.attention.attention_kernels import attend_kernel
from piecewise_graph.custom_ops.attention.tiling import Tiling, tile_batch

compiled_only = pytest.mark.skipif(interpreted(), reason="compiled kernels only")
KEPT_SMALL = 48 << 10  # with more shared memory Triton asks the driver for a small first-level cache
CACHE = 64 << 10  # bytes that linears of one row want of it


def tiling(
    head_dim: int, kv_heads: int, requests: int, rows: int = 1,
    *, large: bool = True, group: int = 4, apart: bool = False,
) -> Tiling:  # fmt: skip
    heads = group * kv_heads
    traits = Traits("triton", "cuda", torch.bfloat16, heads, kv_heads, head_dim, None, None, False)
    tiled = tile_batch(
        traits, requests, requests * rows, rows, 8192, processors=132, large=large, apart=apart
    )
    return tiled.tiling


class Needs(NamedTuple):
    """What a program takes: bytes of shared memory, and registers."""

    shared: int
    registers: int


def code_of(
    head_dim: int,
    kv_heads: int,
    tiles: Tiling,
    *,
    tail: bool = False,
    tree: bool = False,
    window: bool = False,
    group: int = 4,
) -> Any:
    constants = (
        head_dim, head_dim, kv_heads, group, group, 16, 16, 32, tiles.block_m, tiles.tile.block_n, tiles.rows,
        tiles.parts, tiles.split, tiles.unmasked, tail, tree, "tf32", tiles.tile.stages, window, False, 8,
        True,
    )  # fmt: skip
    names: list[str] = attend_kernel.arg_names[: -len(constants)]
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("scale", "softcap"), "fp32")
    types |= dict.fromkeys(("k_cache", "v_cache", "q", "k", "v", "out"), "*bf16") | {"partials": "*fp32"}
    integers = ("block_table", "seq_lens", "qo_indptr", "slot_mapping", "tree_mask", "counters")
    types |= dict.fromkeys(integers, "*i32")
    return compiled(attend_kernel, list(types.values()), constants, num_warps=tiles.tile.warps)


def needs_of(head_dim: int, kv_heads: int, tiles: Tiling, folder: Path, *, group: int = 4) -> Needs:
    code = code_of(head_dim, kv_heads, tiles, group=group)
    cubin = folder / "attend.cubin"
    cubin.write_bytes(code.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    each = int(re.findall(r"REG:(\d+)", usage)[-1])
    return Needs(int(code.metadata.shared), -(-each // 8) * 8 * 32 * tiles.tile.warps)


@compiled_only
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "requests"),
    [(64, 8, 1), (128, 8, 1), (256, 8, 1), (128, 32, 1), (128, 8, 4), (64, 8, 32), (128, 8, 32)],
)
def test_as_many_programs_as_the_splits_are_made_for_fit_a_multiprocessor(
    head_dim: int, kv_heads: int, requests: int, tmp_path: Path
) -> None:
    tiles = tiling(head_dim, kv_heads, requests)
    needs = needs_of(head_dim, kv_heads, tiles, tmp_path)
    assert min(SHARED // (needs.shared + RESERVED), REGISTERS // needs.registers) >= tiles.tile.resident


@compiled_only
@pytest.mark.parametrize(
    ("head_dim", "group", "at_a_time"), [(64, 4, 2), (64, 1, 2), (128, 1, 2), (128, 4, 1)]
)
def test_prompts_beside_many_programs_of_one_row(
    head_dim: int, group: int, at_a_time: int, tmp_path: Path
) -> None:
    """Two programs run at a time where heads are small or have a KV head each; else one, of more rows."""
    tiles = tiling(head_dim, 8, 36, 120, group=group, large=False)
    needs = needs_of(head_dim, 8, tiles, tmp_path, group=group)
    assert min(SHARED // (needs.shared + RESERVED), REGISTERS // needs.registers) >= at_a_time
    assert tiles.block_m == 128 // at_a_time


@compiled_only
@pytest.mark.parametrize("kind", ["plain", "tail", "tree", "window"])
@pytest.mark.parametrize("head_dim, rows", [(64, 1), (128, 8), (64, 64)])
def test_metadata_is_read_before_the_wait_and_nothing_else(head_dim: int, rows: int, kind: str) -> None:
    """In the machine's own code: which loads come before it, none of them wide, and no stores."""
    tiles = tiling(head_dim, 8, 4, rows, large=rows < 64)
    made = code_of(head_dim, 8, tiles, tail=kind == "tail", tree=kind == "tree", window=kind == "window")
    before, ahead, after = sass(made).split("ACQBULK")
    assert "PREEXIT" in before and "LDG" not in before
    # All requests' first rows, the rows behind their last ones, and where it splits their lengths; the same
    # of the program's own request; pages of its first tile, and slots of few new tokens.
    loads = 2 + tiles.split + 3 + 1 + (tiles.block_m <= 32)
    assert ahead.count("LDG") >= loads and not re.search(r"LDG\S*\.(U8|64|128)", ahead)
    assert not re.search(r"STG|LDGSTS|ATOM|RED\.", ahead) and "LDGSTS" in after and "STG" in after
    assert_skips_the_first_wait(made)


@compiled_only
@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_beside_linears_of_one_row_the_first_level_cache_stays(
    head_dim: int, kv_heads: int, tmp_path: Path
) -> None:
    """See Note [Shared memory beside one row]; with 32 heads programs are no longer few."""
    tiles = tiling(head_dim, kv_heads, 1)
    shared = needs_of(head_dim, kv_heads, tiles, tmp_path).shared
    programs = tiles.tile.set_aside
    left = 100 - carveout(shared, programs, SHARED)
    assert left * SHARED >= 100 * CACHE if programs else shared <= KEPT_SMALL


@pytest.mark.parametrize(
    ("requests", "tokens"), [(1, 128), (2, 128), (4, 32), (16, 64), (24, 32), (32, 64), (64, 32)]
)
def test_tiles_of_decode_are_large_for_few_programs_and_full_rounds(requests: int, tokens: int) -> None:
    assert tiling(128, 8, requests).tile.block_n == tokens
    assert tiling(128, 8, requests, apart=True).tile.block_n == (tokens if requests <= 2 else 32)
    assert tiling(128, 8, requests, large=False).tile.block_n == (32 if requests > 2 else 64)
    assert tiling(256, 8, requests).tile.block_n == (64 if requests <= 2 else 32)


@pytest.mark.parametrize(
    ("head_dim", "rows", "tokens"), [(64, 4, 128), (64, 8, 128), (128, 4, 128), (128, 8, 64), (256, 4, 64)]
)
def test_tiles_of_a_short_verification_are_large_for_few_programs(
    head_dim: int, rows: int, tokens: int
) -> None:
    assert tiling(head_dim, 8, 1, rows).tile.block_n == tokens
    many = tiling(head_dim, 8, 24, rows).tile  # of 8 rows with heads of 128: as many tokens, by fewer warps
    assert many.block_n < tokens or many.warps < 8


@pytest.mark.parametrize(("kv_heads", "tokens"), [(1, 128), (32, 128), (34, 32), (72, 32)])
def test_one_row_has_large_tiles_up_to_a_program_for_four_multiprocessors(kv_heads: int, tokens: int) -> None:
    """With more, a program at a time on each multiprocessor would leave some of them idle."""
    assert tiling(128, kv_heads, 1).tile.block_n == tokens


@pytest.mark.parametrize(
    ("shared", "programs", "percent"), [(142336, 1, 62), (41984, 2, 37), (0, 1, 1), (142336, 2, 100)]
)
def test_the_share_of_shared_memory_is_what_its_programs_take(
    shared: int, programs: int, percent: int
) -> None:
    """Each has 1 KiB beside its own; rounded up."""
    assert carveout(shared, programs, SHARED) == percent


@pytest.mark.gpu
def test_a_launcher_sets_aside_the_share_of_its_programs() -> None:
    from piecewise_graph.kernels.copy_kernel import copy_kernel

    x = torch.ones(64, device="cuda", dtype=torch.int64)
    args, options = (x, x, 64) * 4, {"num_warps": 1}
    Launcher(copy_kernel, 6, **options).variant(args, 64)
    function = copy_kernel.warmup(*args, 64, grid=(1, 1, 1), **options).function
    found = ctypes.c_int(-1)
    ctypes.CDLL("libcuda.so.1").cuFuncGetAttribute(ctypes.byref(found), CARVEOUT, ctypes.c_void_p(function))
    every = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
    assert found.value == carveout(0, 6, every) > 0


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
    assert triton_attention.prepare(case.batch, case.call).config.constants[9] == tokens
