"""The error catalogue.

Every error that a user can cause says what happened, where (input, segment, bucket or op), and what to do.
All messages of the core are built here. Every error derives from `PiecewiseError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from piecewise_graph.reasons import remedy


class PiecewiseError(Exception):
    """Base class: catch this to catch everything that the library raises on purpose."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  What to do: {remedy}")
        self.what = what
        self.remedy = remedy


# What each option takes, those with a choice of words apart.
_EXPECTED = {
    "batch_dim": 'the batch dimension of an argument, such as {"input_ids": 0}',
    "batch_sizes": "a list of numbers of requests, from 1 up, such as [1, 2, 4, 8], or None",
    "cache_dir": "the path of a folder, or None",
    "capture_sizes": "a list of token counts, whole numbers from 1 up, such as [1, 2, 4, 8], or None",
    "max_graph_bytes": "a whole number of bytes from 1 up, or None",
    "max_tokens": "a whole number from 1 up",
    "merge_linears": "True or False",
    "pool": "a pg.GraphPool() or None",
    "rank_timeout": "a number of seconds above 0",
    "specialize": "a list of capture sizes",
}


class ConfigError(PiecewiseError, ValueError):
    """An option has an unknown name or a value that cannot work."""

    @classmethod
    def unknown_option(cls, name: str, known: Iterable[str]) -> ConfigError:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return cls(f"unknown option {name!r}.", f"{hint}Known options: {', '.join(known)}.")

    @classmethod
    def bad_value(cls, name: str, value: object, choices: Sequence[str] = ()) -> ConfigError:
        expected = f"one of {', '.join(map(repr, choices))}" if choices else _EXPECTED[name]
        return cls(f"option {name}={value!r} cannot work.", f"pass {expected}.")

    @classmethod
    def above_max_tokens(cls, sizes: Sequence[int], max_tokens: int) -> ConfigError:
        what = f"option capture_sizes={sizes!r} cannot work."
        return cls(what, f"pass sizes up to max_tokens={max_tokens}, or raise max_tokens.")

    @classmethod
    def no_capture_sizes(cls, specialize: Sequence[int], sizes: Sequence[int]) -> ConfigError:
        what = f"option specialize={specialize!r} cannot work."
        return cls(what, f"pass sizes out of the capture sizes {tuple(sizes)}.")

    @classmethod
    def mode_given(cls, mode: str) -> ConfigError:
        what = f"torch.compile was given mode={mode!r}, which backend 'piecewise' does not have."
        return cls(what, "leave mode out and pass options={...}; PiecewiseConfig lists them.")


class SplittingOpError(PiecewiseError):
    """An op cannot be a splitting op, or did something that its schema or fake denies."""

    @classmethod
    def bad_name(cls, name: str) -> SplittingOpError:
        what = f"{name!r} does not name an op."
        return cls(what, "write it as 'namespace::name', for example 'mylib::attention'.")

    @classmethod
    def no_effect(cls, name: str, schema: str) -> SplittingOpError:
        return cls(
            f"{name!r} returns nothing and declares no argument that it writes: {schema}. "
            "Such a schema cannot be true, and the compiler may drop the call.",
            "declare what it writes, for example 'Tensor(a!) out', or return the result.",
        )

    @classmethod
    def returns_alias(cls, name: str, schema: str) -> SplittingOpError:
        what = f"{name!r} returns an alias of one of its arguments: {schema}."
        return cls(what, "return a fresh tensor, or write into an 'out' argument and return nothing.")

    @classmethod
    def undeclared_write(cls, op: str, argument: str) -> SplittingOpError:
        what = f"splitting op {op} wrote into its argument {argument!r}, which its schema does not declare."
        return cls(what, f"declare it as 'Tensor(a!) {argument}' in the op's schema.")

    @classmethod
    def broken_promise(cls, op: str, promised: object, found: object) -> SplittingOpError:
        return cls(
            f"splitting op {op} returned dtype and shape {found}, but its fake (meta) kernel "
            f"promised {promised}.",
            "correct the fake kernel, or cast inside the op; the next segment is compiled for what "
            "the fake says and would misread the bytes.",
        )


class PaddingRuleError(PiecewiseError):
    """A rule of `pg.register_padding_rule` cannot be used."""

    @classmethod
    def bad_rule(cls, name: str) -> PaddingRuleError:
        what = f"the padding rule for {name!r} cannot be registered."
        remedy = "name the op as 'namespace::name', and pass one of rows=, elementwise=True and rule=."
        return cls(what, remedy)

    @classmethod
    def refuted(cls, name: str, difference: str) -> PaddingRuleError:
        what = f"the padding rule for {name!r} is wrong: with other padded rows, {difference}."
        remedy = "correct the rule, or register none: the op then runs on live rows."
        return cls(what, remedy)


class TokenDimError(PiecewiseError):
    """The token dimension is missing, ambiguous, or not dynamic."""

    @classmethod
    def ambiguous(cls, shapes: Mapping[str, Sequence[int]]) -> TokenDimError:
        found = "; ".join(f"{name} has shape {tuple(s)}" for name, s in shapes.items())
        inside = "pass it by itself, or use torch.compile(model, backend='piecewise')."
        named = f'name it, such as dimension 0: pg.compile(model, token_dim={{"{[*shapes, "x"][0]}": 0}}).'
        what = f"cannot tell which dimension counts tokens: {found or 'no argument is a tensor'}."
        return cls(what, named if shapes else inside)

    @classmethod
    def no_such_input(cls, option: str, name: str, known: Sequence[str]) -> TokenDimError:
        what = f"{option} names {name!r}, but this call passes no tensor of that name."
        return cls(what, f"use one of the tensor arguments that it does pass: {', '.join(known) or 'none'}.")

    @classmethod
    def no_such_dim(cls, option: str, name: str, dim: int, shape: Sequence[int]) -> TokenDimError:
        what = f"{option} says dimension {dim} of {name!r}, whose shape is {tuple(shape)}."
        return cls(what, f"pass a dimension from 0 to {len(shape) - 1}.")

    @classmethod
    def batch_behind_tokens(cls, name: str, dim: int, tokens: Sequence[int]) -> TokenDimError:
        what = f"batch_dim says dimension {dim} of {name!r}, whose tokens stand in dimension {tokens[0]}."
        return cls(what, "transpose the inputs: the batch has to stand before the tokens.")

    @classmethod
    def no_argument_names(cls, model: str) -> TokenDimError:
        what = f"Python does not know the names of the arguments of {model}, and token_dim goes by name."
        return cls(what, "compile a function of Python that calls it.")

    @classmethod
    def positions(cls, found: int, leader: str, count: int) -> TokenDimError:
        what = f"position_ids has {found} positions for the {count} tokens of {leader}."
        return cls(what, "pass one position per token.")

    @classmethod
    def specialized(cls, cause: str) -> TokenDimError:
        return cls(
            f"the model fixes a size that the caller has marked as dynamic: {cause}",
            "leave out torch._dynamo.mark_dynamic; pg.compile marks what varies.",
        )

    @classmethod
    def fixed(cls, counts: Sequence[int]) -> TokenDimError:
        """Logged, not raised: answers are right."""
        return cls(
            "the model fixes its token count while it is traced: each size is traced and compiled anew, "
            f"so far {' and '.join(map(str, counts))}.",
            "look for int(T), range(T) or a shape written as a constant in the model's forward.",
        )


class TraceError(PiecewiseError):
    """Dynamo could not trace the call: usually an input of the wrong dtype, device or shape."""

    @classmethod
    def failed(cls, inputs: str, cause: str) -> TraceError:
        return cls(
            f"the call could not be traced with inputs {inputs}: {cause}",
            "check dtype, device and shape of these inputs against what the model takes; "
            "the same call without compile should show the same error.",
        )

    @classmethod
    def wrong_device(cls, name: str, found: str, expected: str) -> TraceError:
        what = f"input {name!r} is on {found}, but the model's weights are on {expected}."
        return cls(what, f"move it: {name}.to({expected!r}).")


class AddressMovedError(PiecewiseError):
    """A tensor that captured graphs read by address has moved."""

    @classmethod
    def moved(cls, name: str) -> AddressMovedError:
        return cls(
            f"{name} was captured by address, and its storage has moved since; a replay would read "
            "the old one.",
            "update weights in place (p.copy_(new)) or call pg.reset() after the swap, so that the "
            "next calls capture again. If it is not a weight but changes from call to call, pass it "
            "as an argument of forward.",
        )


class MergedWeightsError(PiecewiseError):
    """Weights of merged linears were replaced, and the new ones cannot be merged."""

    @classmethod
    def stays(cls, name: str, reason: str) -> MergedWeightsError:
        return cls(
            f"the trace runs {name} merged with other weights, but they do not lie side by side any more, "
            f"and it cannot be moved: {reason}.",
            "write weights in place (p.copy_(new)); or, for shared_storage, drop what else holds the new "
            "tensor (a state_dict, a tied weight, graphs: pg.reset()); or compile with merge_linears=False.",
        )

    @classmethod
    def changed(cls, name: str, found: object, expected: object) -> MergedWeightsError:
        what = f"the trace was compiled for {name} of {expected}; it has {found}."
        return cls(what, "call the compiled model rather than a frozen callable, so that it is traced anew.")


class InputError(PiecewiseError):
    """A call's inputs do not fit the trace that it reached."""

    @staticmethod
    def other_size(name: str, dim: int | None, found: int, expected: int) -> str:
        is_found = f"is {found}" if dim is None else f"has size {found} in dimension {dim}"
        return f"{name} {is_found}, the trace needs {expected}"

    @staticmethod
    def other_strides(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
        return f"{name} has strides {found}, the trace needs {expected}"

    @staticmethod
    def outside_range(tokens: int, allowed: str) -> str:
        return f"{tokens} tokens are outside of {allowed} of this trace"

    @staticmethod
    def guard_not_met(guard: object, sizes: Mapping[Any, int]) -> str:
        return f"the trace relies on {guard}, which {dict(sizes)} does not meet"

    @classmethod
    def shape_contract(cls, what: str) -> InputError:
        remedy = "pass inputs whose sizes and strides fit, or use pg.compile, which traces such a call anew."
        return cls(f"the inputs do not fit the compiled trace: {what}.", remedy)

    @classmethod
    def no_tokens(cls, name: str, cause: str) -> InputError:
        what = f"{name!r} holds no tokens, and the model itself cannot run on an empty batch: {cause}."
        return cls(what, "skip the call when there is nothing to run.")


_RANK_IS_GONE = (
    "look for the rank that died or hangs, and start all of them anew; option rank_timeout says how many "
    "seconds the others wait."
)


class RankError(PiecewiseError):
    """Processes that run one model together (tensor parallel) could not go on together. All of them raise."""

    @classmethod
    def failed(cls, rank: int, what: str, cause: str) -> RankError:
        return cls(
            f"rank {rank} could not {what}: {cause}",
            f"read the error of rank {rank}; all ranks have stopped where it did.",
        )

    @classmethod
    def differs(cls, what: str, answers: Sequence[object]) -> RankError:
        found = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
        return cls(
            f"the ranks do not agree about {what}: {found}.",
            "call the model on all ranks in the same order, with the same sizes and options.",
        )

    @classmethod
    def heads(cls, ranks: int, heads: int) -> RankError:
        what = f"{ranks} ranks cannot share {heads} KV heads: some would need parts of two."
        return cls(what, "run on a number of ranks that divides the KV heads, or is a multiple of them.")

    @classmethod
    def lost(cls, what: str, cause: str) -> RankError:
        return cls(f"a rank did not answer when all were to {what}: {cause}", _RANK_IS_GONE)

    @classmethod
    def silent(cls, ranks: Sequence[int], step: int, seconds: float) -> RankError:
        who = " and ".join(f"rank {rank}" for rank in ranks)
        return cls.lost(f"take decision {step}", f"{who} did not come to it within {seconds:g} seconds.")

    @classmethod
    def no_shared_file(cls, path: str | None) -> RankError:
        found = "rank 0 cannot write one" if path is None else f"not all of them can map {path}"
        return cls(
            f"the ranks have no file through which rank 0 could hand out its decisions: {found}.",
            "run all ranks on one host, with room in /dev/shm or in the folder for temporary files.",
        )

    @classmethod
    def bad_decision(cls, value: object, largest: int) -> RankError:
        return cls(f"rank 0 cannot hand out {value!r} as a decision.", f"decide for 0 to {largest}.")

    @classmethod
    def late(cls, rank: int) -> RankError:
        what = (
            f"a sum over ranks has waited for the rows of rank {rank} in vain; what came after it is wrong."
        )
        return cls(what, _RANK_IS_GONE)


class GraphPoolError(PiecewiseError):
    """A pool is used in a way that it cannot serve."""

    @classmethod
    def wrong_device(cls, pool_device: str, device: str) -> GraphPoolError:
        what = f"this GraphPool holds graphs of {pool_device}, but the model runs on {device}."
        return cls(what, "give each device a GraphPool of its own.")

    @classmethod
    def busy(cls) -> GraphPoolError:
        what = "release() was called while one of the pool's graphs is being captured or replayed."
        return cls(what, "call it between forwards.")

    @classmethod
    def inside_capture(cls, name: str) -> GraphPoolError:
        what = f"{name} cannot be captured while the current stream is capturing another graph."
        return cls(what, "capture it before that capture begins, or after it has ended.")

    @classmethod
    def inside_forward(cls, name: str) -> GraphPoolError:
        return cls(
            f"{name} was called while another graph of its GraphPool is in use, and would overwrite results.",
            "call it between forwards, or capture it in a GraphPool of its own.",
        )

    @classmethod
    def dropped(cls, name: str) -> GraphPoolError:
        what = f"the graph of {name} was dropped by pg.reset() or GraphPool.release()."
        return cls(what, "capture it again, with the call that captured it before.")


class CaptureError(PiecewiseError):
    """`pg.capture` could not do what it was asked for."""

    @staticmethod
    def out_of_memory(size: int, cause: str, planned: int | None = None) -> str:
        """A bucket's failure, as `pg.explain` shows it; the call itself is answered uncaptured."""
        told = "" if planned is None else f" (planned: {planned} bytes)"
        return (
            f"out of memory while capturing {size} tokens{told}: {cause} Set max_graph_bytes, or a smaller "
            "max_tokens or capture_sizes; pg.plan says what each size takes."
        )

    @staticmethod
    def not_planned(error: Exception) -> str:
        """Why a bucket is missing from a plan, as reports show it."""
        return f"cannot be planned: {type(error).__name__}: {error}"

    @staticmethod
    def failed(error: Exception) -> str:
        """A bucket's failure, as `pg.explain` shows it; the call itself is answered uncaptured."""
        return f"{type(error).__name__}: {error}"

    @staticmethod
    def on_another_rank(answers: Sequence[object]) -> str:
        """A bucket's failure, as `pg.explain` shows it, where this rank alone would have gone on."""
        found = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
        return f"captured on all ranks or on none: {found}"

    @staticmethod
    def op_failed(error: Exception) -> str:
        """Why an op runs between the graphs, as `pg.explain` shows it."""
        return f"its capture fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}"

    @staticmethod
    def over_budget(size: int, needed: int, budget: int) -> str:
        """Why a bucket was dropped, as reports show it."""
        return (
            f"over_budget: {size} tokens and what is smaller need {needed} bytes of graphs, "
            f"and max_graph_bytes is {budget}"
        )

    @classmethod
    def nothing_captured(cls, reasons: Sequence[str]) -> CaptureError:
        remedies = dict.fromkeys(map(remedy, reasons))
        return cls(f"nothing was captured: {'; '.join(reasons)}.", "; ".join(remedies) + ".")

    @classmethod
    def bad_sizes(cls, sizes: Sequence[object], allowed: Sequence[int]) -> CaptureError:
        what = f"sizes {list(sizes)} are not all among the compiled model's capture sizes."
        return cls(what, f"choose from {list(allowed)}, or set capture_sizes/max_tokens when compiling.")

    @classmethod
    def bad_inputs(cls, size: int, found: str) -> CaptureError:
        what = f"make_inputs({size}) returned {found}."
        return cls(what, "return a dict of keyword arguments, a tuple of positional ones, or one tensor.")

    @classmethod
    def bad_context(cls, size: int, found: str) -> CaptureError:
        what = f"context({size}) returned a {found}."
        return cls(what, "return a dict of what pg.forward_context gets around the call.")

    @staticmethod
    def wrong_count(size: int) -> str:
        """A bucket's failure, as the report shows it."""
        return f"make_inputs({size}) did not make a batch of {size} tokens"


class NotCompiledError(PiecewiseError):
    """The object was not compiled with this backend, or was never called."""

    @classmethod
    def unknown(cls, what: str) -> NotCompiledError:
        return cls(
            f"{what} has no piecewise trace.",
            "pass the object that torch.compile(..., backend='piecewise') or pg.compile returned, "
            "after at least one call.",
        )


class ContextError(PiecewiseError):
    """The forward context is missing, nested, or lacks a field."""

    @classmethod
    def nested(cls) -> ContextError:
        what = "pg.forward_context was entered inside another one."
        return cls(what, "leave the outer context first: one batch has one context.")

    @classmethod
    def missing_field(cls, name: str, known: Iterable[str]) -> ContextError:
        return cls(
            f"the forward context has no field {name!r}.",
            f"pass pg.forward_context({name}=...). It has: {', '.join(sorted(known)) or 'none'}.",
        )

    @classmethod
    def reserved(cls, name: str) -> ContextError:
        what = f"a field of the forward context cannot be called {name!r}: the context itself has that name."
        return cls(what, "choose another name.")

    @classmethod
    def bad_key(cls, key: object) -> ContextError:
        what = f"graph_key={key!r} cannot tell graphs apart."
        return cls(what, "pass a hashable value that equals itself: a string, a number, a tuple of them.")

    @classmethod
    def mutable(cls, name: str, kind: str) -> ContextError:
        what = f"the forward context's {name!r} is a {kind}; a full graph could not see it change."
        return cls(what, "pass a tuple, a tensor, or a frozen object, or leave out full_graph=True.")

    @classmethod
    def moved(cls, name: str, bucket: int, key: object) -> ContextError:
        return cls(
            f"a tensor of {name!r} in the forward context has moved or changed its shape since the full "
            f"graph of {bucket} tokens, graph_key={key!r}, was captured; a replay would read the old one.",
            "write new values in place, or make a new object and pass another graph_key.",
        )

    @classmethod
    def changed(cls, name: str, bucket: int, key: object) -> ContextError:
        return cls(
            f"the full graph of {bucket} tokens and graph_key={key!r} was captured with another "
            f"{name!r} in the forward context; its replay would use the old one.",
            "write new values into the captured object's tensors in place, pass another graph_key for "
            "another object, or leave out full_graph=True.",
        )


class FreezeError(PiecewiseError):
    """A model cannot be frozen on this example, or a frozen one does not cover a call."""

    @classmethod
    def no_trace(cls, what: str) -> FreezeError:
        what = f"{what} has no piecewise trace, even after a call."
        return cls(what, "pass what pg.compile or torch.compile(..., backend='piecewise') returned.")

    @classmethod
    def not_one_graph(cls, graphs: int) -> FreezeError:
        return cls(
            f"the example's forward ran {graphs} graphs of this backend; freezing needs exactly one.",
            "remove the graph breaks (see TORCH_LOGS=graph_breaks), and call on at least one token.",
        )

    @classmethod
    def not_split(cls, reason: str) -> FreezeError:
        return cls(
            f"the example's trace is compiled as a whole: {reason}.",
            f"{remedy(reason)}; then freeze again.",
        )

    @classmethod
    def steered(cls) -> FreezeError:
        what = "a size or a number that is no input of the model's graph, or Python before it, steers it."
        return cls(what, "call the compiled model itself, which checks such values at every call.")

    @classmethod
    def changes_objects(cls, changed: Sequence[str]) -> FreezeError:
        what = f"the forward changes {', '.join(changed)} in Python, which a replay leaves out."
        return cls(what, "call the compiled model itself, or write tensors in place instead.")

    @classmethod
    def one_token(cls) -> FreezeError:
        what = "the model does something else with one token than with several."
        return cls(what, "freeze another callable with an example of one token.")

    @classmethod
    def autocast(cls) -> FreezeError:
        what = "a frozen model was called inside torch.autocast; its trace was made outside."
        return cls(what, "leave the region, or call the compiled model itself.")

    @classmethod
    def unknown_input(cls, name: str) -> FreezeError:
        what = f"the graph reads {name}, which is neither an argument of the call nor a weight."
        return cls(what, "pass it as an argument of forward, or register it as a buffer of the model.")

    @classmethod
    def aliased(cls, one: str, other: str) -> FreezeError:
        return cls(
            f"the example's arguments {one!r} and {other!r} are the same memory: they cannot be told apart.",
            "pass separate tensors in the example, such as clones; later calls may pass one twice.",
        )

    @classmethod
    def integer_argument(cls, name: str) -> FreezeError:
        what = f"the graph takes {name} as an integer that is no size of an argument."
        return cls(what, "pass a tensor, or a constant.")

    @classmethod
    def unknown_output(cls, returned: str) -> FreezeError:
        what = f"the model returns a {returned} that its graph did not compute."
        return cls(what, "return tensors and constants in containers; for a KV cache, pass use_cache=False.")

    @classmethod
    def integer_output(cls) -> FreezeError:
        what = "the model returns a shape, or numbers that depend on the token count, next to its tensors."
        return cls(what, "return tensors and constants only.")

    @classmethod
    def arguments(cls, found: str, expected: str) -> FreezeError:
        what = f"the frozen model was called with {found}; it was frozen with {expected or 'nothing'}."
        return cls(what, "pass the arguments that the example had, or freeze another callable for this call.")

    @classmethod
    def kind(cls, name: str, found: str, expected: str) -> FreezeError:
        what = f"argument {name!r} is {found}, but the model was frozen with {expected}."
        return cls(what, "pass the same kind of input; its token count may differ, where the graph reads it.")

    @classmethod
    def constant(cls, name: str, found: object, expected: object) -> FreezeError:
        what = f"argument {name!r} is {found!r}, but the model was frozen with {expected!r}."
        return cls(what, "such a value is part of the trace; freeze another callable for this one.")

    @classmethod
    def grad_enabled(cls) -> FreezeError:
        what = "a frozen model was called with grad enabled; its results would have no gradients."
        return cls(what, "call it under torch.no_grad() or torch.inference_mode().")

    @classmethod
    def training_changed(cls, was: bool) -> FreezeError:
        what = f"the model was frozen with training={was} and has been switched since."
        return cls(what, "switch it back (model.eval()), or call rebind().")

    @classmethod
    def not_captured(cls, count: int) -> FreezeError:
        what = f"no tape serves {count} tokens yet, so there is nowhere to write its inputs."
        return cls(what, "call the frozen model with that many tokens once, or run pg.capture first.")


class LeakWarning(UserWarning):
    """An attention-like or mutating op was left inside a segment and would be captured with it."""

    @classmethod
    def inside_segment(cls, op: str) -> LeakWarning:
        return cls(
            f"{op} was left inside a segment and will be captured with it. If it is attention, or writes "
            f"state that changes from call to call, register it first: pg.register_splitting_op({op!r})."
        )
