"""Linear layers of a few rows: the op, its kernels (compiled or interpreted), what is measured."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from torch import Tensor
from torch.nn import functional

import piecewise_graph as pg
from piecewise_graph.kernels.linear import MAX_TOKENS, KernelConfig, linear_few, linears, swiglu
from piecewise_graph.kernels.linear.kernel_configs import candidates, is_config, usual_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = settings(max_examples=15 if INTERPRETED else 60)
# The interpreter multiplies matrices of bfloat16 as if they were integers.
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


@pytest.mark.slow
@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def operands(tokens: int, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator).to(DEVICE, dtype)
    weight = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(DEVICE, dtype)
    return x, weight, torch.randn(rows, generator=generator).to(DEVICE, dtype)


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
    stages=st.sampled_from([1, 3]),
    parts=st.sampled_from([1, 2]),
)


class TestKernels:
    pytestmark = needs_kernels

    @EXAMPLES
    @given(
        PLANS,
        st.integers(1, 100),
        st.integers(1, 200),
        st.booleans(),
        st.sampled_from(DTYPES),
    )
    def test_one_row(
        self, plan: KernelConfig, rows: int, columns: int, bias: bool, dtype: torch.dtype
    ) -> None:
        x, weight, b = operands(1, rows, columns, dtype)
        assert_right(x, weight, b if bias else None, list(plan))

    @EXAMPLES
    @given(
        PLANS,
        st.integers(2, MAX_TOKENS),
        st.integers(1, 100),
        st.integers(1, 200),
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
        x, weight, bias = operands(tokens, *((64, 2048) if INTERPRETED else (192, 8192)), DTYPES[0])
        plans = candidates(tokens, *weight.shape)
        fitting = [plan for plan in plans[:: 3 if INTERPRETED else 1] if self.fits(x, weight, plan)]
        assert len(fitting) >= 2
        for plan in fitting:
            assert_right(x, weight, bias, list(plan))

    def fits(self, x: Tensor, weight: Tensor, plan: KernelConfig) -> bool:
        """Plans that need more shared memory than there is are passed over when measuring."""
        from triton.runtime.errors import OutOfResources

        try:
            linear_few(x, weight, None, plan)
        except OutOfResources:
            return False
        return True


class TestChoosing:
    """`piecewise::linears`, which code for all sizes calls."""

    pytestmark = needs_kernels

    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Rows and weights of each call of kernels of ours."""
        from piecewise_graph.kernels.linear import linear_launch

        calls, launch = list[tuple[int, int]](), linear_launch.linears_few

        def noted(x: Tensor, weights: list[Tensor], *rest: Any) -> list[Tensor]:
            calls.append((x.shape[-2], len(weights)))
            return launch(x, weights, *rest)

        monkeypatch.setattr(linear_launch, "linears_few", noted)
        return calls

    @EXAMPLES
    @given(
        st.integers(0, 70),
        st.lists(st.sampled_from([1, 2, 17, 64, 256, 512, 520]), min_size=1, max_size=5),
        st.sampled_from([24, 128, 512, 1024, 1152, 2048]),
        st.booleans(),
        st.sampled_from([*DTYPES, torch.float32]),
    )
    def test_they_are_linears(
        self, tokens: int, rows: list[int], columns: int, bias: bool, dtype: torch.dtype
    ) -> None:
        x = operands(tokens, 1, columns, dtype)[0]
        weights, biases = zip(
            *(operands(1, n, columns, dtype, seed)[1:] for seed, n in enumerate(rows)), strict=True
        )
        for each in (x, x[None], torch.stack([x, x], 1)[:, 0]):
            found = linears(each, weights, biases if bias else [None] * len(rows))
            for got, weight, b in zip(found, weights, biases, strict=True):
                expected = functional.linear(each.double(), weight.double(), b.double() if bias else None)
                assert got.dtype == dtype and got.is_contiguous() and got.shape == expected.shape
                torch.testing.assert_close(
                    got.double(), expected, rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype]
                )

    @EXAMPLES
    @given(
        st.integers(0, 70),
        st.sampled_from([1, 2, 17, 64, 512, 520]),
        st.sampled_from([24, 128, 512, 1024, 1152, 2048]),
        st.booleans(),
        st.sampled_from([*DTYPES, torch.float32]),
    )
    def test_swiglu(self, tokens: int, rows: int, columns: int, bias: bool, dtype: torch.dtype) -> None:
        """As exact as the unfused one at least, against float64."""
        x, gate, b0 = operands(tokens, rows, columns, dtype)
        _, up, b1 = operands(1, rows, columns, dtype, 1)
        biases = [b0, b1] if bias else [None, None]

        def unfused(dtype: torch.dtype) -> Tensor:
            g, u = (
                functional.linear(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
                for w, b in zip((gate, up), biases, strict=True)
            )
            return functional.silu(g) * u

        for each in (x, x[None], torch.stack([x, x], 1)[:, 0]):
            found = swiglu(each, [gate, up], biases)
            assert found.dtype == dtype and found.is_contiguous() and found.shape == (*each.shape[:-1], rows)
            expected = unfused(torch.float64)
            if tokens and dtype != torch.float32:
                error, theirs = ((y.double() - expected).abs().max() for y in (found, unfused(dtype)))
                assert error <= 1.5 * theirs + 1e-3
            torch.testing.assert_close(found.double().view_as(expected), expected, rtol=3e-2, atol=6e-2)

    def test_a_swiglu_of_other_shapes_is_torchs(self) -> None:
        x, gate, _ = operands(3, 512, 512, DTYPES[0])
        with pytest.raises(RuntimeError):
            swiglu(x, [gate, gate[:64]], [None, None])
        assert swiglu(x, [gate, gate[:1]], [None, None]).shape == (3, 512)

    @pytest.mark.parametrize("bias", [(), (1,), (1, 512)])
    def test_a_bias_of_another_shape_is_spread(self, bias: tuple[int, ...]) -> None:
        x, weight, _ = operands(1, 512, 512, DTYPES[0])
        b = torch.full(bias, 0.5, dtype=x.dtype, device=x.device)
        expected = functional.linear(x.float(), weight.float(), b.float())
        torch.testing.assert_close(linears(x, [weight], [b])[0].float(), expected, rtol=2e-2, atol=6e-2)

    def test_what_torch_refuses_is_refused(self) -> None:
        x, weight, _ = operands(1, 512, 512, DTYPES[0])
        for others in ((x.view(4, 128), weight), (x, weight.float())):
            with pytest.raises(RuntimeError):
                linears(others[0], [others[1]], [None])
        none = weight[:, :0].contiguous()
        assert linears(x[:, :0].expand(3, 0), [none], [None])[0].eq(0).all()

    def test_few_rows_have_kernels_of_ours(self, served: list[tuple[int, int]]) -> None:
        for tokens in (MAX_TOKENS + 1, MAX_TOKENS, 2, 1, 0):
            x, weight, bias = operands(tokens, 512, 512, DTYPES[0])
            linears(x, [weight, weight], [None, None])
            linears(x, [weight, weight], [None, bias])  # one launch adds all biases or none
            linears(x, [weight.t().contiguous().t()], [None])  # strided weights are the library's
        assert served == [(MAX_TOKENS, 2), (2, 2), (1, 2)]

    def test_compiled_code_of_all_sizes_asks_at_each_call(self, served: list[tuple[int, int]]) -> None:
        _, weight, bias = operands(1, 512, 512, DTYPES[0])
        _, back, _ = operands(1, 512, 512, DTYPES[0], 1)

        def model(x: Tensor) -> Tensor:
            hidden = functional.linear(x, weight, bias).relu()
            return functional.linear(hidden, back) * functional.linear(hidden, weight)

        with torch.no_grad():
            fast = pg.compile(model, capture_sizes=[1, 2, 4, 8], token_dim={"x": 0})
            for tokens in (8, 1, 2, 3, 4, 6, 1, 90):
                x = operands(tokens, 1, 512, DTYPES[0])[0]
                torch.testing.assert_close(fast(x), model(x), rtol=2e-2, atol=6e-2)
        expected = {1, 2, 4, 8} if DEVICE.type == "cuda" else set()
        assert {tokens for tokens, _ in served} >= expected and not any(t > 64 for t, _ in served)
        assert not expected or {members for _, members in served} == {1, 2}


@given(st.integers(1, 64), st.lists(st.integers(1, 4096), min_size=1, max_size=4), st.integers(1, 9000))
def test_usual_blocks_divide_the_columns(tokens: int, rows: list[int], columns: int) -> None:
    for wide in (columns, columns * 128):
        config = usual_config(tokens, rows, wide)
        assert config is None or (wide % config.block_k == 0 and config.splits == 1)
    assert usual_config(tokens, [4096], columns * 512) is not None


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


@pytest.mark.skipif(INTERPRETED, reason="compiled kernels only")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("one_row", (2, 2048, 1, 1, 1)),
        ("one_row", (2, 512, 4, 1, 1)),
        ("few_rows", (64, 128, 1, 1, 16)),
        ("few_rows", (16, 128, 1, 4, 32)),
    ],
)
def test_dependent_kernels_wait_before_they_touch_memory(
    name: str, blocks: tuple[int, ...], gated: bool
) -> None:
    """In code for Hopper, which compiles without one. Only lines of the weight are asked for before.

    And they read as many bytes at a time as there are: rows are aligned as the first one is.
    """
    triton = pytest.importorskip("triton")
    from piecewise_graph.kernels.linear import linear_kernels

    kernel = getattr(linear_kernels, name)
    constants = dict(zip(kernel.arg_names[15:], (*blocks, True, False, gated, True), strict=True))
    types = ["*bf16"] * 10 + ["i32"] * 5 + ["constexpr"] * len(constants)
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(10)}
    source = triton.compiler.ASTSource(
        kernel, dict(zip(kernel.arg_names, types, strict=True)), constexprs=constants, attrs=aligned
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    code = triton.compile(source, target=target, options={"launch_pdl": True}).asm["ptx"]
    wide = r"ld\.global\S*evict_first\S*\.v4\.b32" if name == "one_row" else r"cp\.async\.cg"
    assert re.search(wide, code) and not re.search(r"ld\.global\S*\.b16", code)
    touches = min(found.start() for found in re.finditer(r"(ld|st)\.global|cp\.async", code))
    wait = code.find("griddepcontrol.wait")
    assert 0 < code.find("prefetch.global.L2") < wait < touches
    assert 0 < code.find("griddepcontrol.launch_dependents") < wait


@given(st.integers(1, 100), st.integers(1, 5000), st.integers(1, 20000))
def test_candidates_fit_and_are_known_by_name(tokens: int, rows: int, columns: int) -> None:
    for plan in candidates(tokens, rows, columns):
        assert tokens <= MAX_TOKENS and plan.block_n <= rows and plan.block_k * plan.splits <= columns
        assert is_config(" ".join(map(str, plan)))
    assert not is_config("1 2 3") and not is_config("") and not is_config("library")
