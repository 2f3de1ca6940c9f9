"""The mutants of `make mutants`: mostly the second instance of a property, such as a second key or trace."""

from __future__ import annotations

from mutants import Mutant

PG, EAGLE, METADATA, ATTENTION = (
    "piecewise_graph",
    "piecewise_graph/eagle",
    "custom_ops/metadata",
    "custom_ops/attention",
)

MUTANTS = [
    Mutant(
        "constants of the forward context are compared without their type",
        f"{PG}/runtime/captured_context.py",
        "    if type(found) is not type(captured):\n        return False\n",
        "",
        "tests/test_full_graph_context.py -k equal_numbers",
    ),
    Mutant(
        "tensors of the forward context are compared without their strides",
        f"{PG}/runtime/captured_context.py",
        "tensor.shape, tensor.stride(), tensor.dtype",
        "tensor.shape, tensor.dtype",
        "tests/test_full_graph_context.py -k another_view",
    ),
    Mutant(
        "a plan is kept after a later trace",
        f"{PG}/runtime/budget.py",
        " and plan.traces == len(state.traces)",
        "",
        "tests/test_graph_budget.py -k come_later",
    ),
    Mutant(
        "weights are always where graphs read them",
        f"{PG}/runtime/bound_addresses.py",
        "return self._known is None or self._found(args) == self._known",
        "return True",
        "tests/test_freeze_refusals.py -k rebind",
    ),
    Mutant(
        "a splitting op two higher-order ops deep is not seen",
        f"{PG}/splitter/split.py",
        "        _refuse_hidden_ops(inner)\n",
        "",
        "tests/test_splitter_steps.py -k two_levels",
    ),
    Mutant(
        "frozen calls of two graph keys are one",
        f"{PG}/frontend/freeze.py",
        "context.full_graph, context.graph_key)",
        "context.full_graph)",
        "tests/test_freeze.py -k two_keys",
    ),
    Mutant(
        "a frozen call leaves stale rows to a padded op",
        f"{PG}/frontend/frozen_call.py",
        "        if self._padding:\n            torch._foreach_zero_(self._padding)\n",
        "",
        "tests/test_freeze.py -k padded_op",
    ),
    Mutant(
        "`step` returns aborted requests",
        f"{EAGLE}/serving/engine.py",
        "if request.finished and not request.aborted:",
        "if request.finished:",
        "tests/test_engine_requests.py -k aborted",
    ),
    Mutant(
        "an aborted request gets its first token",
        f"{EAGLE}/rounds/round_launch.py",
        "if not started.aborted:",
        "if started:",
        "tests/test_engine_requests.py -k aborted",
    ),
    Mutant(
        "a bound metadata op is not checked on a CPU",
        f"{METADATA}/op_dispatch.py",
        "        self.check(flat)\n        return partial",
        "        return partial",
        "tests/test_metadata_ops.py -k binding",
    ),
    Mutant(
        "a draft that catches up reads features that were overwritten",
        f"{EAGLE}/rounds/prefill.py",
        "(max(r.progress.num_drafted, r.length - kept), r.length)",
        "(r.progress.num_drafted, r.length)",
        "tests/test_eagle_loop.py -k catches_up",
    ),
    Mutant(
        "the KV write of one batch serves another with other slots",
        f"{ATTENTION}/kv_write.py",
        "tensors = batch.slot_mapping, batch.kv_cache.k[call.layer], mask",
        "tensors = batch.kv_cache.k[call.layer], mask",
        "tests/test_kv_write.py",
    ),
]
