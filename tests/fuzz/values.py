"""Mutations of plain values: bytes changed one by one seldom stay msgpack, or JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgpack

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -1.5, 1e308, float("nan"),
    float("inf"), "", "x", "../..", "\x00", "é" * 40, "a" * 300, "b" * 300 + ".py",
    [], {}, [[]], {"": 0},
)  # fmt: skip
ODD_BINARY: tuple[Any, ...] = (*ODD, b"", b"\xff" * 24, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2))
MAX_ITEMS = 64
# msgpack packs no more than 511 levels, and a peer may send 1024: put in after packing.
_DEEP, _DEPTHS = "\x01deep\x01", (30, 120, 600, 1000)


def mutated(data: bytes, rng: random.Random) -> bytes | None:
    """`data`, msgpack, with one value changed; None when it is not msgpack or cannot be packed again."""
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
        packed: bytes = msgpack.packb(changed(value, rng, ODD_BINARY))
    except Exception:  # msgpack raises ValueError, its own classes and more
        return None
    return packed.replace(msgpack.packb(_DEEP), b"\x91" * rng.choice(_DEPTHS) + b"\xc0")


def mutated_text(value: Any, rng: random.Random, dumps: Callable[[Any], str] = json.dumps) -> bytes:
    """A document with one value changed."""
    depth = rng.choice((100, 1000, 5000))
    return dumps(changed(value, rng)).replace(json.dumps(_DEEP), "[" * depth + "]" * depth).encode("utf-8", "replace")


def changed(value: Any, rng: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """Somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(10):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(("", "kind", "extra", "facts")): rng.choice(odd)}
        return {**value, key: changed(value[key], rng, odd)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1 if len(value) < MAX_ITEMS:
                return [*value, *value]
        return [*value[:at], changed(value[at], rng, odd), *value[at + 1 :]]
    return _replaced(value, rng, odd)


def _replaced(value: Any, rng: random.Random, odd: tuple[Any, ...]) -> Any:
    match rng.randrange(6):
        case 0 if isinstance(value, int):
            return max(min(value + rng.choice((-1, 1, 64, 1 << 20)), 2**64 - 1), -(2**63))
        case 1 if isinstance(value, (str, bytes)) and value:
            return value[: rng.randrange(len(value))] * rng.choice((0, 1, 2, 50))
        case 2:
            return [value] * rng.choice((1, 2, 17))
        case 3 if rng.random() < 0.3:
            return _DEEP
    return rng.choice(odd)
