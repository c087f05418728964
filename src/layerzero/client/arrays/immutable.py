"""Arrays whose numbers nobody can change."""

from __future__ import annotations

import sys
from typing import Any


def immutable_owner(obj: Any) -> bytes | None:
    """The bytes that a NumPy array lies on, if it is read-only down to them. An array that owns its memory is none: it
    can be made writable again, and views that were made before it became read-only can be written."""
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(obj, numpy.ndarray):
        if obj.flags.writeable:
            return None
        obj = obj.base
    if isinstance(obj, memoryview):
        obj = obj.obj
    return obj if type(obj) is bytes else None
