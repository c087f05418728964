"""What plugins of engines have in common: an engine's processes are told what to do by variables alone."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable

import layerzero as lz
from layerzero.engines.guard import Guard
from layerzero.ipc.vocabulary.variables import PREFIX, is_true
from layerzero.torch.running import Runner


def check_environment() -> None:
    """Raises lz.InvalidArgument for LAYERZERO_ENGINE_SHARE that is no share."""
    _share()


def of_environment(runner: Runner) -> Callable[[], Guard]:
    """The guard of an engine whose processes are told by variables alone; made when it is first asked for."""
    return functools.cache(lambda: Guard(runner, is_true(os.environ, "ENGINE_SHADOW"), _share()))


def enable_flashinfer() -> None:
    """layerzero.engines.flashinfer in this process, where LAYERZERO_ENGINE_FLASHINFER says so and it is not yet."""
    if is_true(os.environ, "ENGINE_FLASHINFER"):
        from layerzero.engines import flashinfer

        if not flashinfer.is_enabled():
            flashinfer.enable(shadow=is_true(os.environ, "ENGINE_SHADOW"), share=_share())


def _share() -> float:
    value = os.environ.get(f"{PREFIX}ENGINE_SHARE", "1")
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise lz.InvalidArgument(f"set LAYERZERO_ENGINE_SHARE to a number of 0 to 1: it is {value!r}")
    return share
