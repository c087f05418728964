"""Frames: a call of a function, and its answer, as bytes in shared memory.

    u32 magic | u32 bytes of the head | head: msgpack of a tree | zeros up to a multiple of 64 | payload

The head refers to the payload by offsets, and to memory that was lent beside the frame by its position.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.transport.plain import pack_tree, unpack_tree
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAGIC = 0x31464C5A  # "ZLF1"
_PREFIX = struct.Struct("<II")  # the magic, and the bytes of the head
HEAD_AT = _PREFIX.size
ALIGNMENT = 64
_ZEROS = bytes(ALIGNMENT)  # as much as a gap before what is aligned
MAX_HEAD_BYTES = 256 << 20
MAX_KNOWN_BYTES = 512  # a shorter head is not read again where it comes again
PLACED_AT = 1024  # where results that are made in an answer's memory begin in it; its head lies before
MODELS = "layerzero.models"  # as a module: whole models, which the worker opens by kind
NODE_ITEMS = 6  # of what stands for an array
IN_FRAME = -1  # as the position of memory: the frame's own payload
ON_GPU = -2  # likewise: memory that the caller has for a result on its GPU, whose number is in the place of the offset
OF_GPU = "gpu:"  # before the library of an array on a GPU
GPU_LIBRARIES = tuple(f"{OF_GPU}{library}" for library in ("", "torch", "cupy", "dlpack", "own"))
# What a frame asks for, and what an answer says: the first item of the head.
# GPU: a call that is on one, with the memory that its caller has for results there; TAKE: the same for those that
# had none, which AWAITS says; RETURNED_THERE: a result of which parts are on the GPU.
CALL, LOAD, FETCH, PING, HOLD, USE, RELEASE, NAME, NEXT, PLACE, MANY, GPU, TAKE = range(13)
RETURNED, RAISED, REFUSED, KEPT, LOADED, PONG, GONE, PLACED, SEVERAL, RETURNED_THERE, AWAITS = range(11)
# What USE does with an object: call a method of this name, read or set an attribute, give the object itself.
METHOD, GET, SET, ITSELF = range(4)
# What stays of the result of a call, for HOLD: all, or what is an object of the class whose method it is of.
NOTHING, ALL, OWN = range(3)
# What a name of a module or a class is: the first item of the answer to NAME.
VALUE, FUNCTION, CLASS, MODULE = range(4)
# The first item of what stands in a call for its code, where that depends on who serves it: [environment, code] follow.
BY_ENVIRONMENT = 0

Write = Callable[[memoryview], object]


@dataclass(frozen=True)
class Code:
    """A function by reference: what the worker imports, and the hash that its file must have. `root` goes onto
    sys.path; `is_main`: it is the caller's `__main__`. Without a file it is a name of a module of the environment."""

    module: str
    qualname: str
    file: str
    sha256: str
    root: str
    is_main: bool

    @classmethod
    def installed(cls, module: str, qualname: str) -> Code:
        """Of a module that the environment has."""
        return cls(module, qualname, "", "", "", is_main=False)

    def of(self, qualname: str) -> Code:
        """Another name of the same module."""
        return replace(self, qualname=qualname)

    @property
    def is_installed(self) -> bool:
        return not self.file

    @property
    def is_model(self) -> bool:
        return self.is_installed and self.module == MODELS

    @property
    def label(self) -> str:
        return f"{self.module}.{self.qualname}" if self.qualname else self.module

    def to_tree(self) -> list[Any]:
        return [self.module, self.qualname, self.file, self.sha256, self.root, self.is_main]

    @classmethod
    def from_tree(cls, tree: Any) -> Code:
        """Raises ProtocolError."""
        kinds = (str, str, str, str, str, bool)
        if type(tree) is not list or len(tree) != 6 or any(type(v) is not k for v, k in zip(tree, kinds, strict=True)):
            raise ProtocolError("no reference to a function")
        code = cls(*tree)
        if code.is_installed and code != cls.installed(code.module, code.qualname):
            raise ProtocolError("a name of the environment's has a file, a folder or a hash")
        return code


class Reference(NamedTuple):
    """An object that a worker holds for its client: nonce of the worker's start, and number, both of 64 random bits.
    `type`: what it is, in an answer."""

    nonce: int
    number: int
    type: str = ""

    @property
    def place(self) -> list[int]:
        """As it crosses in a call."""
        return [self.nonce, self.number]

    @classmethod
    def from_tree(cls, tree: Any, *, is_answer: bool = False) -> Reference:
        """Raises ProtocolError."""
        kinds = (int, int, str) if is_answer else (int, int)
        if type(tree) is not list or tuple(type(item) for item in tree[:4]) != kinds:
            raise ProtocolError("no reference to an object")
        return cls(*tree)


class Payload:
    """The parts of a frame beside its head, each at a multiple of ALIGNMENT; written by their `Write`s."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, Write]] = []
        self.nbytes = 0

    def add(self, nbytes: int, write: Write) -> int:
        """The offset of a new part."""
        offset = self.nbytes
        self.parts.append((offset, nbytes, write))
        self.nbytes = aligned(offset + nbytes)
        return offset

    def place_of(self, address: int, nbytes: int) -> int | None:
        """The offset of memory that has become a part where it lies; None for all other memory."""
        return None


class Frame:
    """A frame that can be written. `has_room`: its head ends before what was placed."""

    has_room = True

    def __init__(
        self, head: list[Any], payload: Payload | None = None, *, is_placed: bool = False, of: str = "arguments"
    ) -> None:
        """`is_placed`: the payload's offsets are those of the frame, from PLACED_AT on. `of`: whose values they are.
        Raises InvalidArgument for values that nobody would read."""
        packed = _packed(head, of)
        self._head = prefix(len(packed)) + packed
        self._payload = payload
        self._start = len(self._head)
        self._is_placed = is_placed and payload is not None
        if is_placed and payload is not None:
            self.has_room = self._start <= PLACED_AT
            self._start, self.nbytes = 0, payload.nbytes
            return
        self.nbytes = self._start
        if payload is not None and payload.parts:
            self._start = aligned(self._start)
            self.nbytes = self._start + payload.nbytes

    def write(self, target: memoryview) -> None:
        """Into at least `nbytes` bytes, all of which it decides: the same call is the same bytes, wherever it lies. Of
        what is placed the gaps stay as they are."""
        head = self._head
        end = len(head)
        target[:end] = head
        if self._payload is not None:
            first, is_placed = self._start, self._is_placed
            for offset, nbytes, write in self._payload.parts:
                start = first + offset
                if end < start and not is_placed:
                    target[end:start] = _ZEROS[: start - end]
                end = start + nbytes
                write(target[start:end])
            if end < self.nbytes and not is_placed:
                target[end : self.nbytes] = _ZEROS[: self.nbytes - end]

    def __bytes__(self) -> bytes:
        memory = bytearray(self.nbytes)
        self.write(memoryview(memory))
        return bytes(memory)


def _packed(head: list[Any], of: str) -> bytes:
    try:
        packed = pack_tree(head)
        too_much = f"{len(packed):,} bytes of values" if len(packed) > MAX_HEAD_BYTES else ""
    except (OverflowError, ValueError) as exc:  # a text or bytes of 4 GiB
        packed, too_much = b"", str(exc)
    if too_much:
        text = f"{of}: put bytes, texts and numbers into arrays, which have no bound"
        raise InvalidArgument(f"{text}: {too_much} beside arrays; allowed: {MAX_HEAD_BYTES:,}")
    return packed


def prefix(nbytes: int) -> bytes:
    """What comes before a head of so many bytes."""
    return _PREFIX.pack(MAGIC, nbytes)


def ping() -> Frame:
    return Frame([PING])


def pong() -> Frame:
    return Frame([PONG])


def read(memory: memoryview) -> tuple[list[Any], memoryview]:
    """Head and payload of a frame that another process wrote. The head is a copy, not to be changed: a list that begins
    with a number. Raises ProtocolError."""
    size = _size_of(memory)
    if size > min(len(memory) - HEAD_AT, MAX_HEAD_BYTES):
        raise ProtocolError(f"a head of {size} bytes in a frame of {len(memory)}")
    data = bytes(memory[HEAD_AT : HEAD_AT + size])
    return (_known_head if size <= MAX_KNOWN_BYTES else _head)(data), memory[aligned(HEAD_AT + size) :]


def head_of(start: bytes) -> tuple[int, list[Any]]:
    """Head of a frame that begins with these bytes, and where that ends. Raises ProtocolError where they are not all of
    it."""
    size = _size_of(start)
    if size > min(len(start) - HEAD_AT, MAX_KNOWN_BYTES):
        raise ProtocolError(f"a head of {size} bytes in {len(start)}")
    return HEAD_AT + size, _known_head(start[HEAD_AT : HEAD_AT + size])


def whole(start: bytes) -> bytes:
    """The frame that begins with these bytes, without its payload; none where they are not all of it, or no frame."""
    magic, size = _PREFIX.unpack_from(start) if len(start) >= HEAD_AT else (0, 0)
    return start[: HEAD_AT + size] if magic == MAGIC and size <= min(len(start) - HEAD_AT, MAX_KNOWN_BYTES) else b""


def _size_of(memory: memoryview | bytes) -> int:
    magic, size = _PREFIX.unpack_from(memory) if len(memory) >= HEAD_AT else (0, 0)
    if magic != MAGIC:
        raise ProtocolError("no frame of a function call")
    return int(size)


def _head(data: bytes) -> list[Any]:
    head = unpack_tree(data)
    if type(head) is not list or not head or type(head[0]) is not int:
        raise ProtocolError("a frame's head is no list that begins with a number")
    return head


_known_head = functools.lru_cache(maxsize=256)(_head)


def array_node(library: str, spec: TensorSpec, position: int, offset: int) -> list[Any]:
    """What stands for an array in a tree."""
    return [library, *spec.to_wire(), position, offset]


def read_array(node: list[Any], memories: Sequence[Any], libraries: tuple[str, ...]) -> tuple[str, TensorSpec, Any]:
    """Library, spec and memory of an array; `memories`: the payload first, then what was lent, each None or what has a
    length and is cut as a memoryview is. Raises ProtocolError, InvalidArgument for a spec that breaks the rules."""
    if len(node) != NODE_ITEMS:
        raise ProtocolError("an array without library, spec or place")
    library, dtype, shape, strides, position, offset = node
    if library not in libraries or type(position) is not int or type(offset) is not int:
        raise ProtocolError("an array without library, spec or place")
    are_lists = type(dtype) is str and type(shape) is list and type(strides) is list
    if not are_lists or not _INTEGERS.issuperset(map(type, (*shape, *strides))):  # as deep as a peer made them
        raise ProtocolError("an array without a dtype, or whose shape or strides are no integers")
    spec = _spec_of(dtype, tuple(shape), tuple(strides))
    memory = memories[position + 1] if IN_FRAME <= position < len(memories) - 1 else None
    if memory is None or offset < 0 or offset % spec.itemsize or offset + spec.span_bytes > len(memory):
        raise ProtocolError(f"{spec} at {offset} is outside of its memory {position}")
    return library, spec, memory[offset : offset + spec.span_bytes]


_INTEGERS = frozenset({int})


@functools.lru_cache(maxsize=1024)
def _spec_of(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorSpec:
    """Raises InvalidArgument."""
    return TensorSpec.from_wire([dtype, list(shape), list(strides)])


def aligned(nbytes: int) -> int:
    """So many bytes, up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
