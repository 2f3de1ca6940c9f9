"""`specialize`: code for the exact size of a bucket gives the same results as code for all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from internals import exact_codes, replace_exact_compile, replace_linear_choice, replace_segment_timing
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_grad")

SIZES, EXACT = [1, 4, 8], [1, 4]
DISTINCT = 3  # structures of two blocks: before the first splitting op, between, after the last


class Block(nn.Module):
    """Norm, two linears around a splitting op, a third one with a bias."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 48, bias=False), nn.Linear(48, width, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(x, x.shape[-1:])
        return torch.ops.toy.mix(self.second(torch.nn.functional.silu(self.first(x)))) + x


def model() -> nn.Module:
    import toys  # noqa: F401  registers toy::mix

    torch.manual_seed(3)
    return nn.Sequential(Block(), Block()).eval()


def test_answers_are_those_of_the_model(device: torch.device) -> None:
    module = model().to(device)
    compiled = pg.compile(module, capture_sizes=SIZES, max_tokens=8, token_dim={"input": 0}, specialize=EXACT)
    with pg.counters.expect(specialized=DISTINCT * len(EXACT), not_specialized=0):
        compiled(torch.randn(3, 32, device=device))
    for tokens in (3, 4, 1, 8, 2, 1, 4, 9):
        x = torch.randn(tokens, 32, device=device)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    assert "for exactly 1 tokens" in str(pg.explain(compiled))


@pytest.mark.slow
def test_linears_are_replaced_where_another_kernel_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU no kernel is faster, so the test chooses one; the op's reference computes it."""
    asked = []

    def choose(tokens: int, weight: Tensor, bias: Tensor | None, cache_dir: str | None) -> dict[str, float]:
        asked.append((tokens, tuple(weight.shape), bias is not None))
        return {"16 16 2 4 1": 1.0 if bias is None else 3.0, "library": 2.0}

    replace_linear_choice(monkeypatch, choose)
    module = model()
    compiled = pg.compile(module, capture_sizes=SIZES, max_tokens=8, token_dim={"input": 0}, specialize=EXACT)
    for tokens in (4, 1, 3, 4, 1):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    shapes = {(size, shape, bias) for size in EXACT for shape, bias in (((48, 32), False), ((32, 48), True))}
    assert set(asked) == shapes
    assert "16 16 2 4 1" in str(pg.explain(compiled))


def test_close_calls_are_decided_by_timing_the_whole_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: Any) -> dict[str, float]:
        return {"16 16 2 4 1": 1.0, "library": 1.0}  # which handicaps decide, this way and that

    timed: list[Any] = []

    def microseconds(call: Any) -> float:
        call()
        timed.append(call)
        return 5.0 if len(timed) % 2 else 4.0

    replace_linear_choice(monkeypatch, choose)
    replace_segment_timing(monkeypatch, microseconds)
    module = model()
    compiled = pg.compile(module, capture_sizes=SIZES, max_tokens=8, token_dim={"input": 0}, specialize=[4])
    x = torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    with_linears = DISTINCT - 1
    assert len(timed) == 2 * with_linears
    assert str(pg.explain(compiled)).count("library (1.0 us)") == 2 * with_linears  # the second was faster


def test_code_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(honest: Any, gm: Any, inputs: Sequence[Tensor], **options: bool) -> Any:
        run = honest(gm, inputs, **options)
        return lambda *args: [out * 1.5 for out in run(*args)]

    replace_exact_compile(monkeypatch, wrong)
    module = model()
    compiled = pg.compile(module, capture_sizes=SIZES, max_tokens=8, token_dim={"input": 0}, specialize=[4])
    with pg.counters.expect(specialized=0, not_specialized=DISTINCT):
        compiled(torch.randn(4, 32))
    x = torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    assert "differs" in str(pg.explain(compiled))


def test_code_that_does_not_compile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(original: Any, gm: Any, inputs: Sequence[Tensor], **options: bool) -> Any:
        raise RuntimeError("no such kernel")

    replace_exact_compile(monkeypatch, broken)
    module = model()
    compiled = pg.compile(module, capture_sizes=SIZES, max_tokens=8, token_dim={"input": 0}, specialize=[4])
    with pg.counters.expect(specialized=0, not_specialized=DISTINCT):
        compiled(torch.randn(4, 32))
    assert all("no such kernel" in code.reason for _, code in exact_codes(compiled))
    x = torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [[3], [16], "4", 4, [True, 4], [[4]], {4}, [4.0], None])
def test_sizes_that_are_no_buckets_are_refused(sizes: object) -> None:
    with pytest.raises(ConfigError, match="specialize"):
        pg.PiecewiseConfig(capture_sizes=[1, 4], max_tokens=8, specialize=sizes)  # type: ignore[arg-type]


def test_other_compilers_have_nothing_to_specialize() -> None:
    compiled = pg.compile(
        model(), capture_sizes=SIZES, max_tokens=8, token_dim={"input": 0}, specialize=EXACT, compiler="eager"
    )
    with pg.counters.expect(specialized=0, not_specialized=0):
        compiled(torch.randn(4, 32))


class Scaled(nn.Module):
    """Its factor is an object, another one in each."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        from test_opaque import Table

        self.table = Table(factor)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.toy.mix(torch.ops.pg_test_opaque.scale_table(x + 1, self.table)) + x


class WritesShared(nn.Module):
    """A buffer and a view of it: what is written to one is read from the other."""

    whole: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        base = torch.zeros(48)
        self.register_buffer("whole", base[:48], persistent=False)
        self.register_buffer("part", base[8:40], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.ops.toy.mix(x) + self.part * 10
        self.whole.add_(1)
        return before + self.part * 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(*map(Scaled, (2.0, -3.0, 0.5))), "reads_an_object"),
        (WritesShared, "runs_uncompiled"),
    ],
    ids=["objects", "shared memory"],
)
def test_what_differs_from_segment_to_segment_has_no_exact_code(make: Any, reason: str) -> None:
    module, other = make(), make()
    name = "x" if isinstance(module, WritesShared) else "input"
    compiled = pg.compile(module, capture_sizes=SIZES, max_tokens=8, token_dim={name: 0}, specialize=[4])
    for tokens in (4, 4, 3, 4, 8):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(compiled(x), other(x), rtol=1e-4, atol=1e-4)
    assert f"not used: {reason}" in str(pg.explain(compiled))


@pytest.mark.slow
def test_code_for_a_count_is_not_for_another_size_of_that_number() -> None:
    """Two lengths, of which one alone is a segment's: 8 may be the other one."""
    weight = torch.randn(1, 8, 8)

    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        attend = torch.nn.functional.scaled_dot_product_attention
        first, second = attend(weight * x.shape[1], x, x), attend(weight * y.shape[1], y, y)
        return attend(x, x, x), first, second

    options = {"capture_sizes": [4, 8, 16], "max_tokens": 16, "specialize": [8]}
    compiled = torch.compile(forward, backend="piecewise", options=options)
    for lengths in ((5, 3), (8, 3), (8, 3), *[(8, 4)] * 4, *[(4, 8)] * 3):
        inputs = [torch.randn(1, length, 8) for length in lengths]
        for found, expected in zip(compiled(*inputs), forward(*inputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_parts_that_overlap_are_copied() -> None:
    """Also where one counts its start from the end; an op writes one of them."""
    linear = nn.Linear(8, 8)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = linear(x)
        part, whole = torch.narrow(y, -1, -4, 4).clone(), torch.narrow(y, -1, 0, 8).clone()
        torch.ops.toy.halve(part)
        return part + 1, whole + 1

    compiled = pg.compile(forward, capture_sizes=SIZES, max_tokens=8, token_dim={"x": 0}, specialize=[1])
    for tokens in (4, 1, 1, 4):
        x = torch.randn(tokens, 8)
        for found, expected in zip(compiled(x), forward(x), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_decode_steps_on_a_gpu(bias: bool) -> None:
    """bfloat16, and sizes for which our kernels are candidates."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(1024, 4096, bias=bias), nn.Linear(4096, 1024, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.down(torch.nn.functional.silu(self.up(torch.nn.functional.rms_norm(x, (1024,)))))
            return torch.ops.toy.mix(x) + x

    import toys  # noqa: F401

    module = Wide().to("cuda", torch.bfloat16).eval()
    compiled = pg.compile(
        module, capture_sizes=[1, 8, 32, 64], max_tokens=64, token_dim={"x": 0}, specialize=[1, 32]
    )
    for tokens in (1, 8, 32, 5, 1, 8, 32, 30, 64):
        x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
        with pg.counters.expect(not_specialized=0):
            found = compiled(x)
        torch.testing.assert_close(found, module(x), rtol=5e-2, atol=5e-2)
    assert {size for size, code in exact_codes(compiled) if code.run} == {1, 32}
