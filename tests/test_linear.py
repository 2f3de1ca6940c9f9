"""Linear layers of a few rows: the op, its kernels (compiled or interpreted), what is measured."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hopper import RESERVED, SHARED, compiled, sass
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from linear_operands import DEVICE, DTYPES, EXAMPLES, TOLERANCE, operands
from torch import Tensor

from piecewise_graph.kernels.linear import MAX_TOKENS, KernelConfig, linear_few
from piecewise_graph.kernels.linear.kernel_configs import (
    IN_TILES,
    INVARIANT,
    SHARED_MEMORY,
    candidates,
    is_config,
    rings_of,
    usual_config,
)


@pytest.mark.slow
@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def assert_right(x: Tensor, weight: Tensor, bias: Tensor | None, plan: list[int]) -> None:
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    found = linear_few(x, weight, bias, plan)
    splits = KernelConfig(*plan).splits if plan else 1
    if splits > 1:
        assert found.dtype == torch.float32 and found.shape == (splits, *expected.shape)
        found = found.sum(0)
    else:
        assert found.dtype == x.dtype and found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[x.dtype], atol=3 * TOLERANCE[x.dtype])


PLANS = st.builds(
    KernelConfig,
    block_n=st.sampled_from([1, 4, 16]),
    block_k=st.sampled_from([16, 64]),
    splits=st.sampled_from([1, 2, 4]),
    warps=st.just(4),
    ahead=st.just(4),
    stages=st.sampled_from([1, 3]),
    parts=st.sampled_from([1, 2]),
    tile=st.sampled_from([0, 16, 64]),
    ring=st.just(0),
)


# The interpreter takes as long as there are programs and steps. With these there are several of both.
ROWS, COLUMNS = (st.integers(1, most) for most in ((40, 140) if INTERPRETED else (100, 200)))


class TestKernels:
    pytestmark = needs_kernels

    @EXAMPLES
    @given(
        PLANS,
        ROWS,
        COLUMNS,
        st.booleans(),
        st.sampled_from(DTYPES),
    )
    def test_one_row(
        self, plan: KernelConfig, rows: int, columns: int, bias: bool, dtype: torch.dtype
    ) -> None:
        x, weight, b = operands(1, rows, columns, dtype)
        assert_right(x, weight, b if bias else None, list(plan._replace(tile=0)))

    @EXAMPLES
    @given(
        PLANS,
        st.integers(2, MAX_TOKENS),
        ROWS,
        COLUMNS,
        st.booleans(),
        st.sampled_from(DTYPES),
    )
    def test_few_rows(
        self, plan: KernelConfig, tokens: int, rows: int, columns: int, bias: bool, dtype: torch.dtype
    ) -> None:
        x, weight, b = operands(tokens, rows, columns, dtype)
        plan = plan._replace(block_n=max(plan.block_n, 16))  # the shortest side of a matrix product
        assert_right(x, weight, b if bias else None, list(plan))

    @pytest.mark.parametrize("tokens", [1, 3, 64])
    def test_every_candidate(self, tokens: int) -> None:
        few = 16 if tokens == 1 else 64  # the longest block has as many
        x, weight, bias = operands(tokens, *((few, 2048) if INTERPRETED else (192, 8192)), DTYPES[0])
        plans = candidates(tokens, *weight.shape)
        assert sum(self.is_right(x, weight, bias, plan) for plan in plans[:: 3 if INTERPRETED else 1]) >= 2

    @pytest.mark.parametrize(
        "tokens, columns, splits", [(4, 520, 1), (33, 512, 1), (64, 512, 1), (4, 512, 2), (1, 500, 1)]
    )
    def test_what_rings_cannot_serve_has_other_blocks(self, tokens: int, columns: int, splits: int) -> None:
        """Columns that are not aligned, many rows, splits; and whatever there is on other devices."""
        x, weight, bias = operands(tokens, 40, columns, DTYPES[0])
        for plan in rings_of(min(tokens, 32))[::4]:
            assert_right(x, weight, bias, list(plan._replace(splits=splits)))

    def is_right(self, x: Tensor, weight: Tensor, bias: Tensor, plan: KernelConfig) -> bool:
        """False for plans that need more shared memory than there is: measuring passes over them."""
        from triton.runtime.errors import OutOfResources

        try:
            assert_right(x, weight, bias, list(plan))
        except OutOfResources:
            return False
        return True


@given(
    st.integers(1, 130),
    st.lists(st.integers(1, 4096), min_size=1, max_size=4),
    st.integers(1, 9000),
    st.booleans(),
    st.integers(8, 200),
)
def test_usual_blocks_are_for_aligned_columns(
    tokens: int, rows: list[int], columns: int, gated: bool, processors: int
) -> None:
    for wide in (columns, columns * 16):
        config = usual_config(tokens, rows, wide, gated=gated, processors=processors)
        assert config is None or (wide % 16 == 0 and config.splits == 1)
        assert config is None or config.block_n % 2 == 0 or not gated
    config = usual_config(tokens, [4096, 4096], columns * 16 + 512, gated=gated, processors=processors)
    many, long = tokens > MAX_TOKENS, columns * 16 + 512 > 4096
    blocks, rounds = 64 if gated or processors < 128 else 128, 2 if gated else 1
    few = blocks <= rounds * processors and not (long and 2 * blocks < processors)
    assert tokens > 128 or (config is not None) == (not many or few)


# Rows of weights, columns, gated or not, of layers of Llama-3.2-1B, Llama-3-8B, Qwen2.5 and Llama-2.
LAYERS = [
    ([2048, 512, 512], 2048, False), ([2048], 2048, False), ([8192] * 2, 2048, True), ([2048], 8192, False),
    ([4096, 1024, 1024], 4096, False), ([4096], 4096, False), ([14336] * 2, 4096, True),
    ([896], 4864, False), ([2560], 9728, False), ([8960] * 2, 1536, True), ([11008] * 2, 4096, True),
]  # fmt: skip


@pytest.mark.parametrize(
    "wide, blocks", [(8192, 128), (11008, 64), (13824, 128), (18944, 64), (8960, 64), (6912, 128)]
)
def test_blocks_of_a_swiglu_are_large_where_rounds_of_them_are_full(wide: int, blocks: int) -> None:
    """Of 128 rows, unless they need several rounds and leave a fifth of these rounds' places empty."""
    config = usual_config(4, [wide, wide], 2048, gated=True)
    assert config is not None and config.block_n == blocks


def test_blocks_of_few_rows_fill_the_device_in_one_round() -> None:
    """The attention's output and down of the 1B, at few rows of x those of the 8B too."""
    for tokens in (4, 32):
        for rows, columns, _ in LAYERS:
            if rows in ([2048], [4096]) and (tokens == 4 or rows == [2048]):
                config = usual_config(tokens, rows, columns)
                assert config is not None and 0.9 * 132 <= sum(rows) / config.block_n <= 132


@settings(max_examples=40)
@given(PLANS, st.integers(1, 6), st.integers(1, 40), st.integers(1, 150), st.booleans())
def test_reference_is_a_linear(plan: KernelConfig, tokens: int, rows: int, columns: int, bias: bool) -> None:
    if INTERPRETED or DEVICE.type == "cuda":
        return
    x, weight, b = operands(tokens, rows, columns, torch.float32)
    assert_right(x, weight, b if bias else None, list(plan))
    assert_right(x, weight, b if bias else None, [])


def test_more_dimensions_and_other_strides() -> None:
    x, weight, bias = operands(6, 32, 64, DTYPES[0])
    plan = [16, 16, 2, 4, 1]
    wide = x.view(2, 3, 64).transpose(0, 1)
    found = linear_few(wide, weight, bias, plan).sum(0)
    expected = torch.nn.functional.linear(wide.float(), weight.float(), bias.float())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=6e-2)


@pytest.mark.parametrize("plan", [[], [16, 16, 1, 4, 1], [16, 16, 4, 4, 1]])
def test_opcheck(plan: list[int]) -> None:
    x, weight, bias = operands(3, 32, 64, DTYPES[0])
    for b in (None, bias):
        torch.library.opcheck(torch.ops.piecewise.linear_few.default, (x, weight, b, plan))
        torch.library.opcheck(torch.ops.piecewise.swiglu.default, (x, [weight, weight], [b, b]))
        torch.library.opcheck(torch.ops.piecewise.linears.default, (x, [weight, weight], [b, b]))


def code_for_hopper(constants: tuple[Any, ...], *, counted: int = 0, **options: int) -> Any:
    """The kernel compiled with these constexprs, which takes no GPU.

    Args:
        counted: shares of squares that the rows of x are scaled by.
    """
    pytest.importorskip("triton")
    from piecewise_graph.kernels.linear.linear_kernels import few_rows

    types = ["*bf16"] * 10 + ["*fp32" if counted else "*bf16"] + ["i32"] * 7 + ["fp32"]
    return compiled(few_rows, types, (*constants[:-1], counted, constants[-1]), **options)


def code_before_a_norm(constants: tuple[Any, ...], **options: int) -> Any:
    """The same of the kernel that adds a residual."""
    pytest.importorskip("triton")
    from piecewise_graph.kernels.linear.added_kernels import few_rows_added

    return compiled(few_rows_added, ["*bf16"] * 7 + ["*fp32"] + ["i32"] * 4, constants, **options)


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(
    ("blocks", "tiled", "counted"),
    [
        ((2, 2048, 1, 1, 4, 1), False, 512),
        ((2, 512, 4, 1, 4, 1), False, 0),
        ((64, 128, 1, 1, 4, 16), False, 0),
        ((16, 128, 1, 4, 16, 32), False, 128),
        ((64, 128, 1, 1, 4, 64), True, 0),
    ],
)
def test_dependent_kernels_wait_before_they_touch_memory(
    blocks: tuple[int, ...], tiled: bool, counted: int, even: bool, gated: bool
) -> None:
    constants = (*blocks, even, True, False, gated, tiled, True)
    assert_waits_and_reads_wide(code_for_hopper(constants, counted=counted).asm["ptx"], blocks[-1])


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("blocks", [(8, 1024, 1, 4, 1), (32, 128, 2, 16, 16)])
def test_so_does_the_kernel_before_a_norm(blocks: tuple[int, ...], even: bool) -> None:
    """It reads a gain for each of its rows, and a residual for each result, by themselves."""
    code = code_before_a_norm((*blocks, even, True, False, True)).asm["ptx"]
    assert_waits_and_reads_wide(code, blocks[-1], alone=True)


def assert_waits_and_reads_wide(code: str, tokens: int, *, alone: bool = False) -> None:
    """In code for Hopper, which compiles without one. Only lines of the weight are asked for before.

    And they read as many bytes at a time as there are, also where blocks do not divide the columns: rows are
    aligned as the first one is. For one row of x, that wait is for weights that are not read early.
    """
    wide = r"ld\.global\S*evict_first\S*\.v4\.b32" if tokens == 1 else r"cp\.async\.cg"
    assert re.search(wide, code) and (alone or not re.search(r"ld\.global\S*\.b16", code))
    touches = min(found.start() for found in re.finditer(r"(ld|st)\.global|cp\.async", code))
    wait = code.find("griddepcontrol.wait")
    assert 0 < code.find("prefetch.global.L2") < wait < touches
    assert 0 < code.find("griddepcontrol.launch_dependents") < wait
    assert code.count("griddepcontrol.wait") == (2 if tokens == 1 else 1)


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("block", [(2, 2048), (4, 1024), (4, 2048), (8, 2048)])
def test_one_row_reads_a_tile_of_the_weight_before_it_waits(block: tuple[int, int], even: bool) -> None:
    """And nothing else, in the machine's own code. A branch skips the wait before that."""
    one_row = (1, 1, 4, 1, even, True, False)
    for made in (
        code_for_hopper((*block, *one_row, False, False, True), counted=512),
        code_before_a_norm((*block, *one_row[1:], True)),
    ):
        before, ahead, after = sass(made).split("ACQBULK")
        skips = re.search(r"PREEXIT.*@\S+ BRA `\((\S+)\)", before, re.DOTALL)
        assert skips is not None and f"{skips[1]}:" in ahead
        tile = block[0] * block[1] // (8 * 128)  # loads of 16 bytes by each of 128 threads
        assert ahead.count("LDG") == ahead.count("LDG.E.EF.128") == tile
        assert "LDG" not in before and "STG" not in before + ahead and "STG" in after


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
def test_usual_blocks_fit_the_shared_memory_that_is_asked_for(tokens: int) -> None:
    """With what a norm before them or after them takes."""
    found = {
        (usual_config(tokens, rows, columns, gated=gated, processors=count), columns, gated, len(rows) == 1)
        for rows, columns, gated in LAYERS
        for count in (8, 132, 148)
    }
    found |= {
        (config, columns, gated, False)
        for columns in (528, 4096)
        for gated in (False, True)
        for config in (INVARIANT, IN_TILES)
    }
    made = {(c, columns % (c.block_k * c.parts) == 0, *kind) for c, columns, *kind in found if c is not None}
    assert {gated for _, _, gated, _ in made} == {False, True}
    for config, even, gated, alone in made:
        tile, launch = config.tile or tokens, {"num_warps": config.warps, "num_stages": config.stages}
        counted = 0 if config.tile or tokens > MAX_TOKENS else 128
        constants = (*config[:3], config.parts, config.ahead, tile, even, True, True, gated, config.tile > 0)
        codes = [code_for_hopper((*constants, True), counted=counted, **launch)]
        if alone:
            constants = (*config[:2], config.parts, config.ahead, tile, even, True, True, True)
            codes.append(code_before_a_norm(constants, **launch))
        for code in codes:
            assert code.metadata.shared <= SHARED_MEMORY, config
            if tokens > MAX_TOKENS and config.stages == 3:  # two blocks share a multiprocessor of Hopper
                assert 2 * (code.metadata.shared + RESERVED) <= SHARED


@given(st.integers(1, 100), st.integers(1, 5000), st.integers(1, 20000))
def test_candidates_fit_and_are_known_by_name(tokens: int, rows: int, columns: int) -> None:
    for plan in candidates(tokens, rows, columns):
        assert tokens <= MAX_TOKENS and plan.block_n <= rows and plan.block_k * plan.splits <= columns
        assert is_config(" ".join(map(str, plan)))
    assert not is_config("1 2 3") and not is_config("") and not is_config("library")
