"""The op `null`: does nothing, so that a call measures dispatch and nothing else. Needs no library."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from layerzero.workers.provider import Block, Bound, Call, Loaded


def load() -> Loaded:
    return Loaded(versions={"python": platform.python_version()}, kernels={"null.null": _null})


def _null(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
    return _do_nothing


def _do_nothing() -> None:
    return None
