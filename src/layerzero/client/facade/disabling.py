"""LAYERZERO_DISABLE: programs that LayerZero was put into by a line, such as accelerate(), run as without it."""

from __future__ import annotations

import os

from layerzero.ipc.vocabulary.variables import PREFIX

DISABLE = f"{PREFIX}DISABLE"


def is_disabled() -> bool:
    """Read anew each time."""
    return os.environ.get(DISABLE, "").lower() not in ("", "0", "false", "no", "off")
