"""One JSON line per event on stderr: `log(event, **facts)`. Event names are noun.verb. Shapes, never contents."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any


def log(event: str, **facts: Any) -> None:
    """Write one line; never raises on facts that JSON does not know, they are written as text."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}, default=str)
    with contextlib.suppress(OSError):  # a full disk must not end a broker
        os.write(2, line.encode() + b"\n")
