"""Asks the broker each second, and keeps what has happened since."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerzero.client.history.history_file import HistoryFile
from layerzero.client.history.sample import Sample, between
from layerzero.ipc.cuda.usage import GpuUsage

EVERY_S = 1.0
YOUNG_S = 60.0  # a broker that was seen so late has its first minute told as one
SAME_BROKER_S = 1.0  # so far apart its beginning may lie by two answers
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Recorder:
    """`file`: where Samples go; None: they are only returned. `usage`: what the driver tells of GPUs' memory."""

    def __init__(self, file: HistoryFile | None, usage: GpuUsage | None = None) -> None:
        self._file = file
        self._usage = GpuUsage() if usage is None else usage
        self._before: Mapping[str, Any] = {}

    def keep_in(self, file: HistoryFile) -> None:
        """From now on."""
        self._file = file

    def take(self, answer: Mapping[str, Any], now: float | None = None) -> Sample | None:
        """What happened since the answer before. Of the first one: since the last answer of this broker to a recorder
        that had the file before, or since the broker began, if that was not long ago and nothing was kept of it yet;
        else None. Raises sqlite3.Error where it cannot be kept."""
        now = time.time() if now is None else now
        before, self._before = self._before or self._answer_before(answer["up_s"], now), answer
        if not before and not self._is_new(answer["up_s"]):
            return None
        memory = {name: nbytes for name, pid in answer["pids"].items() if (nbytes := own_bytes(pid))}
        gpu = {name: sum(its.values()) for name, its in self._usage.of(answer["pids"]).items()}
        sample = between(before, answer, memory, gpu)
        if self._file is not None and sample.seconds > 0:
            self._file.add(sample, now, answer)
        return sample

    def _answer_before(self, up_s: float, now: float) -> Mapping[str, Any]:
        """The last one that the file has, if it is of the broker that is up for so long; else none."""
        at, answer = (None, {}) if self._file is None else self._file.last_answer()
        if at is None or abs(at - answer["up_s"] - (now - up_s)) > SAME_BROKER_S:
            return {}
        return answer

    def _is_new(self, up_s: float) -> bool:
        newest = None if self._file is None else self._file.newest
        return up_s <= YOUNG_S and (newest is None or newest < time.time() - up_s)


def own_bytes(pid: int, root: str | Path = "/proc") -> int:
    """Resident memory of a process without what it shares with files and with others; 0 where nobody tells."""
    try:
        with open(f"{root}/{pid}/statm", "rb", 0) as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return 0
    return max(resident - shared, 0) * _PAGE_BYTES


def record(ask: Callable[[], Mapping[str, Any]], file: HistoryFile, wait: Callable[[float], bool]) -> None:
    """Until `wait`, for so many seconds, says that it is over, or `ask` raises."""
    recorder, due_s = Recorder(file), time.monotonic()
    said = ""
    while True:
        try:
            recorder.take(ask())
        except sqlite3.Error as exc:  # a full disk, mostly: what comes later may fit
            if str(exc) != said:
                said = str(exc)
                print(f"the history is not kept: {file.path}: {exc}", flush=True)
        due_s = max(due_s + EVERY_S, time.monotonic())
        if wait(due_s - time.monotonic()):
            return
