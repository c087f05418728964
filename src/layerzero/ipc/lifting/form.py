"""What a lifted call is: steps on memory that whoever launches them provides, as plain data that crosses processes.

Addresses are not in it. Each place in a kernel's parameters that held one says what it pointed to: an input, an
output or scratch, and how far into it. Machine code is named by its SHA-256 and travels beside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES, TensorSpec

FORMAT = 1
MAX_STEPS = 256
MAX_PARAMETER_BYTES = 32764  # of a kernel: the driver's limit from CUDA 12.1 on
MAX_NAME = 65536  # templates of C++ have long names
MAX_SCRATCH = 64  # allocations
ATTRIBUTE_BYTES = 64  # of a CUlaunchAttributeValue
MAX_ATTRIBUTES = 8
MAX_SHARED_BYTES = 1 << 20
ALIGNMENTS = (1, 2, 4, 8, 16, 256)  # of addresses: the classes that are told apart

Kind = Literal["input", "output", "scratch"]
_KINDS: tuple[Kind, ...] = ("input", "output", "scratch")


class Address(NamedTuple):
    """A place in memory that is provided: bytes from the start of an input, an output or a piece of scratch."""

    kind: Kind
    number: int
    offset: int


class Patch(NamedTuple):
    """Eight bytes of parameters, from byte `at` on, that hold an address."""

    at: int
    address: Address


class Span(NamedTuple):
    """Bytes of parameters."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch. `params` are all parameters as one block, each at its place in `layout`; `padding` are bytes of them
    that nobody wrote. `attributes`: of the launch, CUlaunchAttributeID and value. `max_shared_bytes` and
    `is_cluster_size_free`: of the function (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    ..._NON_PORTABLE_CLUSTER_SIZE_ALLOWED)."""

    code: str  # SHA-256 of the module, in hexadecimal digits
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes
    layout: tuple[Span, ...]
    patches: tuple[Patch, ...]
    padding: tuple[Span, ...] = ()
    attributes: tuple[tuple[int, bytes], ...] = ()
    max_shared_bytes: int = 0
    is_cluster_size_free: bool = False


@dataclass(frozen=True, slots=True)
class Fill:
    """`count` elements of 1, 2 or 4 bytes are set to `value`."""

    target: Address
    value: int
    itemsize: int
    count: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes are copied on the GPU."""

    source: Address
    target: Address
    nbytes: int


Step = Kernel | Fill | Copy


@dataclass(frozen=True)
class Lifted:
    """A call of `kernel_id` as its library enqueues it: `steps`, one after the other, in one stream.

    `inputs` and `outputs` as in Call (workers/provider.py). `alignments`: of each input and then each output the
    alignment in bytes that its address must have, one of ALIGNMENTS; 0 for an input that is left out. `scratch`: bytes
    of each piece of memory that the steps use between them; nothing is in it before or after.
    """

    op: str
    kernel_id: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]
    alignments: tuple[int, ...]
    scratch: tuple[int, ...]
    steps: tuple[Step, ...]
    gpu: str = ""  # its name; machine code is for one kind of GPU
    driver: str = ""  # its version
    versions: Mapping[str, str] = field(default_factory=dict)  # of the libraries that it came from

    @property
    def codes(self) -> tuple[str, ...]:
        """The modules that are needed, each once."""
        return tuple(dict.fromkeys(step.code for step in self.steps if isinstance(step, Kernel)))

    def aliases(self) -> dict[int, int]:
        """Outputs that are inputs as well, and which (ipc/vocabulary/ops.py: in_place)."""
        op = OPS[self.op]
        return {n: op.inputs.index(name) for n, name in enumerate(op.outputs) if name in op.inputs}

    def is_like(self, other: Lifted) -> bool:
        """Whether both are the same kernels, used in the same way, on tensors of other extents: numbers, grids and
        offsets may differ, and nothing else. Then what a proof has shown of one holds for the other."""
        return (
            (self.op, self.kernel_id, self.alignments, len(self.scratch), self.gpu, self.driver)
            == (other.op, other.kernel_id, other.alignments, len(other.scratch), other.gpu, other.driver)
            and self.versions == other.versions
            and self.attrs == other.attrs
            and list(map(_outline, self.steps)) == list(map(_outline, other.steps))
        )

    def pack(self) -> bytes:
        body = {
            "format": FORMAT,
            "op": self.op,
            "kernel_id": self.kernel_id,
            "inputs": [None if spec is None else spec.to_wire() for spec in self.inputs],
            "outputs": [spec.to_wire() for spec in self.outputs],
            "attrs": dict(self.attrs),
            "alignments": list(self.alignments),
            "scratch": list(self.scratch),
            "steps": [_pack_step(step) for step in self.steps],
            "gpu": self.gpu,
            "driver": self.driver,
            "versions": dict(self.versions),
        }
        return pack_body(body)

    @classmethod
    def unpack(cls, data: bytes) -> Lifted:
        """Rebuild and check what another process or a file said: every address lies in memory that the specs and
        `scratch` provide. Raises ProtocolError."""
        try:
            return _unpack(unpack_body(data))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, InvalidArgument) as exc:
            raise ProtocolError(f"no lifted call: {type(exc).__name__}: {exc}"[:500]) from exc


def _outline(step: Step) -> tuple[Any, ...]:
    """What a step is whatever the extents of its tensors."""
    if isinstance(step, Fill):
        return Fill, step.target[:2], step.value, step.itemsize
    if isinstance(step, Copy):
        return Copy, step.source[:2], step.target[:2]
    patches = tuple((patch.at, patch.address[:2]) for patch in step.patches)
    settled = (step.block, step.layout, step.attributes, step.max_shared_bytes, step.is_cluster_size_free)
    return Kernel, step.code, step.name, *settled, patches


def digest(data: bytes) -> str:
    """By which machine code is named."""
    return hashlib.sha256(data).hexdigest()


def alignment_class(address: int) -> int:
    """The largest of ALIGNMENTS that divides the address."""
    return next(one for one in reversed(ALIGNMENTS) if address % one == 0)


def _pack_address(address: Address) -> list[Any]:
    return [_KINDS.index(address.kind), address.number, address.offset]


def _pack_step(step: Step) -> dict[str, Any]:
    if isinstance(step, Fill):
        return {"fill": [_pack_address(step.target), step.value, step.itemsize, step.count]}
    if isinstance(step, Copy):
        return {"copy": [_pack_address(step.source), _pack_address(step.target), step.nbytes]}
    return {
        "kernel": step.name,
        "code": step.code,
        "grid": list(step.grid),
        "block": list(step.block),
        "shared_bytes": step.shared_bytes,
        "params": step.params,
        "layout": [list(span) for span in step.layout],
        "patches": [[patch.at, _pack_address(patch.address)] for patch in step.patches],
        "padding": [list(span) for span in step.padding],
        "attributes": [list(one) for one in step.attributes],
        "max_shared_bytes": step.max_shared_bytes,
        "is_cluster_size_free": step.is_cluster_size_free,
    }


def _unpack(value: Any) -> Lifted:
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r:.20}; known: {FORMAT}")
    op = OPS[_text(value["op"])]
    inputs = tuple(None if spec is None else TensorSpec.from_wire(spec) for spec in value["inputs"])
    outputs = tuple(TensorSpec.from_wire(spec) for spec in value["outputs"])
    if len(inputs) != len(op.inputs) or len(outputs) != len(op.outputs):
        raise ValueError(f"{op.name} has {len(op.inputs)} inputs and {len(op.outputs)} outputs")
    scratch = tuple(_number(nbytes, 1, MAX_NBYTES) for nbytes in _listed(value["scratch"], MAX_SCRATCH))
    alignments = tuple(_number(one, 0, ALIGNMENTS[-1]) for one in value["alignments"])
    if len(alignments) != len(inputs) + len(outputs) or not set(alignments) <= {0, *ALIGNMENTS}:
        raise ValueError(f"alignments {alignments!r:.100}; allowed: one of {ALIGNMENTS} for each tensor")
    extents: dict[str, Sequence[int]] = {
        "input": [0 if spec is None else spec.span_bytes for spec in inputs],
        "output": [spec.span_bytes for spec in outputs],
        "scratch": scratch,
    }
    return Lifted(
        op=op.name,
        kernel_id=_text(value["kernel_id"]),
        inputs=inputs,
        outputs=outputs,
        attrs=_map(value["attrs"]),
        alignments=alignments,
        scratch=scratch,
        steps=tuple(_unpack_step(step, extents) for step in _listed(value["steps"], MAX_STEPS)),
        gpu=_text(value["gpu"]),
        driver=_text(value["driver"]),
        versions={name: _text(version) for name, version in _map(value["versions"]).items()},
    )


def _unpack_step(value: Any, extents: Mapping[str, Sequence[int]]) -> Step:
    if "fill" in value:
        target, number, itemsize, count = value["fill"]
        if itemsize not in (1, 2, 4):
            raise ValueError(f"elements of {itemsize!r} bytes; allowed: 1, 2, 4")
        count = _number(count, 1, MAX_NBYTES)
        return Fill(
            _address(target, extents, itemsize * count), _number(number, 0, (1 << 8 * itemsize) - 1), itemsize, count
        )
    if "copy" in value:
        source, target, nbytes = value["copy"]
        nbytes = _number(nbytes, 1, MAX_NBYTES)
        return Copy(_address(source, extents, nbytes), _address(target, extents, nbytes), nbytes)
    params = value["params"]
    if type(params) is not bytes or len(params) > MAX_PARAMETER_BYTES:
        raise ValueError(f"parameters must be at most {MAX_PARAMETER_BYTES} bytes")
    code = _text(value["code"])
    if len(code) != 64 or not set(code) <= set("0123456789abcdef"):
        raise ValueError(f"machine code {code!r:.80} is no SHA-256")
    return Kernel(
        code=code,
        name=_text(value["kernel"], MAX_NAME),
        grid=_extents(value["grid"], (1 << 31) - 1),
        block=_extents(value["block"], 1024),
        shared_bytes=_number(value["shared_bytes"], 0, MAX_SHARED_BYTES),
        params=params,
        layout=tuple(_spans(value["layout"], len(params))),
        patches=tuple(
            Patch(_number(at, 0, len(params) - 8), _address(address, extents, 0))
            for at, address in _listed(value["patches"], MAX_PARAMETER_BYTES)
        ),
        padding=tuple(_spans(value["padding"], len(params))),
        attributes=tuple(
            (_number(which, 0, 1 << 16), _value(data)) for which, data in _listed(value["attributes"], MAX_ATTRIBUTES)
        ),
        max_shared_bytes=_number(value["max_shared_bytes"], 0, MAX_SHARED_BYTES),
        is_cluster_size_free=value["is_cluster_size_free"] is True,
    )


def _address(value: Any, extents: Mapping[str, Sequence[int]], nbytes: int) -> Address:
    """`nbytes` from there on must be provided; at least the address itself must not be behind the end."""
    number, index, offset = value
    kind = _KINDS[_number(number, 0, len(_KINDS) - 1)]
    room = extents[kind][_number(index, 0, len(extents[kind]) - 1)]
    if _number(offset, 0, room) + nbytes > room:
        raise ValueError(f"{nbytes} bytes at {offset} of {kind} {index}, which has {room}")
    return Address(kind, index, offset)


def _spans(values: Any, nbytes: int) -> Iterator[Span]:
    for offset, length in _listed(values, MAX_PARAMETER_BYTES):
        span = Span(_number(offset, 0, nbytes), _number(length, 1, nbytes))
        if span.offset + span.nbytes > nbytes:
            raise ValueError(f"{span} lies outside of {nbytes} bytes")
        yield span


def _extents(value: Any, most: int) -> tuple[int, int, int]:
    x, y, z = value
    return _number(x, 1, most), _number(y, 1, most), _number(z, 1, most)


def _value(data: Any) -> bytes:
    if type(data) is not bytes or len(data) != ATTRIBUTE_BYTES:
        raise ValueError(f"a launch attribute has {ATTRIBUTE_BYTES} bytes")
    return data


def _number(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is not within {least} to {most}")
    return value


def _text(value: Any, most: int = 1024) -> str:
    if type(value) is not str or len(value) > most:
        raise ValueError(f"{value!r:.40} is no text of at most {most} characters")
    return value


def _map(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{value!r:.40} is no map")
    return value


def _listed(value: Any, most: int) -> list[Any]:
    if type(value) is not list or len(value) > most:
        raise ValueError(f"{value!r:.40} is no list of at most {most}")
    return value
