"""What bench_profile makes of the kernels of a replay."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from benchmarks.bench_profile import parts_of, products
from benchmarks.idle_time import Event

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
LAYER = [("q", 8192), ("k", 4096), ("v", 4096), ("o", 8192), ("gate", 16384), ("up", 16384), ("down", 16384)]


def kernel(name: str, us: float) -> Event:
    return {"name": name, "dur": us}


def a_step(us: float, rotary: bool = False) -> list[Event]:
    layer = [
        *(kernel("nvjet_a", us) for _ in "qkv"),
        kernel("attend_kernel", 5.0),
        kernel("combine", 1.0),
        kernel("nvjet_splitK", us),
        kernel("cublasLt::splitKreduce_kernel", 2.0),
        *(kernel("few_rows", us) for _ in ("gate", "up", "down")),
        kernel("triton_red_norm", 3.0),
    ]
    first = [kernel("sgemm", 4.0)] if rotary else []
    return [*first, *layer, *layer, kernel("gemv2T", us)]


def test_weights_are_those_of_the_layers_in_order() -> None:
    assert products(CONFIG, together=False) == [*LAYER, *LAYER, ("head", 65536)]
    joined = [("q k v", 16384), ("o", 8192), ("gate up", 32768), ("down", 16384)]
    assert products(CONFIG, together=True) == [*joined, *joined, ("head", 65536)]


def test_linears_of_one_input_are_one_product() -> None:
    steps = [[kernel("few_rows", us) for _ in range(9)] for us in (9.0, 10.0, 30.0)]
    rows = {row["part"]: row for row in parts_of(steps, CONFIG, batch=3)}
    assert list(rows) == ["q k v", "o", "gate up", "down", "head"]
    assert rows["gate up"]["us"] == 20.0 and rows["gate up"]["MB"] == pytest.approx(2 * 0.032768)


@pytest.mark.parametrize("rotary", [False, True])
def test_the_nth_product_reads_the_nth_weight(rotary: bool) -> None:
    steps = [a_step(us, rotary) for us in (9.0, 10.0, 30.0)]
    rows = {(row["part"], row["kernel"]): row for row in parts_of(steps, CONFIG, batch=3)}
    for part, size in LAYER:
        (row,) = (row for (name, _), row in rows.items() if name == part)
        assert row["launches"] == 2 and row["us"] == 20.0 and row["MB"] == pytest.approx(2 * size / 1e6)
    assert rows["head", "gemv2T"]["MB"] == pytest.approx(0.065536)
    assert rows["attention", "attend_kernel"]["MB"] == pytest.approx(2 * 4 * 3 * 128 * 2 * 16 / 1e6)
    assert rows["attention", "combine"]["MB"] == 0
    assert rows["other", "cublasLt::splitKreduce_kernel"]["us"] == 4.0
    assert (("rotary angles", "sgemm") in rows) == rotary
    assert sum(row["launches"] for row in rows.values()) == len(steps[0])


def test_kernels_that_cannot_be_told_apart_are_named() -> None:
    with pytest.raises(
        RuntimeError, match=r"14 matrix products, \[9, 15\] weights; kernels: .*attend_kernel"
    ):
        parts_of([a_step(1.0)[:-1]], CONFIG, batch=1)
