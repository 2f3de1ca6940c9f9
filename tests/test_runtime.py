"""What holds across calls: ownership of outputs, addresses of weights, pools, threads, global state."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from internals import fail_capture, state, tape, traces
from torch import Tensor, nn
from toys import WIDTH, Blocks, assert_same, check, compiled, define, fallbacks, new_pool, ops, rows, watching

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, CaptureError, GraphPoolError

HOOK: list[Any] = [lambda x: x]


def call_hook(x: Tensor) -> Tensor:
    return HOOK[0](x)


define("call_back(Tensor x) -> Tensor", call_hook, torch.empty_like)
pg.register_splitting_op("toy::call_back")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model(device: torch.device) -> Blocks:
    return Blocks().to(device)


def through_pg(model: nn.Module, **options: Any) -> Any:
    return compiled(model, **options)


def through_torch(model: nn.Module, **options: Any) -> Any:
    options = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8, **options}
    return torch.compile(model, backend="piecewise", dynamic=True, options=options)


BOTH = pytest.mark.parametrize("entry", [through_pg, through_torch])


# --- outputs ------------------------------------------------------------------------------------------


@BOTH
def test_kept_outputs_stay_right(entry: Any, model: Blocks, device: torch.device) -> None:
    fast = entry(model)
    inputs = [rows(count, device) for count in (3, 3, 4, 2, 8, 3, 6)]
    outputs = [fast(x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        assert_same(output, model(x))


def test_static_outputs_are_overwritten_by_the_next_replay(model: Blocks, device: torch.device) -> None:
    fast = compiled(model, outputs="static")
    first, second = rows(3, device), rows(3, device)
    fast(first)
    kept = fast(first)
    assert_same(kept, model(first))
    again = fast(second)
    assert kept.data_ptr() == again.data_ptr()
    assert_same(kept, model(second))


def test_copied_outputs_are_nobody_elses_memory(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    fast(x)
    fast(x).fill_(float("nan"))
    assert_same(fast(x), model(x))


def test_padded_call_returns_the_live_rows_only(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    for count in (4, 3, 1):
        fast(rows(count, device))
        assert fast(rows(count, device)).shape == (count, WIDTH)


def test_callers_input_is_not_written(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    before = x.clone()
    for _ in range(3):
        fast(x)
    assert torch.equal(x, before)


def test_input_of_other_strides_is_read_right(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    for count in (3, 3, 5, 5):
        x = torch.randn(WIDTH, count, device=device).t()
        assert_same(fast(x), model(x))
        wide = torch.randn(count, 2 * WIDTH, device=device)[:, ::2]
        assert_same(fast(wide), model(wide))


def test_bucket_leaves_nothing_of_a_longer_call_behind(device: torch.device) -> None:
    """5 tokens after 8 in one bucket: the tail of the longer call must not be seen."""
    model = Blocks().to(device)
    fast = compiled(model, capture_sizes=[8])
    for count in (8, 8, 5, 8, 1):
        x = rows(count, device) * 1e3
        assert_same(fast(x), model(x))


# --- weights ------------------------------------------------------------------------------------------


@BOTH
def test_moved_weight_raises_and_names_it(entry: Any, model: Blocks, device: torch.device) -> None:
    fast = entry(model)
    x = rows(3, device)
    fast(x), fast(x)
    weight = model.linears[1].weight
    old = weight.data
    weight.data = old.clone()
    with pytest.raises(AddressMovedError, match=r"linears.*1.*weight"):
        fast(x)
    weight.data = old
    assert_same(fast(x), model(x))


@BOTH
def test_reset_recovers_from_a_moved_weight(entry: Any, model: Blocks, device: torch.device) -> None:
    fast = entry(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.linears[0].weight.data = torch.randn(WIDTH, WIDTH, device=device)
    pg.reset()
    with pg.counters.expect(tapes=1, replays=1, traces=0):
        assert_same(fast(x), model(x))
        assert_same(fast(x), model(x))


def test_weight_moved_before_another_buckets_capture_raises_too(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    fast(rows(3, device))
    model.linears[0].weight.data = model.linears[0].weight.data.clone()
    with pytest.raises(AddressMovedError, match="linears"):
        fast(rows(8, device))


def test_weight_updated_in_place_is_seen(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.linears[0].weight.copy_(torch.randn(WIDTH, WIDTH, device=device))
    assert_same(fast(x), model(x))


def test_state_dict_loaded_after_capture_is_seen(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.load_state_dict(Blocks().to(device).state_dict())
    assert_same(fast(x), model(x))


def test_old_weight_stays_alive_while_it_is_captured(model: Blocks, device: torch.device) -> None:
    """With check="off" a swapped weight is read at its old address, never at freed memory."""
    fast = compiled(model, check="off")
    x = rows(3, device)
    wanted = fast(x)
    model.linears[0].weight.data = torch.full((WIDTH, WIDTH), float("nan"), device=device)
    gc.collect()
    filler = [torch.full((WIDTH, WIDTH), float("nan"), device=device) for _ in range(64)]
    assert_same(fast(x), wanted)
    assert filler


def test_replaced_parameter_object_is_right(model: Blocks, device: torch.device) -> None:
    """Dynamo sees another Parameter object; the answer follows the new one, or the call raises."""
    fast = compiled(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.linears[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    try:
        found = fast(x)
    except AddressMovedError:
        pg.reset()
        found = fast(x)
    assert_same(found, model(x))


# --- padding proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [torch.zeros(4, WIDTH), torch.ones(1, WIDTH)])
def test_proof_of_padding_does_not_trust_degenerate_values(first: Tensor, device: torch.device) -> None:
    """On zeros `x / T` is the same at every size. Warm-up inputs often are zeros, and so is the centred
    value of a lone token; the verdict must not be formed from them alone."""

    def model(x: Tensor) -> Tensor:
        return ops.mix(ops.mix(x) / x.shape[0]) + 1

    fast = compiled(model)
    fast(first.to(device))
    for count in (8, 6, 6, 3, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


# --- pools --------------------------------------------------------------------------------------------


def test_two_models_of_one_pool_interleaved_stay_right(device: torch.device) -> None:
    pool = new_pool()
    models = [Blocks(2).to(device), Blocks(3).to(device)]
    fast = [compiled(model, pool=pool) for model in models]
    kept = []
    for count in (3, 8, 3, 8, 4, 6, 3):
        for model, call in zip(models, fast, strict=True):
            x = rows(count, device)
            kept.append((call(x), model(x)))
    for found, wanted in kept:
        assert_same(found, wanted)


def test_two_engines_one_torn_down_leaves_the_other_right(device: torch.device) -> None:
    pool = new_pool()
    stays, goes = Blocks(2).to(device), Blocks(3).to(device)
    fast, doomed = compiled(stays, pool=pool), compiled(goes, pool=pool)
    x = rows(3, device)
    for call in (fast, doomed, fast, doomed):
        call(x)
    del doomed, goes
    gc.collect()
    with pg.counters.expect(replays=1, tapes=0):
        assert_same(fast(x), stays(x))


def test_release_of_one_pool_leaves_other_pools_alone(device: torch.device) -> None:
    pools = [new_pool(), new_pool()]
    model = Blocks().to(device)
    fast = [compiled(model, pool=pool) for pool in pools]
    x = rows(3, device)
    for call in fast:
        call(x)
    pools[0].release()
    with pg.counters.expect(replays=1, tapes=1):
        assert_same(fast[0](x), model(x))  # captures again
        assert_same(fast[1](x), model(x))  # replays


def test_release_gives_everything_back_and_the_pool_can_be_used_again(
    model: Blocks, device: torch.device
) -> None:
    pool = new_pool()
    fast = compiled(model, pool=pool)
    x = rows(3, device)
    fast(x), fast(x)
    pool.release()
    assert pool.device is None
    assert pool.bytes() == 0
    assert pg.explain(fast).traces[0].buckets == ()
    assert pg.explain(fast).buffer_bytes == 0
    with pg.counters.expect(traces=0, compiles=0, tapes=1, replays=1):
        assert_same(fast(x), model(x))
        assert_same(fast(x), model(x))


def test_release_after_pg_capture_runs_compiled(model: Blocks, device: torch.device) -> None:
    """Sealed by pg.capture: nothing is captured behind the caller's back."""
    pool = new_pool()
    fast = compiled(model, pool=pool, capture="explicit")
    pg.capture(fast, lambda n: rows(n, device), progress=False)
    pool.release()
    with pg.counters.expect(tapes=0, **{"fallbacks:not_captured": 1}):
        fast(rows(3, device))


def test_release_twice_and_of_an_unused_pool_is_harmless() -> None:
    pool = pg.GraphPool()
    pool.release()
    pool.release()
    assert pool.bytes() == 0


@pytest.mark.parametrize("warm", [0, 1], ids=["while capturing", "while replaying"])
def test_release_inside_a_forward_is_refused(warm: int, device: torch.device) -> None:
    pool = new_pool()
    model = torch.ops.toy.call_back
    fast = compiled(lambda x: model(x * 2) + 1, pool=pool)
    x = rows(3, device)
    HOOK[0] = lambda x: x + 0
    for _ in range(warm):
        fast(x)

    def release(x: Tensor) -> Tensor:
        pool.release()
        return x + 0

    HOOK[0] = release
    with pytest.raises(GraphPoolError, match="between forwards"):
        fast(x)
    HOOK[0] = lambda x: x + 0
    for _ in range(2):
        assert_same(fast(x), x * 2 + 1)


@pytest.mark.gpu
def test_pool_serves_one_device_only(device: torch.device) -> None:
    pool = pg.GraphPool()
    compiled(Blocks().to(device), pool=pool)(rows(3, device))
    with pytest.raises(GraphPoolError, match=r"(?s)cuda.*cpu"):
        compiled(Blocks(), pool=pool)(rows(3, torch.device("cpu")))


def test_pool_joined_by_two_devices_is_refused() -> None:
    class Owner:
        def drop_graphs(self) -> None: ...

    owner, pool = Owner(), pg.GraphPool()
    pool.join(torch.device("cpu"), owner)
    with pytest.raises(GraphPoolError, match=r"(?s)cpu.*meta"):
        pool.join(torch.device("meta"), owner)


@pytest.mark.gpu
def test_graphs_of_smaller_buckets_reuse_the_memory_of_the_largest(device: torch.device) -> None:
    model = Blocks(4, width=512).to(device)
    sizes = [64, 128, 256, 512]
    fast = compiled(model, capture_sizes=sizes, max_tokens=512)
    report = pg.capture(fast, lambda n: rows(n, device, 512), progress=False)
    assert [bucket.graph_bytes for bucket in report.captured[1:]] == [0, 0, 0]


# --- lifetimes ----------------------------------------------------------------------------------------


def test_deleted_model_frees_its_graphs(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    fast(rows(3, device))
    recorded = weakref.ref(tape(fast, 4))
    del fast
    gc.collect()
    assert recorded() is None


def test_deleted_model_and_weights_are_collected(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    fast(rows(3, device))
    weight = weakref.ref(model.linears[0].weight)
    shared = weakref.ref(state(fast))
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None
    assert shared() is None


def live_tensors() -> tuple[int, int]:
    """(Python tensors, bytes of device memory) alive now."""
    gc.collect()
    count = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
    return count, torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@pytest.mark.filterwarnings("ignore")  # looking at every object wakes deprecated ones
def test_release_and_rebuild_does_not_leak(device: torch.device) -> None:
    pool = new_pool()
    fast = compiled(Blocks(2, width=64).to(device), pool=pool)
    x = rows(8, device, 64)
    seen = []
    for _ in range(6):
        fast(x), fast(x)
        pool.release()
        seen.append(live_tensors())
    assert seen[-1] == seen[1]


def test_rebuilt_models_do_not_pile_up(device: torch.device) -> None:
    made: list[Any] = []
    for _ in range(5):
        fast = compiled(Blocks().to(device))
        fast(rows(3, device))
        made += [weakref.ref(one) for one in traces(fast)]
        del fast
        torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in made] == [None] * 5


# --- threads and global state -------------------------------------------------------------------------


def test_two_threads_call_one_model(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    for count in (4, 8):
        fast(rows(count, device))
    work = {t: [rows(count, device) for count in (3, 8, 4, 6) * 10] for t in range(2)}
    wanted = {t: [model(x) for x in xs] for t, xs in work.items()}
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    errors: list[BaseException] = []

    def serve(t: int) -> None:
        try:
            with torch.no_grad():
                for x in work[t]:
                    found[t].append(fast(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(t,)) for t in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for t in work:
        assert_same(found[t], wanted[t])


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_left_as_it_was(enabled: bool, model: Blocks, device: torch.device) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        fast = compiled(model)
        fast(rows(3, device))
        pg.capture(fast, lambda n: rows(n, device), progress=False)
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was else gc.disable()


def test_collector_is_on_again_after_a_failed_capture(
    model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, RuntimeError("broken"))
    compiled(model)(rows(3, device))
    assert gc.isenabled()


def test_callers_random_state_is_untouched_by_compile_and_capture(
    model: Blocks, device: torch.device
) -> None:
    x = rows(3, device)
    states = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        states.append(torch.cuda.get_rng_state())
    fast = compiled(model)
    for _ in range(3):
        fast(x)
    pg.capture(fast, lambda n: x.new_ones(n, WIDTH), progress=False)
    found = [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state()] if torch.device(device).type == "cuda" else []
    )
    for before, after in zip(states, found, strict=True):
        assert torch.equal(before, after)


def test_grad_and_inference_mode_of_the_caller_stay(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    with torch.inference_mode():
        for _ in range(3):
            fast(rows(3, device))
        assert torch.is_inference_mode_enabled()
    assert not torch.is_grad_enabled()


def test_modes_may_alternate(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        for count in (3, 8):
            with mode():
                x = rows(count, device)
                assert_same(fast(x), model(x))


# --- failures of capture ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("stream is broken"), "RuntimeError: stream is broken"),
        (torch.OutOfMemoryError("wanted 12 GiB"), "out of memory while capturing 4 tokens: wanted 12 GiB"),
    ],
)
def test_failed_capture_costs_its_bucket_only(
    error: Exception, shown: str, model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, error, at=4)
    fast = compiled(model)
    with pg.counters.expect(failed_captures=1, tapes=1, replays=1, **{"fallbacks:capture_failed": 2}):
        for count in (3, 3, 2, 8, 8):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    trace = pg.explain(fast).traces[0]
    assert list(trace.failed) == [4]
    assert trace.failed[4].startswith(shown)
    assert shown in str(pg.explain(fast))
    assert [bucket.tokens for bucket in trace.buckets] == [8]
    assert fallbacks(fast) == {"capture_failed": 2}


def test_out_of_memory_says_what_to_set() -> None:
    assert "max_tokens or capture_sizes" in CaptureError.out_of_memory(4, "cause")


def test_reset_tries_a_failed_bucket_again(
    model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compiled(model)
    with monkeypatch.context() as broken:
        fail_capture(broken, RuntimeError("broken"))
        fast(rows(3, device))
    pg.reset()
    with pg.counters.expect(tapes=1, replays=1, fallbacks=0):
        fast(rows(3, device)), fast(rows(3, device))


def test_op_that_raises_while_its_bucket_is_rehearsed_leaves_the_model_usable(device: torch.device) -> None:
    fast = compiled(lambda x: torch.ops.toy.call_back(x * 2) + 1)
    x = rows(3, device)

    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError("from the op")

    HOOK[0] = broken
    with pytest.raises(ZeroDivisionError, match="from the op"):
        fast(x)
    HOOK[0] = lambda x: x + 0
    with pg.counters.expect(tapes=1, replays=1):
        assert_same(fast(x), x * 2 + 1)
        assert_same(fast(x), x * 2 + 1)


# --- the rest -----------------------------------------------------------------------------------------


def test_graphs_off_runs_segments_only(model: Blocks, device: torch.device) -> None:
    with pg.counters.expect(tapes=0, captures=0, replays=0, **{"fallbacks:cuda_graphs_off": 3}):
        check(model, device, counts=(3, 3, 9), cuda_graphs="off")


def test_dynamo_reset_drops_graphs_and_traces_anew(model: Blocks, device: torch.device) -> None:
    fast = through_torch(model)
    x = rows(3, device)
    fast(x)
    torch._dynamo.reset()
    with pg.counters.expect(traces=1, tapes=1):
        assert_same(fast(x), model(x))


def test_each_replay_runs_each_op_once_at_the_live_count(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    layers = 2
    for count in (3, 3, 2, 8, 5, 9):
        with watching() as seen:
            fast(rows(count, device))
            assert [call.tokens for call in seen] == [count] * layers
