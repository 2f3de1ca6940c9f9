"""What a program of the attention kernel takes, in code for Hopper, which compiles without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecewise_graph.custom_ops.attention.call import Traits
from piecewise_graph.kernels.launch import interpreted

pytest.importorskip("triton")

from piecewise_graph.custom_ops.attention.attention_kernels import attend_kernel
from piecewise_graph.custom_ops.attention.tiling import Tiling, tile_batch

pytestmark = pytest.mark.skipif(interpreted(), reason="compiled kernels only")

HOPPER = 227 * 1024  # bytes of shared memory that the blocks of a multiprocessor take at most
KEPT_SMALL = 48 * 1024  # with more, Triton asks the driver for a small first-level cache


def tiling(head_dim: int, kv_heads: int, requests: int, rows: int) -> Tiling:
    traits = Traits("triton", "cuda", torch.bfloat16, 4 * kv_heads, kv_heads, head_dim, None, None, False)
    return tile_batch(traits, requests, requests * rows, rows, 8192, processors=132, uniform=True).tiling


def shared_memory(head_dim: int, kv_heads: int, tiles: Tiling) -> int:
    """Of a program, in bytes."""
    import triton

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
    code: Any = triton.compile(source, target=target, options={"launch_pdl": True, "num_warps": tiles.warps})
    return int(code.metadata.shared)


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (128, 8), (256, 8), (64, 32), (128, 32)])
def test_beside_linears_of_one_row_the_first_level_cache_stays(head_dim: int, kv_heads: int) -> None:
    """See Note [Shared memory beside one row]; with 32 heads programs are no longer few."""
    assert shared_memory(head_dim, kv_heads, tiling(head_dim, kv_heads, 1, 1)) <= KEPT_SMALL


@pytest.mark.parametrize(("requests", "rows", "programs"), [(1, 1, 2), (8, 1, 4), (32, 1, 2), (1, 8, 2)])
def test_as_many_programs_as_splits_are_made_for_share_a_multiprocessor(
    requests: int, rows: int, programs: int
) -> None:
    tiles = tiling(128, 8, requests, rows)
    assert tiles.block_m <= 32 and programs * shared_memory(128, 8, tiles) <= HOPPER


@pytest.mark.parametrize(
    ("requests", "tokens"), [(1, 64), (2, 64), (4, 32), (16, 64), (24, 32), (32, 64), (64, 32)]
)
def test_tiles_of_decode_are_large_for_few_programs_and_full_rounds(requests: int, tokens: int) -> None:
    assert tiling(128, 8, requests, 1).block_n == tokens
