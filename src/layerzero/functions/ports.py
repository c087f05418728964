"""Inputs and outputs of whole models: names, dtypes and shapes, and arguments compared with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerzero.client.arrays.recognition import describe
from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NDIM, TensorSpec

MAX_PORTS = 4096


@dataclass(frozen=True)
class Port:
    """An input or an output of a model. `dtype`: None where the file does not tell. `shape`: sizes, names of those that
    vary, None for sizes without a name; None as a whole where the file does not tell."""

    name: str
    dtype: str | None
    shape: tuple[int | str | None, ...] | None
    is_optional: bool = False

    def __str__(self) -> str:
        dims = "" if self.shape is None else f"[{', '.join('?' if one is None else str(one) for one in self.shape)}]"
        return f"{self.name}: {self.dtype or 'any dtype'}{dims}"

    @classmethod
    def from_tree(cls, tree: Any) -> Port:
        """Raises ProtocolError."""
        match tree:
            case [str(name), None | str() as dtype, dims, bool(is_optional)] if dtype is None or dtype in ITEMSIZE:
                if dims is None:
                    return cls(name, dtype, None, is_optional)
                if type(dims) is list and len(dims) <= MAX_NDIM and all(_is_size(one) for one in dims):
                    return cls(name, dtype, tuple(dims), is_optional)
        raise ProtocolError("no input or output of a model")


def _is_size(value: Any) -> bool:
    return value is None or type(value) is str or (type(value) is int and value >= 0)


def ports(tree: Any) -> list[tuple[Port, ...]]:
    """Inputs and outputs, as a worker tells them. Raises ProtocolError."""
    if type(tree) is not list or [type(one) for one in tree] != [list, list] or max(map(len, tree)) > MAX_PORTS:
        raise ProtocolError("no inputs and outputs of a model")
    return [tuple(map(Port.from_tree, several)) for several in tree]


class Signature:
    """What calls of a model are compared with."""

    def __init__(self, label: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...]) -> None:
        self._label, self.inputs, self.outputs = label, inputs, outputs

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by the names of inputs. Raises InvalidArgument, which names the input and what is allowed."""
        names = [one.name for one in self.inputs]
        if len(args) > len(names):
            raise InvalidArgument(f"{self._label} is given {len(args)} inputs; {self._allowed}")
        found = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names:
                raise InvalidArgument(f"{self._label} has no input {name!r:.80}; {self._allowed}")
            if name in found:
                raise InvalidArgument(f"{self._label}: input {name!r:.80} is given twice; {self._allowed}")
            found[name] = value
        for port in self.inputs:
            if port.name not in found and not port.is_optional:
                raise InvalidArgument(f"{self._label}: input {port.name!r:.80} is missing; {self._allowed}")
        return found

    def sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The sizes that vary, by name. Raises InvalidArgument for a dtype or a shape that an input does not have."""
        sizes: dict[str, tuple[int, str]] = {}
        for port in self.inputs:
            if port.name in given and port.dtype is not None:
                self._compare(port, given[port.name], sizes)
        return {name: size for name, (size, _) in sizes.items()}

    def _compare(self, port: Port, value: Any, sizes: dict[str, tuple[int, str]]) -> None:
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            self._refuse(port, f"is {type(value).__qualname__}")
        spec = describe(value).spec
        if spec.dtype != port.dtype:
            self._refuse(port, f"is {spec.dtype}{list(spec.shape)}; convert it")
        if port.shape is None:
            return
        if len(spec.shape) != len(port.shape):
            self._refuse(port, f"has {len(spec.shape)} dimensions, {list(spec.shape)}")
        for dim, size in zip(port.shape, spec.shape, strict=True):
            if isinstance(dim, int) and size != dim:
                self._refuse(port, f"is {list(spec.shape)}")
            if isinstance(dim, str):
                known, where = sizes.setdefault(dim, (size, port.name))
                if known != size:
                    self._refuse(port, f"is {list(spec.shape)}, and {dim!r} is {known} in {where!r}")

    def _refuse(self, port: Port, what: str) -> None:
        raise InvalidArgument(f"{self._label}: input {port.name!r:.80} {what}; allowed: {port}")

    @property
    def _allowed(self) -> str:
        return f"allowed: {'; '.join(map(str, self.inputs)) or 'no inputs'}"

    def room(self, sizes: Mapping[str, int]) -> int:
        """Bytes of an answer that has the outputs; 0 where their shapes are not known before."""
        total = frames.PLACED_AT
        for port in self.outputs:
            if port.dtype is None or port.shape is None:
                return 0
            dims = [sizes.get(dim, -1) if isinstance(dim, str) else -1 if dim is None else dim for dim in port.shape]
            if min(dims, default=0) < 0:
                return 0
            total += frames.aligned(TensorSpec.contiguous(port.dtype, tuple(dims)).span_bytes)
        return total
