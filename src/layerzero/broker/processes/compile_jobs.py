"""Processes that compile kernels, started when the core asks for one; threads wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.processes.launcher import Launcher
from layerzero.envs.probe.child import kill_group

AT_A_TIME = 2  # backends: their compilers take all the cores that they get


class CompileJobs:
    """`post` takes each job's CompileEnded, from another thread."""

    def __init__(self, launcher: Launcher, post: Callable[[ev.Event], None]) -> None:
        self._launcher = launcher
        self._post = post
        self._threads = ThreadPoolExecutor(max_workers=AT_A_TIME, thread_name_prefix="compile")
        self._lock = Lock()
        self._pids: dict[str, int] = {}  # of live processes, by backend
        self._is_closed = False

    def start(self, action: act.Compile) -> None:
        self._threads.submit(self._work, action)

    def close(self) -> None:
        """End all of them; nothing is posted from now on."""
        with self._lock:
            self._is_closed = True
            for pid in self._pids.values():
                kill_group(pid)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, action: act.Compile) -> None:
        start = time.monotonic()
        try:
            failure = self._launcher.compile(action, lambda pid: self._note_pid(action.backend, pid))
        except Exception as exc:  # a broken environment may fail in any way; then this kernel stays as it is
            failure = f"{type(exc).__name__}: {exc}"
        with self._lock:
            self._pids.pop(action.backend, None)
            if self._is_closed:
                return
        self._post(ev.CompileEnded(action.backend, action.unit, failure, time.monotonic() - start))

    def _note_pid(self, backend: str, pid: int) -> None:
        with self._lock:
            self._pids[backend] = pid
            if self._is_closed:
                kill_group(pid)
