"""One case, run: every call of the compiled program beside the program itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import piecewise_graph as pg
from fuzz.compare import SHAKES, difference, same, shake, snapshot
from fuzz.pairs import (
    Failure,
    Pair,
    close,
    copy_state,
    exact,
    line_of,
    mode_around,
    outcome,
    place_of,
    quietly_in_time,
    run,
    served,
    snapshot_inputs,
    state,
)
from fuzz.programs import random_program
from fuzz.rows import Row, row_of
from fuzz.sequences import Case, Step, inputs_of, random_sequence
from piecewise_graph.errors import AddressMovedError, CaptureError, FreezeError, InputError


def case_of(seed: int) -> Case:
    """The case of a seed: the same in every process."""
    random = Random(seed)
    return Case(random_program(random), random_sequence(random))


def run_seed(seed: int, compiler: str, device: torch.device) -> Row:
    """The verdict on a seed."""
    return run_case(case_of(seed), compiler, device, seed)


def run_case(case: Case, compiler: str, device: torch.device, seed: int | str = "case") -> Row:
    """The verdict on a case."""

    def judge() -> tuple[str, str]:
        with quietly_in_time(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            trial = _Trial(case, compiler, device)
            trial.run()
        told = trial.refused if trial.answers else trial.refused or trial.eager_errors
        verdict = "right" if trial.answers else "refused" if trial.refused else "invalid"
        return verdict, "; ".join(dict.fromkeys(told))

    return row_of(seed, judge)


class _Trial:
    def __init__(self, case: Case, compiler: str, device: torch.device) -> None:
        self.case, self.compiler, self.device = case, compiler, device
        self.pool = pg.GraphPool(poison=device.type == "cpu")
        try:
            eager = case.program.build().to(device)
        except Exception as error:
            raise Failure("error", f"the program cannot be built: {error!r}") from error
        self.copies = [self._compiled(eager) for _ in range(case.sequence.copies)]
        self.answers = 0
        self.refused: list[str] = []
        self.eager_errors: list[str] = []
        self.kept: list[tuple[Step, Any, Any, Any]] = []

    def _compiled(self, eager: nn.Module) -> Pair:
        model = copy.deepcopy(eager)
        options = dict(self.case.sequence.options) | {"compiler": self.compiler, "pool": self.pool}
        if self.case.sequence.entry == "pg.compile":
            fast = pg.compile(model, token_dim=self.case.program.token_dim, **options)
        else:
            fast = torch.compile(model, backend="piecewise", options=options)
        return Pair(model, fast, copy.deepcopy(eager))

    def run(self) -> None:
        for step in self.case.sequence.steps:
            subject = self.copies[step.copy]
            try:
                getattr(self, f"_{step.kind}")(step, subject)
            except Failure as failure:
                raise Failure(failure.verdict, f"{step}: {failure.reason}") from failure

    # --- calls ---

    def _call(self, step: Step, subject: Pair) -> None:
        self._answered(step, subject, subject.fast)

    def _frozen(self, step: Step, subject: Pair) -> None:
        """Freeze where no frozen callable is, then call it."""
        if subject.frozen is None and not self._eager_raises(step, subject, step.tokens):
            example = inputs_of(self.case.program, step, self.device)
            try:
                with mode_around(step.mode):
                    subject.frozen = pg.freeze(subject.fast, **example)
            except FreezeError as error:
                self.refused.append(f"FreezeError: {line_of(error)}")
            except Exception as error:
                self._refused_or_raised(step, subject, error, "pg.freeze")
            finally:
                copy_state(subject.model, subject.eager)
        self._answered(step, subject, subject.frozen or subject.fast)

    def _answered(self, step: Step, subject: Pair, fast: Callable[..., Any]) -> None:
        if step.mode == "grad" and state(
            subject.model
        ):  # buffers would get a history, which cannot be copied
            step = replace(step, mode="no_grad")
        given = inputs_of(self.case.program, step, self.device)
        theirs, before = snapshot_inputs(given), copy.deepcopy(subject.eager)
        with mode_around(step.mode):
            wanted, raised = outcome(subject.eager, theirs)
        count = served()
        try:
            with mode_around(step.mode):
                got = fast(**given)
        except Exception as error:
            copy_state(subject.eager, subject.model)
            if raised is None:
                self._refused_or_raised(step, subject, error)
            else:
                self.eager_errors.append(repr(raised))
            return
        if raised is not None:  # eager's errors are not part of any contract
            self.eager_errors.append(repr(raised))
            copy_state(subject.model, subject.eager)
            return
        if self.case.sequence.entry == "pg.compile" and served() == count:
            raise Failure("error", "the call was neither replayed nor counted as a fallback")
        self.answers += 1
        told = self._difference(
            step, before, snapshot((got, given, state(subject.model))), wanted, theirs, subject
        )
        if told is not None:
            self._wrong(step, before, told)
        if dict(self.case.sequence.options).get("outputs") != "static":
            self.kept.append((step, got, snapshot(got), wanted))
        copy_state(subject.model, subject.eager)

    def _difference(
        self, step: Step, before: nn.Module, found: Any, wanted: Any, theirs: Any, subject: Pair
    ) -> str | None:
        names = ("output", "inputs after the call", "buffers")
        trees = (wanted, theirs, state(subject.eager))
        for index, name in enumerate(names):
            told = difference(
                found[index],
                trees[index],
                lambda index=index: exact(before, inputs_of(self.case.program, step, self.device))[index],
                lambda index=index: self._shaken(before, step, index),
            )
            if told is not None:
                return f"{name}: {told}"
        return None

    def _shaken(self, before: nn.Module, step: Step, index: int) -> list[Any]:
        found = []
        for number in range(SHAKES):
            generator = torch.Generator().manual_seed(number)
            model = copy.deepcopy(before)
            for t in (*model.parameters(), *model.buffers()):
                t.data.copy_(shake(t.data, generator))
            inputs = inputs_of(self.case.program, step, self.device)
            found.append(run(model, {n: shake(t, generator) for n, t in inputs.items()})[index])
        return found

    def _wrong(self, step: Step, before: nn.Module, told: str) -> None:
        """Raise "wrong", or "torch" where plain torch.compile is as wrong."""
        plain = self._plain(step, before)
        if isinstance(plain, Exception):
            raise Failure("wrong", told)
        model, given, got = plain
        reference = copy.deepcopy(before)
        theirs = snapshot_inputs(inputs_of(self.case.program, step, self.device))
        with mode_around(step.mode):
            wanted, _ = outcome(reference, theirs)
        shell = Pair(model, model, reference)
        found = snapshot((got, given, state(model)))
        as_wrong = self._difference(step, before, found, wanted, theirs, shell)
        raise Failure("wrong" if as_wrong is None else "torch", told)

    def _refused_or_raised(
        self, step: Step, subject: Pair, error: Exception, what: str = "the call", calls: Sequence[Step] = ()
    ) -> None:
        """Documented refusals; README of this folder lists them.

        Args:
            calls: that the step makes, where it is no call itself.
        """
        if subject.moved and isinstance(error, AddressMovedError):
            self.refused.append(f"AddressMovedError: {line_of(error)}")
            self._reset(step, subject)
        elif subject.frozen is not None and isinstance(error, (FreezeError, InputError)):
            self.refused.append(f"{type(error).__name__}: {line_of(error)}")
            subject.frozen = None
        else:
            self._raised(calls or [step], subject, error, what)

    def _raised(self, calls: Sequence[Step], subject: Pair, error: Exception, what: str) -> None:
        told = f"{what} raised {type(error).__name__}: {line_of(error)}{place_of(error)}"
        torchs = any(isinstance(self._plain(call, subject.eager), Exception) for call in calls)
        raise Failure("torch" if torchs else "error", told) from error

    def _plain(self, step: Step, before: nn.Module) -> Any:
        """What plain torch.compile makes of the call: model, inputs and answer, or what it raised."""
        torch._dynamo.reset()
        model = copy.deepcopy(before)
        given = inputs_of(self.case.program, step, self.device)
        fast = torch.compile(model, backend=self.compiler, dynamic=True)
        try:
            with mode_around(step.mode):
                return model, given, fast(**given)
        except Exception as error:
            return error

    # --- other steps ---

    def _capture(self, step: Step, subject: Pair) -> None:
        for one in self.copies:
            sizes = dict(self.case.sequence.options)["capture_sizes"]
            if any(self._eager_raises(step, one, n) for n in sizes):
                continue
            try:
                with mode_around("no_grad"):
                    pg.capture(one.fast, lambda n: self._inputs(step, n), progress=False)
            except CaptureError as error:
                self.refused.append(f"CaptureError: {line_of(error)}")
            except Exception as error:
                self._refused_or_raised(step, one, error, "pg.capture", [self._at(step, n) for n in sizes])
            copy_state(one.model, one.eager)

    def _eager_raises(self, step: Step, subject: Pair, tokens: int) -> bool:
        with mode_around("no_grad"):
            return outcome(copy.deepcopy(subject.eager), self._inputs(step, tokens))[1] is not None

    def _inputs(self, step: Step, tokens: int) -> dict[str, Tensor]:
        return inputs_of(self.case.program, self._at(step, tokens), self.device)

    def _at(self, step: Step, tokens: int) -> Step:
        """A call of `tokens` tokens with the data of a capture."""
        return replace(step, kind="call", tokens=tokens)

    def _update(self, step: Step, subject: Pair) -> None:
        generator = torch.Generator().manual_seed(step.seed)
        for one, other in zip(subject.model.parameters(), subject.eager.parameters(), strict=True):
            noise = torch.randn(one.shape, generator=generator).to(one)
            with torch.no_grad():
                other.add_(noise, alpha=0.1)
                one.copy_(other)

    def _replace(self, step: Step, subject: Pair) -> None:
        found = self._some_weight(step, subject)
        if found is not None:
            owner, twin, name = found
            fresh = getattr(twin, name).detach() * 0.5 + 0.1
            setattr(owner, name, nn.Parameter(fresh.clone()))
            setattr(twin, name, nn.Parameter(fresh.clone()))
            subject.frozen = None  # documented: a frozen callable does not see it

    def _move(self, step: Step, subject: Pair) -> None:
        found = self._some_weight(step, subject)
        if found is not None:
            owner, _, name = found
            weight = getattr(owner, name)
            weight.data = weight.data.clone()
            subject.moved, subject.frozen = True, None

    def _some_weight(self, step: Step, subject: Pair) -> tuple[nn.Module, nn.Module, str] | None:
        pairs = [
            (owner, twin, name)
            for owner, twin in zip(subject.model.modules(), subject.eager.modules(), strict=True)
            for name, _ in owner.named_parameters(recurse=False)
        ]
        return pairs[step.seed % len(pairs)] if pairs else None

    def _reset(self, step: Step, subject: Pair) -> None:
        pg.reset()
        for one in self.copies:
            one.moved, one.frozen = False, None

    def _dynamo_reset(self, step: Step, subject: Pair) -> None:
        torch._dynamo.reset()
        self._reset(step, subject)

    def _train(self, step: Step, subject: Pair) -> None:
        subject.model.train(), subject.eager.train()
        subject.frozen = None

    def _eval(self, step: Step, subject: Pair) -> None:
        subject.model.eval(), subject.eager.eval()
        subject.frozen = None

    def _kept(self, step: Step, subject: Pair) -> None:
        """Answers of earlier calls are the caller's: they are what they were, or follow as eager's do."""
        for call, got, then, wanted in self.kept:
            leaves = zip(*map(pytree.tree_leaves, (got, then, wanted)), strict=True)
            for index, (now, was, eager) in enumerate(leaves):
                if isinstance(now, Tensor) and not same(now, was) and not close(now, eager):
                    raise Failure("wrong", f"leaf {index} of the answer to {call} has changed since")
