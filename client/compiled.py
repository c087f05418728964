"""Whether the C of this package is there, and fits to it."""

from __future__ import annotations

import os
from typing import Any

from layerzero.ipc import cuda_abi as abi
from layerzero.ipc import order_words, ring_words

DISABLED = "LAYERZERO_NO_C"  # variable: calls are made by the Python alone


def _load() -> tuple[Any, str]:
    """client/_repeats.c as a module, or why it is not used."""
    if os.environ.get(DISABLED):
        return None, f"{DISABLED} is set"
    try:
        from layerzero.client import _repeats
    except ImportError as exc:
        return None, f"no C compiler was there when LayerZero was installed ({exc}); install it anew with one"
    if (*order_words.LAYOUT, *ring_words.LAYOUT, abi.BUFFER_ID, abi.WAIT_32, abi.WRITE_32, abi.GEQ) != _repeats.LAYOUT:
        return None, "what was compiled is of another version of LayerZero; install it anew"
    return _repeats, ""


repeats, why_not = _load()
"""The module or None; and why there is none, for reports."""
