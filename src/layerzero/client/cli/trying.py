"""What tries versions for `lz bisect`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from layerzero.envs.matrix.bisect import Tried


class Versions(NamedTuple):
    """The releases, and what tries one."""

    versions: list[str]
    run: Callable[[str], Tried]
