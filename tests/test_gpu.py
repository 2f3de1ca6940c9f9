"""What only a GPU shows: streams, pool memory, failed captures, captures inside captures."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import piecewise_graph as pg

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    """Linear, attention, linear: two segments and one splitting op."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.inner(x)[None]
        return self.outer(scaled_dot_product_attention(q, q, q)[0])


class FailsInCapture(Attention):
    """Reads a value back to the host inside a custom op, which no capture allows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.gpu_tests.host_sync(super().forward(x))


class FailsTwice(Attention):
    """Two such ops, and one between them that a graph can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.gpu_tests.host_sync(super().forward(x))
        return torch.ops.gpu_tests.host_sync(y.relu())


@pytest.fixture(scope="module", autouse=True)
def _library():
    library = torch.library.Library("gpu_tests", "FRAGMENT")
    library.define("host_sync(Tensor x) -> Tensor")
    library.impl("host_sync", lambda x: (x.cpu(), x * 2)[1], "CUDA")
    torch.library.register_fake("gpu_tests::host_sync", torch.empty_like, lib=library)
    yield
    library._destroy()


def build(kind=Attention, **options):
    torch.manual_seed(0)
    model = kind().cuda()
    return model, pg.compile(model, token_dim={"x": 0}, compiler="eager", **{"max_tokens": 32, **options})


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 256, device="cuda")


@torch.no_grad()
def test_graphs_are_replayed_on_a_gpu():
    model, compiled = build()
    with pg.counters.expect(tapes=1, captures=2, replays=3, fallbacks=0):
        for tokens in (7, 5, 8, 6):
            x = inputs(tokens)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert pg.explain(compiled).pool_bytes > 0


@torch.no_grad()
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_call_is_ordered_with_the_callers_stream(own_stream):
    """The input is still being computed at the call, and is overwritten right after it."""
    model, compiled = build()
    slow = torch.randn(4096, 4096, device="cuda")
    x = inputs(16)
    compiled(x)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            source = inputs(16)
            expected = model(source)
            for _ in range(5):
                slow = torch.mm(slow, slow) * 1e-4
            x.copy_(source + slow[0, 0] * 0)
            found = compiled(x)
            x.fill_(float("nan"))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_kept_outputs_survive_later_calls_on_the_default_stream():
    model, compiled = build()
    batches = [inputs(8) for _ in range(50)]
    kept = [compiled(x) for x in batches]
    for x, output in zip(batches, kept, strict=True):
        torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_an_op_whose_capture_fails_runs_between_graphs_and_nothing_else_breaks():
    model, compiled = build(FailsInCapture, padding="tried")  # else the op, which has no rule, is cut out
    with pg.counters.expect(failed_captures=0, tapes=1, replays=2, fallbacks=0):
        for tokens in (5, 6, 7):
            x = inputs(tokens)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    [why] = pg.explain(compiled).traces[0].padding.values()
    assert "gpu_tests::host_sync (its capture fails: " in why
    torch.rand(3, device="cuda")  # the generator is not left in capture state
    other, other_compiled = build()
    x = inputs(6)
    other_compiled(x)
    with pg.counters.expect(replays=1):
        torch.testing.assert_close(other_compiled(x), other(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_ops_that_fail_in_one_segment_are_told_from_those_between_them():
    model, compiled = build(FailsTwice, padding="tried")
    with pg.counters.expect(failed_captures=0, tapes=1, replays=2, fallbacks=0):
        for tokens in (5, 6, 7):
            x = inputs(tokens)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    told = "; ".join(pg.explain(compiled).traces[0].padding.values())
    assert "gpu_tests::host_sync (its capture fails: " in told
    assert "relu" not in told


@pytest.mark.parametrize("read", [torch.Tensor.cpu, torch.Tensor.item, repr], ids=["copy", "item", "print"])
def test_a_pool_serves_after_captures_that_failed(read):
    pool, x, y = pg.GraphPool(), torch.ones(1, device="cuda"), torch.ones(1, device="cuda")
    before = pool.capture_call(lambda: y.mul_(2), device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            pool.capture_call(lambda: read(x + 1), device="cuda")
    double = pool.capture_call(lambda: x.mul_(2), device="cuda")
    double()
    before()
    assert (x.item(), y.item()) == (4, 4)  # doubled as a warm-up and by the replay; a capture runs nothing
    torch.rand(3, device="cuda")  # the generator is not left in capture state
    assert pool.bytes() > 0
    pool.release()
    assert pool.bytes() == 0


@torch.no_grad()
def test_a_callers_own_capture_passes_through():
    model, compiled = build()
    x = inputs(8)
    compiled(x)
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with (
        pg.counters.expect(replays=0, **{"fallbacks:captured_by_caller": 1}),
        torch.cuda.graph(graph),
    ):
        output = compiled(x)
    x.copy_(inputs(8))
    graph.replay()
    torch.testing.assert_close(output, model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_smaller_buckets_reuse_the_memory_of_the_largest():
    _, compiled = build(max_tokens=512)
    with torch.no_grad():
        report = pg.capture(compiled, inputs, sizes=[512, 256, 128, 64, 32], progress=False)
    largest, *rest = (bucket.graph_bytes for bucket in report.captured)
    assert largest > 0
    assert sum(rest) <= largest * 0.25


@torch.no_grad()
def test_release_gives_the_memory_back():
    def cycle() -> int:
        pool = pg.GraphPool()
        _, compiled = build(pool=pool, max_tokens=512)
        compiled(inputs(512))
        assert pool.bytes() > 0
        pool.release()
        assert pool.bytes() == 0
        del compiled
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    cycle()
    before = cycle()
    after = [cycle() for _ in range(5)]
    assert max(after) <= before


@torch.no_grad()
def test_a_pool_serves_one_device():
    """A model on the CPU leaves the GPU's pool alone; its stand-ins take one of their own."""
    pool = pg.GraphPool()
    _, compiled = build(pool=pool)
    compiled(inputs(4))
    taken = pool.bytes()
    model = Attention()
    cpu = pg.compile(model, token_dim={"x": 0}, compiler="eager", pool=pool)
    x = torch.randn(4, 256)
    for _ in range(2):
        torch.testing.assert_close(cpu(x), model(x))
    assert pool.bytes() == taken


@torch.no_grad()
def test_an_input_left_on_the_cpu_is_named():
    _, compiled = build()
    with pytest.raises(pg.errors.TraceError, match="'x' is on cpu"):
        compiled(torch.randn(4, 256))


@torch.no_grad()
def test_poison_shows_no_stale_read_on_a_gpu():
    model, compiled = build(pool=pg.GraphPool(poison=True))
    for tokens in (8, 5, 8, 3, 7):
        x = inputs(tokens)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
