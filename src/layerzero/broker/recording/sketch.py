"""Actions as they are recorded and compared: all that they do, and none of the words. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from layerzero.broker.core import actions as act
from layerzero.broker.recording.form import AS_THEY_ARE, IDENTITY, Names, field_names
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.plain import unpack_body

# Of dicts in actions: texts for people, which quote what programs have printed.
_TEXTS = frozenset(
    {"cause", "detail", "error", "evidence", "message", "notes", "reason", "repair", "stderr_tail", "traceback", "why"}
)


def sketch(action: act.Action, names: Names) -> dict[str, Any]:
    """The action's fields as JSON. Of bytes, which are messages to peers, a hash and how many there are, of results a
    token, of an error its code; texts for people are left out."""
    made: dict[str, Any] = {}
    kind = type(action)
    for name in field_names(kind):
        value = getattr(action, name)
        if type(value) in AS_THEY_ARE:
            made[name] = value
        elif name == IDENTITY:
            made[name] = names.peer(value)
        elif kind is act.Answer and name == "body":
            made[name] = names.token(value)
        elif kind is act.SendDecision and name == "body":
            made |= _decision(value)
        else:
            made[name] = _sketch(value)
    return made


def _decision(body: bytes) -> dict[str, Any]:
    """Who serves a route; of why, a hash: it is long, and has words."""
    found = _sketch(unpack_body(body))
    text = json.dumps(found, sort_keys=True)
    return {"kernel_id": found["kernel_id"], "backend": found["backend"], "body": _sketch(text.encode())}


def _sketch(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, bytes):
        return [len(value), hashlib.blake2b(value, digest_size=8).hexdigest()] if value else []
    if isinstance(value, LayerZeroError):
        return value.code
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        its = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return _sketch(its)
    if isinstance(value, Mapping):
        return {str(key): _sketch(one) for key, one in value.items() if key not in _TEXTS}
    return [_sketch(one) for one in value]
