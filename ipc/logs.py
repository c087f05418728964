"""One JSON line per event on stderr: `log(event, **facts)`. Event names are noun.verb. Shapes, never contents."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log(event: str, **facts: Any) -> None:
    """Write one line; never raises on facts that JSON does not know, they are written as text."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}, default=str)
    print(line, file=sys.stderr, flush=True)
