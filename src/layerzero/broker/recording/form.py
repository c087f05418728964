"""Values of the core as JSON and back, by the types of their fields. Pure.

What is read may be anybody's: only classes that events name are made, each field is checked against its type, and
nothing else is looked up by a name from outside.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.selection.policy_values import Known
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError, from_wire

MAX_DEPTH = 40
IDENTITY = "identity"
# Hashes of what callers computed with, and results: of these a token is kept, which says only what is equal.
TOKENS = frozenset({("CallArrived", "digest"), ("CallPoisoned", "digest"), ("CallRan", "body")})
# What programs and libraries have printed: it is not kept.
WORDS = frozenset({"stderr_tail", "traceback"})
AS_THEY_ARE = frozenset({type(None), bool, int, str})
_NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Names:
    """How identities of peers and tokens are written; this is of what was read, where both are texts already."""

    def peer(self, identity: bytes) -> str:
        return identity.decode("ascii", "replace")

    def token(self, value: bytes) -> str:
        return value.hex()


def encode(value: Any, names: Names) -> Any:
    """A value of an event as JSON. Raises TypeError for one that has no form, which is a mistake of ours."""
    if type(value) in AS_THEY_ARE:
        return value
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, LayerZeroError):
        return {"code": value.code, "message": value.message[:1000], "facts": _plain_facts(value.facts)}
    if isinstance(value, Policy):
        return [_layer(layer) for layer in value.layers]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return _fields_of(value, names)
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: encode(one, names) for key, one in value.items()}
        return [[encode(key, names), encode(one, names)] for key, one in value.items()]
    return [encode(one, names) for one in value]  # of a set in the order in which the core will meet them


def _fields_of(value: Any, names: Names) -> dict[str, Any]:
    kind = type(value)
    made: dict[str, Any] = {}
    for name in field_names(kind):
        its = getattr(value, name)
        if type(its) in AS_THEY_ARE and name not in WORDS:
            made[name] = its
        elif name == IDENTITY:
            made[name] = names.peer(its)
        elif (kind.__name__, name) in TOKENS:
            made[name] = names.token(its)
        elif name in WORDS:
            made[name] = ""
        else:
            made[name] = encode(its, names)
    return made


_names: dict[Any, tuple[str, ...]] = {}


def field_names(kind: Any) -> tuple[str, ...]:
    """Of a dataclass or a named tuple."""
    found = _names.get(kind)
    if found is None:
        made = kind._fields if hasattr(kind, "_fields") else [one.name for one in dataclasses.fields(kind)]
        found = _names[kind] = tuple(made)
    return found


def _plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, and texts that are names; what was printed, and long texts, are not among them."""
    return {
        name: one
        for name, one in facts.items()
        if name not in WORDS
        and (one is None or isinstance(one, bool | int) or (isinstance(one, str) and len(one) < 200))
    }


def _layer(layer: Layer) -> dict[str, Any]:
    lines = [[list(place), line] for place, line in layer.lines.items()]
    return {"origin": layer.origin, "values": _plain(layer.values), "lines": lines}


def _plain(value: Any) -> Any:
    """A layer's values as they were written; what YAML has and JSON has not, as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# --- and back


def decode(kind: Any, value: Any, known: Known | None = None, place: str = "", depth: int = 0) -> Any:
    """What `encode` has written of a value of this type. `known`: names for policies. Raises InvalidArgument, which
    names the place."""
    if depth > MAX_DEPTH:
        raise _wrong(place, "nested too deep")
    try:
        return _decoder(kind)(value, known, place, depth + 1)
    except InvalidArgument:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, binascii.Error, ProtocolError, ValidationError) as exc:
        raise _wrong(place, str(exc).partition("\n")[0]) from exc


def _wrong(place: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{place or 'value'}: {why:.200}")


Decoder = Callable[[Any, Known | None, str, int], Any]


@cache
def _decoder(kind: Any) -> Decoder:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return _any
    if kind is None or kind is type(None):
        return lambda value, known, place, depth: _exactly(type(None), value, place)
    if hasattr(kind, "__metadata__"):  # Annotated
        return _decoder(kind.__origin__)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return lambda value, known, place, depth: _one_of(args, value, place)
    if origin is tuple and not (len(args) == 2 and args[1] is ...):
        return _fixed(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*args)
    if isinstance(origin, type):  # list, tuple[T, ...], Sequence, Collection, frozenset
        made: type = origin if origin in (frozenset, list) else tuple
        return lambda value, known, place, depth: made(
            decode(args[0], one, known, f"{place}[{n}]", depth) for n, one in enumerate(_exactly(list, value, place))
        )
    return _plain_kind(kind)


def _plain_kind(kind: type) -> Decoder:
    if kind in (bool, int, str):
        return lambda value, known, place, depth: _exactly(kind, value, place)
    if kind is float:
        return lambda value, known, place, depth: _float(value, place)
    if kind is bytes:
        return lambda value, known, place, depth: base64.b64decode(_exactly(str, value, place), validate=True)
    if kind is Path:
        return lambda value, known, place, depth: Path(_exactly(str, value, place))
    if kind is LayerZeroError:
        return lambda value, known, place, depth: from_wire(_exactly(dict, value, place))
    if kind is Policy:
        return lambda value, known, place, depth: _policy(value, known, place)
    if issubclass(kind, Enum):
        return lambda value, known, place, depth: kind(_exactly(str, value, place))
    if issubclass(kind, BaseModel):
        return lambda value, known, place, depth: kind.model_validate(_exactly(dict, value, place))
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _record(kind)
    raise TypeError(f"no form for {kind}")


def _record(kind: Any) -> Decoder:
    names = field_names(kind)
    hints = get_type_hints(kind)
    its_name = kind.__name__

    def read(value: Any, known: Known | None, place: str, depth: int) -> Any:
        _exactly(dict, value, place)
        if value.keys() != set(names):
            raise _wrong(place, f"{its_name} has the fields {', '.join(names) or '(none)'}, not {sorted(value)!r:.120}")
        made = {}
        for name in names:
            where = f"{place}.{name}" if place else f"{its_name}.{name}"
            if name == IDENTITY:
                made[name] = _exactly(str, value[name], where).encode("ascii")
            elif (its_name, name) in TOKENS:
                made[name] = bytes.fromhex(_exactly(str, value[name], where))
            else:
                made[name] = decode(hints[name], value[name], known, where, depth)
        return kind(**made)

    return read


def _union(args: tuple[Any, ...]) -> Decoder:
    others = [one for one in args if one is not type(None)]

    def read(value: Any, known: Known | None, place: str, depth: int) -> Any:
        if value is None and len(others) < len(args):
            return None
        if len(others) == 1:
            return decode(others[0], value, known, place, depth)
        for one in others:
            if type(value) is one:
                return value
        raise _wrong(place, f"{value!r:.80} is none of {others}")

    return read


def _mapping(of: Any, to: Any) -> Decoder:
    def read(value: Any, known: Known | None, place: str, depth: int) -> Any:
        if isinstance(value, dict):
            pairs = [(key if of is Any else decode(of, key, known, place, depth), one) for key, one in value.items()]
        else:
            pairs = [(decode(of, key, known, place, depth), one) for key, one in _exactly(list, value, place)]
        return {key: decode(to, one, known, f"{place}[{key!r:.40}]", depth) for key, one in pairs}

    return read


def _fixed(args: tuple[Any, ...]) -> Decoder:
    def read(value: Any, known: Known | None, place: str, depth: int) -> Any:
        if len(_exactly(list, value, place)) != len(args):
            raise _wrong(place, f"{len(value)} values; it has {len(args)}")
        pairs = enumerate(zip(args, value, strict=True))
        return tuple(decode(kind, one, known, f"{place}[{n}]", depth) for n, (kind, one) in pairs)

    return read


def _exactly(kind: type, value: Any, place: str) -> Any:
    if type(value) is not kind:
        raise _wrong(place, f"{value!r:.80} is no {kind.__name__}")
    return value


def _one_of(allowed: tuple[Any, ...], value: Any, place: str) -> Any:
    if not any(value == one and type(value) is type(one) for one in allowed):
        raise _wrong(place, f"{value!r:.80}; allowed: {', '.join(map(repr, allowed))}")
    return value


def _float(value: Any, place: str) -> float:
    if isinstance(value, dict) and value.keys() == {"float"} and value["float"] in _NUMBERS:
        return _NUMBERS[value["float"]]
    if type(value) not in (int, float):
        raise _wrong(place, f"{value!r:.80} is no number")
    return float(value) if type(value) is float else value  # a field of floats may hold an int


def _any(value: Any, known: Known | None, place: str, depth: int) -> Any:
    """Plain values, with the numbers that JSON has not."""
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return _float(value, place)
        return {key: decode(Any, one, known, place, depth) for key, one in value.items()}
    if isinstance(value, list):
        return [decode(Any, one, known, place, depth) for one in value]
    return value


def _policy(value: Any, known: Known | None, place: str) -> Policy:
    layers = []
    for one in _exactly(list, value, place):
        if _exactly(dict, one, place).keys() != {"origin", "values", "lines"}:
            raise _wrong(place, "a layer has origin, values and lines")
        lines = {tuple(where): _exactly(int, line, place) for where, line in _exactly(list, one["lines"], place)}
        layers.append(Layer(_exactly(str, one["origin"], place), one["values"], lines))
    try:
        return Policy.of(*layers, known=known)
    except LayerZeroError as exc:
        raise _wrong(place, exc.message) from exc
