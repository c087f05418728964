"""Whether the C of this package is there, and fits to it."""

from __future__ import annotations

import os
from typing import Any

from layerzero.ipc.cuda import abi
from layerzero.ipc.shm import counter_page, ring_words, timeline_words

DISABLED = "LAYERZERO_NO_C"  # variable: calls are made by the Python alone


def _load() -> tuple[Any, str]:
    """client/gpu/_fastpath.c as a module, or why it is not used."""
    if os.environ.get(DISABLED):
        return None, f"{DISABLED} is set"
    try:
        from layerzero.client.gpu import _fastpath
    except ImportError as exc:
        return None, f"no C compiler was there when LayerZero was installed ({exc}); install it anew with one"
    if (
        *timeline_words.LAYOUT,
        *ring_words.LAYOUT,
        abi.BUFFER_ID,
        abi.WAIT_32,
        abi.WRITE_32,
        abi.GEQ,
        *counter_page.LAYOUT,
    ) != _fastpath.LAYOUT:
        return None, "what was compiled is of another version of LayerZero; install it anew"
    return _fastpath, ""


repeats, why_not = _load()
"""The module or None; and why there is none, for reports."""
