"""Frames of function calls: whatever they say, a value comes out that can go back, or a typed error; no array lies
outside of the memory that was lent."""

from __future__ import annotations

import dataclasses
import enum
import random
from typing import Any

from tests.fuzz import values as mutations

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code, Frame, Payload, Reference
from layerzero.ipc.functions.surface import Surface
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions.device import Span, host_array, outs_of, span_of
from layerzero.workers.functions.objects import Held, Objects

TYPED = (ProtocolError, InvalidArgument)
LENT = memoryview(bytes(256))
ON_GPU, END = Span(1 << 20, 256, 0), (1 << 20) + 256
CODE = Code("shop.sales", "total", "/srv/shop/sales.py", "0" * 64, "/srv", is_main=False)
OBJECTS, HELD = Objects("plain"), Held("object", CODE)
REFERENCE = OBJECTS.add(1, HELD)


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


class _Array:
    """An array as it was opened. No dataclass, which would cross as one."""

    def __init__(self, node: list[Any]) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"_Array({self.node!r})"


def resolve(module: str, name: str) -> Any:
    found = {"Colour": Colour, "Pair": Pair, "run": run}.get(name)
    if module != __name__ or found is None:
        raise InvalidArgument(f"no {name}")
    return found


def put(value: Any) -> list[Any] | None:
    return [*value.node] if type(value) is _Array else None


class _Held:
    """A reference, as it came."""

    def __init__(self, node: list[Any]) -> None:
        Reference.from_tree(node, is_answer=len(node) == 3)
        self.node = node

    def __repr__(self) -> str:
        return f"_Held({self.node!r})"


def refer(value: Any) -> list[Any] | None:
    return value.node if type(value) is _Held else None


def find(reference: Any) -> None:
    """An object is found by its own reference alone."""
    assert (OBJECTS.find(1, reference) is HELD) == (reference == REFERENCE)
    assert OBJECTS.find(2, reference) is None


def run(data: bytes) -> None:
    head, payload = frames.read(memoryview(data))
    if head[0] in (frames.HOLD, frames.PLACE) and len(head) > 1 and type(head[1]) is list and head[1]:
        head = head[1]

    memories = [payload, LENT, None, ON_GPU]

    def get(node: list[Any]) -> _Array:
        if node and type(node[0]) is str and node[0].startswith(frames.OF_GPU):
            _, spec, span = span_of(node, memories)
            end = span.pointer + spec.span_bytes
            assert not spec.span_bytes or (len(span) == spec.span_bytes and span.pointer >= 1 << 20 and end <= END)
            return _Array([node[0], *spec.to_wire(), *node[4:]])
        library, spec, memory = host_array(node, memories, ("numpy", "torch"))
        assert library in ("numpy", "torch")
        assert len(memory) == spec.span_bytes
        return _Array([library, *spec.to_wire(), *node[4:]])

    match head:
        case [frames.GPU, list(call), list(outs), bool()] if call:
            outs_of(outs, memories)
            head = call
        case [frames.TAKE, int(), list(outs)]:
            outs_of(outs, memories)
            return

    for tree in head[1:]:
        if head[0] in (frames.USE, frames.NEXT, frames.RELEASE) and tree is head[1]:
            find(tree if head[0] != frames.RELEASE else next(iter(tree), None) if type(tree) is list else None)
            continue
        if (
            head[0] in (frames.CALL, frames.LOAD, frames.NAME)
            and type(tree) is list
            and len(tree) == 6
            and type(tree[0]) is str
        ):
            assert Code.from_tree(tree).to_tree() == tree
            continue
        value = values.decode(tree, get, resolve, "value", _Held)
        if type(value) is list and value[:1] == [frames.CLASS]:
            surface = Surface.from_tree(value[1:])
            assert Surface.from_tree(surface.to_tree()) == surface
        again = values.encode(value, put, "value", refer)  # what has come can go
        assert repr(values.decode(again, get, resolve, "value", _Held)) == repr(value)


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    """One value of the head."""
    size = int.from_bytes(data[4:8], "little")
    head = mutations.mutated(data[8 : 8 + size], rng)
    if head is None:
        return None
    start = -(-(8 + size) // frames.ALIGNMENT) * frames.ALIGNMENT
    room = -(8 + len(head)) % frames.ALIGNMENT
    return data[:4] + len(head).to_bytes(4, "little") + head + bytes(room) + data[start:]


def seeds() -> dict[str, bytes]:
    code = CODE.to_tree()
    payload = Payload()
    offset = payload.add(24, lambda target: target.__setitem__(slice(None), bytes(range(24))))
    here = _Array(frames.array_node("numpy", TensorSpec.contiguous("float32", (2, 3)), frames.IN_FRAME, offset))
    lent = _Array(frames.array_node("torch", TensorSpec("int16", (4, 2), (16, 1)), 0, 8))
    value = [None, True, -1, 2.5, "a\ud800", b"b", (1, [2]), {3: {None: 1 << 70}}, Colour.BLUE, Pair(1, [Pair(2, 3)])]

    outside = frames.array_node("numpy", TensorSpec.contiguous("int8", (9,)), 0, 250)

    def tree(value: Any) -> Any:
        return values.encode(value, put, "value", refer)

    there = frames.array_node("gpu:torch", TensorSpec("int16", (4, 2), (16, 1)), 2, 8)
    room = frames.array_node("gpu:", TensorSpec.contiguous("float32", (2, 3)), 2, 64)
    on_gpu = [frames.CALL, code, tree([_Array(there), here]), tree({}), 30]
    placed = [frames.CALL, code, tree([here]), tree({}), 30]
    return {
        "call": bytes(Frame([frames.CALL, code, tree(value), tree({"x": lent}), 30])),
        "arrays": bytes(Frame([frames.CALL, code, tree([here, lent, here]), tree({}), 30], payload)),
        "hold": bytes(Frame([frames.HOLD, [frames.CALL, code, tree([1, here]), tree({}), 30], frames.OWN], payload)),
        "place": bytes(Frame([frames.PLACE, placed, [["numpy", "int8", [2], [1]]]], payload)),
        "on a GPU": bytes(Frame([frames.GPU, on_gpu, [room], False], payload)),
        "take": bytes(Frame([frames.TAKE, 3, [room]])),
        "returned there": bytes(Frame([frames.RETURNED_THERE, tree([1, _Array(there)]), [], [0]])),
        "held": bytes(Frame([frames.CALL, code, tree([_Held(REFERENCE), 1]), tree({"x": _Held([1, 2])}), 30])),
        "itself": bytes(Frame([frames.USE, REFERENCE, frames.ITSELF, "", tree([]), tree({}), 30])),
        "use": bytes(Frame([frames.USE, REFERENCE, frames.METHOD, "add", tree([lent]), tree({"n": 1}), 30])),
        "set": bytes(Frame([frames.USE, [1, 2], frames.SET, "count", tree([3]), tree({}), 30])),
        "release": bytes(Frame([frames.RELEASE, [REFERENCE, [1, 2]]])),
        "gone": bytes(Frame([frames.GONE, REFERENCE, "args[0]"])),
        "holds": bytes(Frame([frames.RETURNED, tree(_Held([1, 2, "str"])), []])),
        "load": bytes(Frame([frames.LOAD, code])),
        "next": bytes(Frame([frames.NEXT, REFERENCE, 30])),
        "name": bytes(Frame([frames.NAME, Code.installed("shop", "sales.total").to_tree(), 30])),
        "class": bytes(Frame([frames.RETURNED, tree([frames.CLASS, {"a": 1, "b": 6}, ["__len__"]]), []])),
        "fetch": bytes(Frame([frames.FETCH, 7])),
        "returned": bytes(Frame([frames.RETURNED, tree({"y": [here]}), []], payload)),
        "raised": bytes(Frame([frames.RAISED, "ValueError", "no", "Traceback", []])),
        "kept": bytes(Frame([frames.KEPT, 3, 1 << 20])),
        "no function": bytes(Frame([frames.RETURNED, [values.ENUM, __name__, "run", "RED", 1], []])),
        "deep": bytes(Frame([frames.RETURNED, _deep(80), []])),
        "long head": frames.MAGIC.to_bytes(4, "little") + b"\xff" * 8,
        "outside": bytes(Frame([frames.RETURNED, [values.ARRAY, *outside], []])),
        "text": pack_tree("no frame"),
    }


def _deep(depth: int) -> Any:
    tree: Any = [values.LIST]
    for _ in range(depth):
        tree = [values.LIST, tree]
    return tree
