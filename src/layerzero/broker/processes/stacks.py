"""Where workers hang: the stacks of their Python threads, by py-spy, which reads their memory. No signal is sent, no
worker is stopped, and none lives longer for it: they are taken while a call goes on, and told when its worker has
ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from layerzero.ipc.logs import log
from layerzero.ipc.shm import memory

SPY_S = 2.0  # for an answer of py-spy
MAX_TEXT_BYTES = 6000  # so that a capsule, which has the log's last 8192, has the worker's own words, too
_MAY_NOT = (
    "none: py-spy may not look at this worker; that takes the right to look at other processes "
    "(kernel.yama.ptrace_scope, CAP_SYS_PTRACE in a container)"
)


@dataclass(frozen=True)
class Look:
    """What was seen of a worker in one call, which its control page calls `executing`."""

    executing: int
    lasted_s: float
    text: str

    def lines(self) -> str:
        head = (
            f"layerzero: its last call had taken {self.lasted_s:.1f} s; stacks of its Python threads then, by py-spy:"
        )
        return f"\n{head}\n{self.text}\n"


class Watched(Protocol):
    """A worker: `look` is what was last seen of it."""

    page: memory.ControlPage
    look: Look | None

    @property
    def pid(self) -> int: ...


@dataclass
class _Call:
    executing: int
    since_s: float
    due_s: float


class StackWatch:
    """Looks at each worker whose call takes longer than `after_s`, then after twice as long, and so on. `program`:
    py-spy; without one nothing is done. A thread of its own does that while there are workers."""

    def __init__(self, after_s: float, program: str | None) -> None:
        self._after_s = after_s
        self._program = program if after_s else None
        self._workers: dict[int, Watched] = {}
        self._calls: dict[int, _Call] = {}  # of the thread alone
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, worker: Watched) -> None:
        if self._program is None:
            return
        with self._changed:
            self._workers[worker.pid] = worker
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="layerzero.stacks", daemon=True)
                self._thread.start()

    def remove(self, worker: Watched) -> None:
        with self._changed:
            self._workers.pop(worker.pid, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._after_s / 2 if self._workers else None)
                workers = dict(self._workers)
            self._calls = {pid: call for pid, call in self._calls.items() if pid in workers}
            for worker in workers.values():
                self.look_at(worker, time.monotonic())

    def look_at(self, worker: Watched, now_s: float) -> None:
        try:
            executing, _ = worker.page.read()
        except ValueError:  # its page is closed: it has just ended
            return
        call = self._calls.get(worker.pid)
        if call is None or call.executing != executing:
            self._calls[worker.pid] = _Call(executing, now_s, now_s + self._after_s)
        elif executing and now_s >= call.due_s and self._program is not None:
            lasted_s = now_s - call.since_s
            call.due_s = now_s + lasted_s
            worker.look = Look(executing, lasted_s, dump(self._program, worker.pid))


def find(environ_path: str) -> str | None:
    """py-spy in `environ_path`, else beside this interpreter."""
    return shutil.which("py-spy", path=os.pathsep.join((environ_path, str(Path(sys.executable).parent))))


def dump(program: str, pid: int) -> str:
    """The stacks of a process, or why there are none."""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SPY_S, check=False)
    except subprocess.TimeoutExpired:
        return f"none: py-spy had not answered within {SPY_S:g} s"
    except OSError as exc:
        return f"none: py-spy cannot be started: {exc}"
    if done.returncode:
        return _why_none(done.returncode, done.stderr.decode(errors="replace").strip().splitlines())
    return done.stdout[:MAX_TEXT_BYTES].decode(errors="replace").strip()


def _why_none(code: int, lines: Sequence[str]) -> str:
    if any("ermission" in line for line in lines):
        return _MAY_NOT
    return f"none: py-spy ended with {code}: {lines[0][:500] if lines else 'without a word'}"


def tell(path: Path, look: Look) -> None:
    """Append it to the log of a worker that has ended."""
    with suppress(OSError), open(path, "ab") as file:
        file.write(look.lines().encode())
        log("worker.stacks", log=str(path), lasted_s=round(look.lasted_s, 1))
