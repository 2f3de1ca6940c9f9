"""Stack: a serving stack that a plugin is attached to, and what another version of it lacks."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from piecewise_graph.integrations.errors import IntegrationError


@dataclass(frozen=True)
class Stack:
    """One that a plugin was written for.

    Attributes:
        package: what it is imported as.
        name: what errors call it.
        written_for: the version whose source was read.
    """

    package: str
    name: str
    written_for: str

    def version(self) -> str:
        """The installed version, as text."""
        return str(getattr(import_module(self.package), "__version__", "of an unknown version"))

    def missing(self, hook: str) -> IntegrationError:
        return IntegrationError.hook_missing(hook, self.name, self.version(), self.written_for)

    def imported(self, module: str, name: str) -> Any:
        """`name`, dots allowed, of a module of the stack.

        Raises:
            IntegrationError: it is not there.
        """
        try:
            owner = import_module(module)
        except ImportError as error:
            raise self.missing(f"{module}.{name}") from error
        return self.required(owner, name, module)

    def required(self, owner: Any, name: str, of: str) -> Any:
        """The attribute `name`, dots allowed, of a part of the stack that is called `of`.

        Raises:
            IntegrationError: it is not there.
        """
        for part in name.split("."):
            if not hasattr(owner, part):
                raise self.missing(f"{of}.{name}")
            owner = getattr(owner, part)
        return owner


VLLM = Stack("vllm", "vLLM", "0.23.0")
SGLANG = Stack("sglang", "SGLang", "0.5.17")
