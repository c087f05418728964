"""What _lending.h makes of a function's arguments is what functions/calling.py makes of them, or is left to that."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest

from layerzero.client.connection import arena as arenas
from layerzero.client.session import repeats
from layerzero.functions.calling import Arguments
from layerzero.ipc.transport.plain import unpack_tree
from layerzero.ipc.transport.wire import REF

pytestmark = pytest.mark.skipif(repeats.library is None, reason="not compiled")
OWN = 64 << 10  # what has an arena of its own
DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
)
SCALARS = (None, True, False, 0, 1, 127, 128, 255, 256, 65535, 65536, 1 << 32, (1 << 63) - 1, -1, -129, -(1 << 63), 1.5)
SCALARS += ("", "x", "y" * 40, "z" * 300, "\u00e9", b"", b"\0" * 40, b"x" * 300, float("-inf"))  # type: ignore[assignment]


class Registry(dict[Any, int]):
    """Arenas that the broker knows are those that were asked for."""

    on_change: Any = None

    def __init__(self) -> None:
        self.slots: list[memoryview] = []

    def __missing__(self, arena: Any) -> int:
        self[arena] = len(self) + 1
        return self[arena]


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def lend(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(arenas, "OWN_ARENA_BYTES", OWN)
    made = repeats.Repeats(mock.Mock(), mock.Mock(), registry, mock.Mock())  # type: ignore[arg-type]
    made.learn({"numpy"})
    yield made.lend
    arenas.pool.caches.discard(made)


def shared(nbytes: int, registry: Registry) -> Any:
    """Bytes of an arena that the broker knows."""
    memory, arena, _ = arenas.pool.allocate(nbytes)
    registry.slots.append(memory)
    registry[arena]
    if registry.on_change is not None:
        registry.on_change()
    return np.ndarray((nbytes,), np.uint8, memory)


def view_of(memory: Any, rng: random.Random) -> Any:
    """Some array in it."""
    dtype = np.dtype(rng.choice(DTYPES))
    start = dtype.itemsize * rng.randrange(8)
    flat = memory[start : start + 48 * dtype.itemsize].view(dtype)
    one = flat.reshape(rng.choice([(48,), (6, 8), (2, 3, 8), (48, 1), (1, 48), (2, 2, 2, 6)]))
    for _ in range(rng.randrange(3)):
        match rng.randrange(5):
            case 0:
                one = one.T
            case 1:
                one = one[:: rng.choice([1, 2, 3])]
            case 2:
                one = one[1:] if len(one) > 1 else one
            case 3:
                one = one[..., :1]
            case 4:
                one = np.broadcast_to(one, (2, *one.shape))
    if rng.random() < 0.3:
        one.setflags(write=False)
    return one


def demand_same(lend: Any, args: tuple[Any, ...], registry: Registry) -> None:
    given = Arguments(args, {}, ("plain",))
    assert not given.copies
    found = lend(args)
    assert found is not None, args
    tree, refs, count, nbytes = found
    assert unpack_tree(tree) == given.trees[0]
    assert refs == b"".join(REF.pack(registry[arena], 0, offset, size) for arena, offset, size in given.ranges)
    assert (count, nbytes) == (len(given.ranges), given.uncopied_bytes)


def test_it_is_what_the_python_makes(lend: Any, registry: Registry) -> None:
    rng = random.Random(0)
    memories = [shared(4096, registry), shared(OWN, registry)]  # the second has an arena of its own
    pick = [lambda: view_of(rng.choice(memories), rng), lambda: rng.choice(SCALARS)]
    for _ in range(300):
        demand_same(lend, tuple(rng.choice(pick)() for _ in range(rng.randrange(7))), registry)


def test_of_each_kind_of_scalar(lend: Any, registry: Registry) -> None:
    for one in SCALARS:
        demand_same(lend, (one,), registry)


def test_what_cannot_be_lent_as_it_lies_is_left_to_the_python(lend: Any, registry: Registry) -> None:
    memory = shared(4096, registry)
    floats = memory.view(np.float64)
    structured = memory[:50].view(np.dtype([("a", "u1"), ("b", "i4")]))
    several: list[Any] = [
        *(np.zeros(3), floats[::-1], memory[1:9].view(np.float64), floats[:0], floats.view(">f8"), structured["b"]),
        *(structured, memory[:32].view("c16"), memory[:16].view("M8[s]"), memory[:8].view("S8"), floats[:1][0]),
        *([1], (1,), {}, object(), 1 << 63, 1 << 100, -(1 << 70), "\ud800", "x" * 5000, memory.view(np.matrix)),
        *(memory.tobytes(), bytearray(b"x"), memoryview(memory)),
    ]
    for one in several:
        assert lend((one,)) is None, repr(one)[:100]
    assert lend(tuple(range(15))) is None
    unknown, _, _ = arenas.pool.allocate(OWN)  # to the broker
    assert lend((np.ndarray((OWN,), np.uint8, unknown),)) is None
    many = [shared(OWN, registry) for _ in range(9)]
    assert lend(tuple(many)) is None
    demand_same(lend, tuple(many[:8]), registry)
    assert lend(()) is not None
