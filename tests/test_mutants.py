"""The mutants of `make mutants` fit the code, and their tests exist."""

from __future__ import annotations

import re

import pytest
from mutant_list import MUTANTS
from mutants import ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_its_file(mutant: Mutant) -> None:
    """Whoever changes the line changes the mutant with it."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"{text.count(mutant.old)} places in {mutant.file}"
    assert mutant.new != mutant.old
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    file, _, word = mutant.tests.partition(" -k ")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert not word or re.search(rf"def test_\w*{word}", text)


def test_names_are_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
