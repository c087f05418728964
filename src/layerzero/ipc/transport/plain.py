"""Plain values in msgpack: what bodies of frames and messages are made of."""

from __future__ import annotations

from typing import Any

import msgpack

from layerzero.ipc.errors import ProtocolError

MAX_DEPTH = 32  # of a body; ours have 9 at most
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def pack_body(value: Any) -> bytes:
    """msgpack of a plain value."""
    packed: bytes = msgpack.packb(value)
    return packed


def unpack_body(data: bytes) -> Any:
    """A plain value: None, booleans, numbers, text and bytes, in lists and in maps with keys of text, at most MAX_DEPTH
    deep. Raises ProtocolError on anything else."""
    try:
        value = msgpack.unpackb(data, strict_map_key=True)
    except Exception as exc:  # msgpack raises ValueError, its own classes and more, by the bytes it gets
        raise ProtocolError(f"not msgpack: {type(exc).__name__}: {exc}") from exc
    _check_plain(value)
    return value


def _check_plain(value: Any) -> None:
    """What passes can be shown, hashed as JSON and packed again: repr() and packb() give up on deeper values."""
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is list:
                deeper += item
            elif kind is dict:
                if any(type(key) is not str for key in item):
                    raise ProtocolError("a map has a key that is not text")
                deeper += item.values()
            elif kind not in _SCALARS:
                raise ProtocolError(f"a value of msgpack's extended type {kind.__name__}; allowed: plain ones")
        if not deeper:
            return
        level = deeper
    raise ProtocolError(f"a value is nested more than {MAX_DEPTH} deep")


def pack_tree(value: Any) -> bytes:
    """msgpack of a tree (ipc/functions/values.py). Text may hold lone surrogates."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def unpack_tree(data: bytes | memoryview) -> Any:
    """What `pack_tree` packed, unchecked but for its form: scalars, in lists. Raises ProtocolError."""
    try:
        return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=True)
    except Exception as exc:  # as above
        raise ProtocolError(f"not msgpack: {type(exc).__name__}: {exc}"[:500]) from exc
