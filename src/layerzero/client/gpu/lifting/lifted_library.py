"""Whether the C that launches lifted calls is there, and fits to this package."""

from __future__ import annotations

import os
from typing import Any

from layerzero.client.gpu.fastpath_library import DISABLED
from layerzero.ipc.lifting import program
from layerzero.ipc.shm import counter_page, timeline_words


def _load() -> tuple[Any, str]:
    """client/gpu/_lifted.c as a module, or why it is not used."""
    if os.environ.get(DISABLED):
        return None, f"{DISABLED} is set"
    try:
        from layerzero.client.gpu import _lifted
    except ImportError as exc:
        return None, f"no C compiler was there when LayerZero was installed ({exc}); install it anew with one"
    if ((*timeline_words.LIFTED_LAYOUT, *counter_page.LAYOUT), program.LAYOUT) != (_lifted.LAYOUT, _lifted.PROGRAM):
        return None, "what was compiled is of another version of LayerZero; install it anew"
    return _lifted, ""


lifted, why_not = _load()
"""The module or None; and why there is none, for reports."""
