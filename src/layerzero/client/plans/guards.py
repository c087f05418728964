"""Guards: what must be equal for two runs of a function to share a plan."""

from __future__ import annotations

import sys
from typing import Any

from layerzero.client.plans.recording import is_array
from layerzero.client.plans.traced import map_leaves

_PLAIN = frozenset((str, bytes, int, float, bool, complex, type(None)))


def arrays_of(given: Any) -> list[Any]:
    found: list[Any] = []
    key_of(given, found)
    return found


def key_of(value: Any, arrays: list[Any]) -> Any:
    """Equal for arguments that share a plan; `arrays` takes the arrays in order. Each run makes one."""
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[key_of(item, arrays) for item in value])
    if kind is dict:
        return (kind, *[(name, key_of(item, arrays)) for name, item in value.items()])
    if kind in _PLAIN:
        return (kind, repr(value) if kind is float or kind is complex else value)
    if is_array(value):
        arrays.append(value)
        return _array_key(value)
    if isinstance(value, (list, tuple, dict)):  # of a class of its own
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return (kind, *[(name, key_of(item, arrays)) for name, item in items])
    return (kind, repr(value) if kind is slice else id(value))


def _array_key(array: Any) -> Any:
    if type(array).__module__ == "numpy":
        return (type(array), array.dtype, array.shape, getattr(array, "strides", ()), array.flags.aligned)
    has_grad = getattr(array, "requires_grad", False)
    return (type(array), array.dtype, array.shape, _strides_of(array), array.device, has_grad)


def _strides_of(array: Any) -> Any:
    try:
        return array.stride() if callable(array.stride) else ()
    except (AttributeError, RuntimeError):  # a layout of torch without strides, a subclass of NumPy's
        return getattr(array, "strides", ())


def label_of(given: tuple[Any, Any]) -> str:
    """The arguments in short."""
    shown: list[str] = []

    def note(leaf: Any) -> None:
        shown.append(
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if is_array(leaf) else repr(leaf)[:40]
        )

    map_leaves(given, note)
    return ", ".join(shown)


def modes_of(arrays: list[Any]) -> Any:
    """What torch does otherwise with the same arrays. A graph holds what it was captured with."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    has_grad = torch.is_grad_enabled()
    if not arrays or not getattr(arrays[0], "is_cuda", False):
        return has_grad
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    precise = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    return (has_grad, torch.is_inference_mode_enabled(), cast, precise)


def is_captured(arrays: list[Any]) -> bool:
    """Whether the caller's stream is being captured."""
    if not arrays or not getattr(arrays[0], "is_cuda", False):
        return False
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
