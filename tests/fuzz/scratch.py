"""Where targets write files."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def folder() -> Path:
    """A new one, which goes with the process; libFuzzer ends its own so that only `python -m tests.fuzz` can clean up,
    by TMPDIR."""
    made = Path(tempfile.mkdtemp(prefix="lz-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
