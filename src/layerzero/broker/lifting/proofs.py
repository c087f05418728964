"""Proofs of lifted calls, one after the other, on a thread that waits for the process that tries them. That process
stays for a while: to start one takes longer than most proofs, and a kind of call rarely comes alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from layerzero.broker.processes.prover import Prover
from layerzero.ipc.lifting.proof import Verdict
from layerzero.ipc.lifting.reasons import LiftReason

TIMEOUT_S = 60.0  # of one proof
IDLE_S = 5.0  # so long a process stays without one: it holds some hundred MiB of its GPU
AT_MOST = 32  # proofs in one process


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
        self._changed = threading.Condition()
        self._open: set[int] = set()
        self._waiting: deque[Asked] = deque()
        self._ended: deque[Proved] = deque()
        self._prover: Prover | None = None
        self._is_working = False
        self._is_closed = False

    def has(self, number: int) -> bool:
        """Whether it is being tried, or waits for that."""
        return number in self._open

    def start(self, number: int, gpu: str, data: bytes) -> None:
        self._open.add(number)
        with self._changed:
            self._waiting.append(Asked(number, gpu, data))
            self._changed.notify()
            if not self._is_working:
                self._begin()

    def _begin(self) -> None:
        try:
            threading.Thread(target=self._work, name="proof", daemon=True).start()
        except RuntimeError as exc:  # the machine gives no more threads
            while self._waiting:
                self._tell(self._waiting.popleft(), Verdict(LiftReason.PROOF_IMPOSSIBLE, str(exc)))
        else:
            self._is_working = True

    def _tell(self, asked: Asked, verdict: Verdict) -> None:
        self._ended.append(Proved(asked.number, asked.data, verdict))
        self._wake_up()

    def ended(self) -> Iterator[Proved]:
        while self._ended:
            proved = self._ended.popleft()
            self._open.discard(proved.number)
            yield proved

    def close(self) -> None:
        """End what runs; nothing is told from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            if self._prover is not None:
                self._prover.kill()

    def _work(self) -> None:
        while (asked := self._next()) is not None:
            try:
                verdict = self._verdict(asked)
            except Exception as exc:  # a machine that starts no processes, say
                self._end_prover()
                verdict = Verdict(LiftReason.PROOF_IMPOSSIBLE, f"{type(exc).__name__}: {exc}")
            if not self._is_closed:
                self._tell(asked, verdict)

    def _next(self) -> Asked | None:
        """None when this thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, IDLE_S)
            if self._waiting and not self._is_closed:
                return self._waiting.popleft()
        self._end_prover()  # before another thread makes its own
        with self._changed:
            if self._waiting and not self._is_closed:  # it came meanwhile
                return self._waiting.popleft()
            self._is_working = False
            return None

    def _verdict(self, asked: Asked) -> Verdict:
        while True:
            prover = self._prover
            if prover is None or prover.is_spent or prover.gpu != asked.gpu or prover.tried >= AT_MOST:
                self._end_prover()
                prover = self._new_prover(asked.gpu)
            verdict = prover.verdict(asked.data, TIMEOUT_S)
            if verdict is not None:
                return verdict

    def _new_prover(self, gpu: str) -> Prover:
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the broker ends")
            self._prover = Prover(gpu)
            return self._prover

    def _end_prover(self) -> None:
        with self._changed:
            was, self._prover = self._prover, None
        if was is not None:
            was.close()
