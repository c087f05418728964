"""`lz up --watchdog`: stays in the foreground and starts another broker when the one that runs dies."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque

from layerzero.client.cli.broker import ensure_it_stays, stop
from layerzero.client.cli.output import FAILED, note, print_json
from layerzero.client.connection import start
from layerzero.ipc.errors import BrokerLost
from layerzero.ipc.transport.endpoints import Endpoints

DEATHS, WINDOW_S = 5, 60.0  # more deaths within the window: something is wrong that another start does not repair
BACKOFF_S, BACKOFF_MAX_S = 0.1, 5.0  # doubles with each death in the window


class Watchdog:
    """Of one runtime folder. It is not the brokers' parent, so its own end leaves the broker as it is, and a client
    that misses the broker first may start the next."""

    def __init__(self, where: Endpoints, *, as_json: bool) -> None:
        self._where = where
        self._as_json = as_json
        self._deaths_s: deque[float] = deque()
        self._woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def main(self) -> int:
        """Until `lz down`, SIGTERM or SIGINT, which end the broker, too: 0. Too many deaths: 1.

        Raises LayerZeroError when the first broker cannot start.
        """
        pid = self._start()
        while True:
            if not self._wait_for_death(pid):
                stop(self._where, force=False)
                return 0
            if start.has_ended_by_itself(self._where):
                self._tell("ended", pid, "it was told to end")
                return 0
            next_pid = None
            while next_pid is None:
                delay_s = self._count_death()
                if delay_s is None:
                    self._tell("given up", pid, f"more than {DEATHS} deaths in {WINDOW_S:g} s; see lz logs")
                    return FAILED
                self._tell("died", pid, f"another starts in {delay_s:g} s")
                if self._is_told_within(delay_s):
                    return 0
                try:
                    next_pid = self._start()
                except BrokerLost as exc:
                    note(str(exc))
            pid = next_pid

    def _start(self) -> int | None:
        """Pid of a broker that stays, whoever has started it; None when it is gone again."""
        was_started = ensure_it_stays(self._where)
        pid = start.broker_pid(self._where)
        if pid is not None:
            self._tell(
                "started" if was_started else "found",
                pid,
                "it is started again if it dies; this stays in the foreground: Ctrl-C or lz down ends both",
            )
        return pid

    def _wait_for_death(self, pid: int | None) -> bool:
        """False when this process was told to end before."""
        try:
            pidfd = os.pidfd_open(pid or 0)
        except OSError:  # it is gone
            return True
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._woken, select.POLLIN)
            return self._woken not in {fd for fd, _ in poll.poll()}
        finally:
            os.close(pidfd)

    def _is_told_within(self, timeout_s: float) -> bool:
        return bool(select.select([self._woken], [], [], timeout_s)[0])

    def _count_death(self) -> float | None:
        """Seconds until the next start; None when there were too many deaths."""
        now_s = time.monotonic()
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - WINDOW_S:
            self._deaths_s.popleft()
        if len(self._deaths_s) > DEATHS:
            return None
        return float(min(BACKOFF_S * 2 ** (len(self._deaths_s) - 1), BACKOFF_MAX_S))

    def _tell(self, event: str, pid: int | None, more: str) -> None:
        if self._as_json:
            print_json({"event": event, "pid": pid, "detail": more}, indent=None)
        else:
            note(f"broker {event}: pid {pid}; {more}")
