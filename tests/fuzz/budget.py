"""What one input may cost and end in. The same rule for the fuzzer, for the committed corpora and for regressions."""

from __future__ import annotations

import contextlib
import resource
import time
from types import ModuleType

MAX_CPU_S = 1.0  # of the process, so that a busy machine is no finding
MAX_GROWTH_BYTES = 256 << 20


class Finding(Exception):
    """An input took too long or too much memory."""


class Checked:
    """A target's `run`, held to the rule: it returns or raises one of the target's TYPED errors, within a second and
    256 MiB. Anything else comes out of here as an exception."""

    def __init__(self, target: ModuleType) -> None:
        self._run, self._typed = target.run, target.TYPED
        self._peak_bytes = 0  # of the process after its first input, which loads what is loaded once

    def __call__(self, data: bytes) -> None:
        start_s = time.process_time()
        with contextlib.suppress(*self._typed):
            self._run(data)
        spent_s = time.process_time() - start_s
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if not self._peak_bytes:
            self._peak_bytes = peak_bytes
            return
        if spent_s > MAX_CPU_S:
            raise Finding(f"{spent_s:.2f} s of CPU; allowed: {MAX_CPU_S}")
        if peak_bytes > self._peak_bytes + MAX_GROWTH_BYTES:
            raise Finding(f"{(peak_bytes - self._peak_bytes) >> 20} MiB more than at first; allowed: 256")
