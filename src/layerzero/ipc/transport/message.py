"""What all messages have in common: how they are packed, and what is checked of those that come."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, TypeVar, get_origin, get_type_hints

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.records import named_record
from layerzero.ipc.transport.plain import pack_body, unpack_body


@named_record
class Message:
    kind: ClassVar[str]


M = TypeVar("M", bound=Message)


_HINTS: dict[type[Message], dict[str, type]] = {}


def _hints(cls: type[Message]) -> dict[str, type]:
    """The fields of a message, and what each must be."""
    found = _HINTS.get(cls)
    if found is None:
        hints = get_type_hints(cls)
        found = _HINTS[cls] = {one.name: get_origin(hints[one.name]) or hints[one.name] for one in fields(cls)}
    return found


def encode(message: Message) -> bytes:
    """msgpack of the message's fields and its kind."""
    return pack_body({"kind": message.kind, **{name: getattr(message, name) for name in _hints(type(message))}})


def decode(data: bytes, *expected: type[M]) -> M:
    """The message in `data`, which must be one of `expected`. Raises ProtocolError saying what is wrong."""
    value = unpack_body(data)
    if not isinstance(value, dict):
        raise ProtocolError(f"message must be a map, got {type(value).__name__}")
    kind = value.get("kind")
    wanted = {cls.kind: cls for cls in expected}
    if not isinstance(kind, str) or kind not in wanted:
        raise ProtocolError(f"unexpected message kind {kind!r:.80}; expected {' or '.join(wanted)}")
    cls = wanted[kind]
    given: dict[str, Any] = {}
    for name, typ in _hints(cls).items():
        if name in value:
            item = value[name]
            if typ is float and type(item) is int:
                item = float(item)
            if type(item) is not typ:
                raise ProtocolError(f"{kind}.{name} must be {typ.__name__}, got {type(item).__name__}")
            given[name] = item
    try:
        return cls(**given)
    except TypeError as exc:
        raise ProtocolError(f"{kind}: {exc}") from exc
