"""What a function is given in place of its arrays while it is recorded.

A Traced has the array with its numbers, so that the function runs as usual; what is done with it is recorded:
operators, methods, functions of NumPy and of torch, and lz ops. What takes numbers out of it (a branch on a value,
`float(x)`) is done, too, and said: a function that looks at numbers cannot be run without it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

STATIC = frozenset(
    ["shape", "dtype", "ndim", "size", "nbytes", "itemsize", "device", "is_cuda", "requires_grad", "layout"]
)
"""Attributes that the guards of a plan settle, and methods of that kind."""
STATIC_METHODS = frozenset(
    ["dim", "numel", "stride", "is_contiguous", "is_floating_point", "element_size", "get_device"]
)


class Recorder(Protocol):
    """What Traced arrays tell of themselves."""

    def record(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function on the arrays themselves. The result, with Traced in place of arrays."""

    def escape(self, what: str) -> None:
        """Numbers of an array became known to the function."""

    def take_out(self, lent: Any, array: Any) -> None:
        """The function has this array itself, by the view `lent`, and what it does with it is not seen."""


class Traced:
    """One array. `of_traced` tells it and its recorder."""

    __slots__ = ("_array", "_recorder")
    __array_priority__ = 1000.0

    def __init__(self, array: Any, recorder: Recorder) -> None:
        self._array, self._recorder = array, recorder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # ways to its memory, or of other libraries: what does without them goes on
            raise AttributeError(name)
        found = getattr(self._array, name)  # AttributeError is that of the array
        if name in STATIC or name in STATIC_METHODS:
            return found
        if callable(found):
            return _Method(self, name)
        return self._recorder.record(_Attribute(name), (self,), {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        return self._recorder.record(function, inputs, kwargs)

    def __array_function__(self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._recorder.record(function, args, kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return recorder_among((args, kwargs)).record(function, args, kwargs or {})

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy

        found = numpy.asarray(self._array, dtype) if not copy else numpy.array(self._array, dtype)
        self._recorder.record(_Given(found), (self,), {})
        lent = found.view()
        lent.flags.writeable = False  # what would be written there would not be seen
        self._recorder.take_out(lent, found)
        return lent

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        take: Any = operator.getitem
        return (take(self, n) for n in range(len(self._array)))

    def __repr__(self) -> str:
        self._recorder.escape("prints it")
        return repr(self._array)

    def __hash__(self) -> int:
        return id(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._recorder.record(operator.setitem, (self, index, value), {})


class _Given:
    """A result that the function has got already; in a plan, what gives it again."""

    def __init__(self, array: Any) -> None:
        self._array, self._dtype = array, array.dtype
        self.__name__ = "asarray"

    def __call__(self, source: Any) -> Any:
        array, self._array = self._array, None
        if array is not None:
            return array
        import numpy

        return numpy.asarray(source, self._dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given) and other._dtype == self._dtype

    def __hash__(self) -> int:
        return hash(self._dtype)


class _Attribute:
    """Takes an attribute that is an array, such as T."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, array: Any) -> Any:
        return getattr(array, self.__name__)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__name__ == self.__name__

    def __hash__(self) -> int:
        return hash(self.__name__)


class MethodCall(_Attribute):
    """Calls a method by its name."""

    def __call__(self, array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, self.__name__)(*args, **kwargs)


class _Method:
    """A method of a Traced, to be called."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Traced, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner._recorder.record(MethodCall(self._name), (self._owner, *args), kwargs)


def array_of(value: Any) -> Any:
    """The array of a Traced; anything else as it is."""
    return value._array if isinstance(value, Traced) else value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples, dicts and slices with every leaf changed."""
    if isinstance(value, (list, tuple)):
        items = [map_leaves(item, change) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def recorder_among(values: Any) -> Recorder:
    """That of the first Traced. There is one."""
    found: list[Recorder] = []

    def look(value: Any) -> Any:
        if isinstance(value, Traced):
            found.append(value._recorder)
        return value

    map_leaves(values, look)
    return found[0]


def _operator(name: str, function: Callable[..., Any], *, is_reflected: bool = False) -> None:
    def call(self: Traced, *others: Any) -> Any:
        args = (*others, self) if is_reflected else (self, *others)
        return self._recorder.record(function, args, {})

    setattr(Traced, f"__{name}__", call)


def _reading(name: str, function: Callable[..., Any]) -> None:
    def read(self: Traced) -> Any:
        self._recorder.escape(f"takes its {name}")
        return function(self._array)

    setattr(Traced, f"__{name}__", read)


for _name in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
]:
    _operator(_name, getattr(operator, f"__{_name}__"))
    _operator(f"r{_name}", getattr(operator, f"__{_name}__"), is_reflected=True)
    _operator(f"i{_name}", getattr(operator, f"__i{_name}__"))
for _name in ["lt", "le", "gt", "ge", "eq", "ne", "getitem", "neg", "pos", "abs", "invert"]:
    _operator(_name, getattr(operator, f"__{_name}__"))
_READING: dict[str, Callable[..., Any]] = {
    "bool": bool, "int": int, "float": float, "complex": complex, "index": operator.index, "str": str,
}  # fmt: skip
for _name, _function in _READING.items():
    _reading(_name, _function)
