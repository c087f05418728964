"""What a process does before it is ready: imports, above all, which leave next to nothing behind to be collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """No garbage is looked for meanwhile, and what is there afterwards is never looked at again: the collector would go
    through all that is loaded some fifty times, a seventh of the whole time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
