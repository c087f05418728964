"""The import of a module in all workers of a function's or a class's calls, before the first one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from layerzero.client.capsules.of_function import LOAD
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Call, Owner
from layerzero.functions.capsules import Asked
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame


class _Load(Call):
    """The import of a module in one worker."""

    def _asked(self) -> tuple[Sequence[Asked], str]:
        assert self.given is not None
        return [Asked(LOAD, "", frames.NOTHING, self.given)], ""

    def _frame(self, given: Arguments) -> Frame:
        return Frame([frames.LOAD, self.owner._places.tree(given.backends)])


def warm_up(owner: Owner) -> float:
    """Start all workers of an owner's calls, and import its module there. Returns seconds. Raises as a call does."""
    start_s = time.monotonic()
    options = replace(owner._options, fallback=None, keep=False, shadow=0.0)
    calls = [_Load(owner, Arguments((), {}, (one,)), (), {}, options) for one in owner._places.backends]
    for call in calls[1:]:
        call.send()
    for call in calls:
        call.finish()
    return time.monotonic() - start_s
