"""What calls of functions need of the libraries of their environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from layerzero.ipc.functions.frames import Payload
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions.again import Openers
from layerzero.workers.functions.code import Modules


class Arrays(Openers, Protocol):
    """The array libraries of this environment."""

    def open(self, library: str, spec: TensorSpec, memory: memoryview) -> Any:
        """A read-only array on memory. Raises InvalidArgument where there is no such library."""

    def put(self, value: Any, payload: Payload) -> list[Any] | None:
        """What stands for an array, whose elements the payload will have; None for what is no array."""


class Models(Protocol):
    """The kinds of whole models that this environment may open."""

    def find(self, kind: str, modules: Modules) -> Callable[..., Any]:
        """What opens a model. Raises InvalidArgument for a kind that there is not."""
