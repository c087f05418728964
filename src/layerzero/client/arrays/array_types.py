"""Types of the public functions' arrays, for type checkers: what goes in comes out. Nothing is imported at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:

    class SupportsDLPack(Protocol):
        """torch tensors, arrays of JAX, CuPy, MLX and the like."""

        @property
        def __dlpack__(self) -> Callable[..., Any]: ...

    class SupportsBuffer(Protocol):
        """NumPy arrays and scalars, memoryviews, array.array."""

        def __buffer__(self, flags: int, /) -> memoryview: ...

    AnyArray: TypeAlias = SupportsDLPack | SupportsBuffer

# The kind of the first array of a call, which is the result's.
ArrayT = TypeVar("ArrayT", bound="AnyArray")
