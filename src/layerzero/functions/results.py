"""Arrays and classes of a function's result, as this process has them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from layerzero.client.arrays.recognition import ML_DTYPES, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.vocabulary.tensors import TensorSpec


def of_those(there: Sequence[tuple[TensorSpec, Any]], node: list[Any]) -> Any:
    """A result on a GPU. Raises ProtocolError."""
    number = node[-1]
    if len(node) != frames.NODE_ITEMS or node[-2] != frames.ON_GPU or type(number) is not int:
        raise ProtocolError("an array on a GPU without a number")
    if not 0 <= number < len(there) or node[1:4] != list(there[number][0].to_wire()):
        raise ProtocolError(f"array {number} on a GPU is not as it was announced")
    return there[number][1]


def whole(library: str, memory: memoryview) -> Any:
    """The bytes of an answer as an array."""
    like = sys.modules[library].empty(0)
    return wrap(memory, TensorSpec.contiguous("uint8", (len(memory),)), describe(like))[0]


def array_on(library: str, flat: Any, spec: TensorSpec) -> Any:
    """Bytes of an array as that."""
    module = sys.modules[library]
    name = spec.dtype
    if library == "numpy" and name in ML_DTYPES and "ml_dtypes" not in sys.modules:
        raise InvalidArgument(f"NumPy has no {name} of its own; import ml_dtypes")
    dtype = getattr(sys.modules["ml_dtypes"] if library == "numpy" and name in ML_DTYPES else module, name, None)
    if dtype is None:
        if (library, name) != ("numpy", "bool"):  # NumPy 1 has no numpy.bool
            raise InvalidArgument(f"{library} has no {name} in this process")
        dtype = "?"
    if not spec.numel:
        return module.empty(spec.shape, dtype=dtype)
    return flat.view(dtype).reshape(spec.shape)


def resolve(module: str, qualname: str) -> Any:
    """A class of a result: of a module that this process has imported, since an answer must not import anything. Raises
    InvalidArgument."""
    found: Any = sys.modules.get(module)
    if found is None:
        raise InvalidArgument(f"it has a {module}.{qualname}, and this process has not imported {module}")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found
