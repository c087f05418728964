"""Processes that try lifted calls, one process at a time; a thread waits for it. What has come meanwhile goes to the
next one together: to start it takes longer than most proofs."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

from layerzero.envs.probe.child import Ended, kill_group, run_process
from layerzero.ipc.lifting.proof import Verdict
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT

TIMEOUT_S = 60.0  # of one proof
AT_A_TIME = 32
MAX_BYTES = 256 << 20  # of the specimens that one process gets, unless a single one is larger
_LENGTH_BYTES = 8  # as workers/prove.py reads them


class Asked(NamedTuple):
    """A packed specimen."""

    number: int
    gpu: str
    data: bytes


class Proved(NamedTuple):
    number: int
    data: bytes
    verdict: Verdict


class Proofs:
    """`wake_up` is called from another thread when some have ended."""

    def __init__(self, wake_up: Callable[[], None]) -> None:
        self._wake_up = wake_up
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="proof")
        self._lock = Lock()
        self._open: set[int] = set()
        self._waiting: deque[Asked] = deque()
        self._ended: deque[Proved] = deque()
        self._pid = 0
        self._is_closed = False

    def has(self, number: int) -> bool:
        """Whether it is being tried, or waits for that."""
        return number in self._open

    def start(self, number: int, gpu: str, data: bytes) -> None:
        self._open.add(number)
        self._waiting.append(Asked(number, gpu, data))
        self._threads.submit(self._work)

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

    def _work(self) -> None:
        """Try what waits, if an earlier one has not done it already."""
        asked = self._take()
        if not asked:
            return
        try:
            verdicts = self._try(asked)
        except Exception as exc:  # a machine that starts no processes, say; then these stay as they are
            verdicts = [Verdict(LiftReason.PROOF_IMPOSSIBLE, f"{type(exc).__name__}: {exc}")] * len(asked)
        with self._lock:
            self._pid = 0
            if self._is_closed:
                return
        left = asked[len(verdicts) :]  # the one before ended the process; they had no part in it
        self._waiting.extendleft(reversed(left))
        for one, verdict in zip(asked, verdicts, strict=False):
            self._ended.append(Proved(one.number, one.data, verdict))
        self._wake_up()
        if left:
            self._work()

    def _take(self) -> list[Asked]:
        """What the next process gets: specimens for one GPU."""
        taken: list[Asked] = []
        while self._waiting and len(taken) < AT_A_TIME:
            one = self._waiting[0]
            nbytes = sum(len(before.data) for before in taken) + len(one.data)
            if taken and (one.gpu != taken[0].gpu or nbytes > MAX_BYTES):
                break
            taken.append(self._waiting.popleft())
        return taken

    def _try(self, asked: Sequence[Asked]) -> list[Verdict]:
        """Of the first ones, up to that which ended the process."""
        ended = run_process(
            [sys.executable, "-m", "layerzero.workers.prove", asked[0].gpu, str(os.getpid())],
            environ=os.environ,
            timeout_s=TIMEOUT_S,
            data=b"".join(len(one.data).to_bytes(_LENGTH_BYTES, "little") + one.data for one in asked),
            on_start=self._note_pid,
        )
        said = [json.loads(line) for line in ended.out.splitlines()[: len(asked)]]
        verdicts = [Verdict(LiftReason(v["reason"]) if v["reason"] else None, str(v["detail"])) for v in said]
        if len(verdicts) < len(asked) and ended.code != STICKY_EXIT:
            verdicts.append(_how_it_ended(ended))
        return verdicts

    def _note_pid(self, pid: int) -> None:
        with self._lock:
            self._pid = pid
            if self._is_closed:
                kill_group(pid)


def _how_it_ended(ended: Ended) -> Verdict:
    if ended.code is None:
        return Verdict(LiftReason.PROOF_LATE, f"it did not end within {TIMEOUT_S:g} s")
    told = ended.err.decode(errors="replace").strip().splitlines()[-1:]
    how = ended.death or f"exit code {ended.code}"
    return Verdict(LiftReason.PROOF_FAULTED, f"the process that tried it ended with {how}: {''.join(told)}")
