"""The catalogue of eagle: every error can be built from its values, and says all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from piecewise_graph.eagle.errors import EagleError, SpeculatorError, _Message

MESSAGES = {
    f"{error.__name__}.{name}": (error, name, message)
    for error in (EagleError, SpeculatorError)
    for name, message in vars(error).items()
    if isinstance(message, _Message)
}


@pytest.mark.parametrize("case", MESSAGES)
def test_every_message_takes_its_values_and_says_what_to_do(case: str) -> None:
    error, name, message = MESSAGES[case]
    values = [f"<{field}>" for field in message.fields]
    built = getattr(error, name)(*values)
    assert isinstance(built, error)
    assert all(value in str(built) for value in values)
    assert "What to do:" in str(built)
    with pytest.raises(ValueError, match="argument"):
        getattr(error, name)(*values, "one too many")


def test_values_come_in_the_order_of_the_text() -> None:
    built = EagleError.wrong_tensor_shape(Path("head"), "fc.weight", (3, 4), (4, 4))
    assert "the draft head in head: fc.weight has shape (3, 4), not (4, 4)." in str(built)


def test_braces_of_a_message_are_its_own() -> None:
    assert "graphs={'draft': 'fast'} names no phase" in str(
        SpeculatorError.bad_graphs("draft", "fast", "a", "b")
    )
