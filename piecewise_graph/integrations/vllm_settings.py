"""Settings of this backend in vLLM's `additional_config`, which is for plugins."""

from __future__ import annotations

from typing import Any

from piecewise_graph.integrations.errors import IntegrationError
from piecewise_graph.integrations.stacks import VLLM


def settle(config: Any, name: str, usual: int, wanted: str) -> None:
    """Give a setting its usual value where the user has not set it.

    Args:
        config: vLLM's.
        usual: a bool, or a number of something. So has the user's value to be.
        wanted: what the error asks for.

    Raises:
        IntegrationError: the user's value is not right; or vLLM has no such settings.
    """
    settings = _settings(config)
    value = usual if settings is None else settings.setdefault(name, usual)
    if type(value) is not type(usual) or value < 0:
        raise IntegrationError.unsupported(f"{name} = {value!r}", wanted)


def setting(config: Any, name: str) -> Any:
    """The value of a setting; None where there are no settings.

    Raises:
        IntegrationError: vLLM has no such settings.
    """
    settings = _settings(config)
    return settings.get(name) if settings is not None else None


def _settings(config: Any) -> dict[str, Any] | None:
    """None where the user has given an object of another kind in their place."""
    found = VLLM.required(config, "additional_config", "VllmConfig")
    return found if isinstance(found, dict) else None
