"""Processes that try lifted calls, one at a time; a thread waits for them."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

from layerzero.envs.probe.child import kill_group, run_process
from layerzero.ipc.lifting.proof import Verdict
from layerzero.ipc.lifting.reasons import LiftReason

TIMEOUT_S = 60.0


class Proved(NamedTuple):
    """`data`: the packed specimen that was tried."""

    number: int
    data: bytes
    verdict: Verdict


class Proofs:
    """`wake_up` is called from another thread when one has ended."""

    def __init__(self, wake_up: Callable[[], None]) -> None:
        self._wake_up = wake_up
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="proof")
        self._lock = Lock()
        self._open: set[int] = set()
        self._ended: deque[Proved] = deque()
        self._pid = 0
        self._is_closed = False

    def has(self, number: int) -> bool:
        """Whether it is being tried, or waits for that."""
        return number in self._open

    def start(self, number: int, gpu: str, data: bytes) -> None:
        self._open.add(number)
        self._threads.submit(self._work, number, gpu, data)

    def ended(self) -> Iterator[Proved]:
        while self._ended:
            proved = self._ended.popleft()
            self._open.discard(proved.number)
            yield proved

    def close(self) -> None:
        """End what runs; nothing is told from now on."""
        with self._lock:
            self._is_closed = True
            if self._pid:
                kill_group(self._pid)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, number: int, gpu: str, data: bytes) -> None:
        try:
            verdict = self._try(gpu, data)
        except Exception as exc:  # a machine that starts no processes, say; then it stays as it is
            verdict = Verdict(LiftReason.PROOF_IMPOSSIBLE, f"{type(exc).__name__}: {exc}")
        with self._lock:
            self._pid = 0
            if self._is_closed:
                return
        self._ended.append(Proved(number, data, verdict))
        self._wake_up()

    def _try(self, gpu: str, data: bytes) -> Verdict:
        ended = run_process(
            [sys.executable, "-m", "layerzero.workers.prove", gpu, str(os.getpid())],
            environ=os.environ,
            timeout_s=TIMEOUT_S,
            data=data,
            on_start=self._note_pid,
        )
        if ended.code is None:
            return Verdict(LiftReason.PROOF_LATE, f"it did not end within {TIMEOUT_S:g} s")
        if ended.code != 0:
            told = ended.err.decode(errors="replace").strip().splitlines()[-1:]
            how = ended.death or f"exit code {ended.code}"
            return Verdict(LiftReason.PROOF_FAULTED, f"the process that tried it ended with {how}: {''.join(told)}")
        value = json.loads(ended.out.splitlines()[-1])
        return Verdict(LiftReason(value["reason"]) if value["reason"] else None, str(value["detail"]))

    def _note_pid(self, pid: int) -> None:
        with self._lock:
            self._pid = pid
            if self._is_closed:
                kill_group(pid)
