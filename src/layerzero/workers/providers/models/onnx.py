"""ONNX models as sessions of ONNX Runtime, whose inputs and outputs are memory of callers."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.workers.functions.placing import placing
from layerzero.workers.providers.models.file import ModelFile

MAX_KNOWN = 256  # shapes of results, by shapes of inputs
_SAME = ["float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = {"float": "float32", "double": "float64", **{name: name for name in _SAME}}
Shape = tuple[int, ...]
_log = logging.getLogger("layerzero.models")


class Onnx:
    """A session. Outputs whose shapes the graph tells, or an earlier run with inputs of these shapes, are written where
    the caller gets them."""

    def __init__(self, path: str, sha256: str) -> None:
        """Raises InvalidArgument, and what ONNX Runtime raises."""
        try:
            import onnxruntime
        except ImportError as exc:
            raise InvalidArgument("this environment has no onnxruntime; add it to its requires") from exc
        with ModelFile(path, sha256) as file:
            self._session = onnxruntime.InferenceSession(file.read(), providers=["CPUExecutionProvider"])
        self._inputs = [_described(one) for one in self._session.get_inputs()]
        self._outputs = [_described(one) for one in self._session.get_outputs()]
        refused = [name for name, dtype, *_ in self._inputs if dtype is None]
        if refused:
            kinds = {one.name: one.type for one in self._session.get_inputs()}
            allowed = ", ".join(sorted(DTYPES.values()))
            raise InvalidArgument(f"input {refused[0]!r} is {kinds[refused[0]]}; allowed: tensors of {allowed}")
        self._known: OrderedDict[tuple[Shape, ...], list[Shape | None]] = OrderedDict()

    def describe(self) -> list[list[list[Any]]]:
        """Inputs and outputs: name, dtype, shape, whether it may be left out."""
        return [self._inputs, self._outputs]

    def run(self, *arrays: Any) -> Any:
        """Of all inputs, in order: the output, or a tuple of several."""
        key = tuple(array.shape for array in arrays)
        shapes = self._known.get(key)
        if shapes is None:
            shapes = self._told(key)
        if any(shapes):
            try:
                return self._note(key, self._bound(arrays, shapes))
            except Exception as exc:  # its outputs may be other than the graph says
                placing.forget()
                found = self._note(key, self._bound(arrays, [None] * len(shapes)), is_placed=False)
                _log.warning("its outputs are not as the graph says, and are copied: %.300s", exc)
                return found
        return self._note(key, self._bound(arrays, shapes))

    def _told(self, given: tuple[Shape, ...]) -> list[Shape | None]:
        """The shapes of the outputs as the graph tells them."""
        sizes: dict[str, int] = {}
        for (_, _, dims, _), shape in zip(self._inputs, given):  # noqa: B905  # of Python 3.10
            sizes |= {dim: size for dim, size in zip(dims, shape) if isinstance(dim, str)}  # noqa: B905
        return [_sized(dims, sizes) if dtype is not None else None for _, dtype, dims, _ in self._outputs]

    def _bound(self, arrays: tuple[Any, ...], shapes: list[Shape | None]) -> list[Any]:
        import numpy

        binding = self._session.io_binding()
        kept = []
        for (name, dtype, _, _), array in zip(self._inputs, arrays):  # noqa: B905
            dense = numpy.ascontiguousarray(array)
            kept.append(dense)
            kind, address = numpy.dtype(dtype), dense.ctypes.data
            binding.bind_input(name, "cpu", 0, kind.type, dense.shape, address)
        placed: list[Any] = []
        for (name, dtype, _, _), shape in zip(self._outputs, shapes):  # noqa: B905
            kind = numpy.dtype(dtype or "uint8")
            memory = None if shape is None else placing.take(kind.itemsize * math.prod(shape))
            if memory is None:
                placed.append(None)
                binding.bind_output(name, "cpu")
                continue
            whole = numpy.frombuffer(memory, kind).reshape(shape)
            placed.append(whole)
            binding.bind_output(name, "cpu", 0, kind.type, whole.shape, whole.ctypes.data)
        self._session.run_with_iobinding(binding)
        if all(one is not None for one in placed):
            return placed
        values = binding.get_outputs()
        return [value.numpy() if one is None else one for one, value in zip(placed, values)]  # noqa: B905

    def _note(self, key: tuple[Shape, ...], found: list[Any], *, is_placed: bool = True) -> Any:
        if key not in self._known:
            self._known[key] = [one.shape if is_placed and hasattr(one, "shape") else None for one in found]
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return found[0] if len(found) == 1 else tuple(found)


def _described(one: Any) -> list[Any]:
    kind = str(one.type)
    dtype = DTYPES.get(kind[7:-1]) if kind.startswith("tensor(") else None
    dims = [dim if isinstance(dim, (int, str)) else None for dim in one.shape or []]
    return [one.name, dtype, dims, False]


def _sized(dims: list[Any], sizes: dict[str, int]) -> Shape | None:
    found = [sizes.get(dim) if isinstance(dim, str) else dim for dim in dims]
    return None if None in found else tuple(found)  # type: ignore[arg-type]
