"""A capsule's call made again with gdb at its worker: stacks of all threads where it dies or hangs, or a core dump."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.client.capsules.form import Capsule
from layerzero.client.tools.replay import START_S, kept_as_they_are, lay_out, own_broker, request_of, where, why_of
from layerzero.ipc.errors import EnvError, LayerZeroError

ATTACH_S = 120.0  # gdb reads the symbols of all that the worker has loaded
END_S = 60.0
HANG_S = 10.0  # a call that has not ended by then is interrupted, to see where it is
MOST_BYTES = 4 << 20  # of gdb's words
MARK = "layerzero: attached"
DEADLY = "SIGSEGV SIGABRT SIGBUS SIGFPE SIGILL"


@dataclass(frozen=True)
class Runs:
    """A call that can be made again and again on a backend. `run` raises what the call raises; `restore` makes the
    arguments what they were."""

    backend: str
    run: Callable[[float], object]
    restore: Callable[[], None] = lambda: None


def runs_of(capsule: Capsule, data: Sequence[bytes], backend: str, seed: int, device: str) -> Callable[[Any], Runs]:
    """Of an op's call, for a session."""

    def runs(session: Any) -> Runs:
        ordinal = where(capsule, device)
        arguments = lay_out(capsule.op, capsule.arguments, capsule.segments, data, seed, device=ordinal)

        def run(timeout_s: float) -> None:
            session.run_apart(request_of(capsule.op, capsule.params, arguments, backend, timeout_s))

        return Runs(backend, run, kept_as_they_are(arguments))

    return runs


def under_gdb(runs_of: Callable[[Any], Runs], *, core: Path | None, timeout_s: float | None) -> tuple[str, str]:
    """Make a call once, so that its worker is there, and again with gdb at that one. Returns what it ended in ("ok"
    for an answer) and what gdb has said. `core`: where to write a core dump, which has all of the worker's memory.
    Raises EnvError without gdb, or where it may not look at other processes."""
    program = shutil.which("gdb")
    if program is None:
        raise EnvError("gdb is not installed", repair="install it: apt install gdb, dnf install gdb")
    within_s = timeout_s or START_S
    with own_broker() as session:
        runs = runs_of(session)
        _run(runs, within_s)
        runs.restore()
        attached = _Gdb(program, _worker(session, runs.backend), core)
        try:
            interrupt = threading.Timer(min(HANG_S, within_s / 2), attached.interrupt)
            interrupt.start()
            what = _run(runs, within_s)
            interrupt.cancel()
            return what, attached.end(has_died=what != "ok")
        finally:
            attached.close()


def _run(runs: Runs, timeout_s: float) -> str:
    try:
        runs.run(timeout_s)
    except LayerZeroError as exc:
        return why_of(exc)[0]
    return "ok"


def _worker(session: Any, backend: str) -> int:
    """The pid of the worker that is there for the next call."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        row = next(one for one in session.ask("status")["backends"] if one["name"] == backend)
        if row["state"] == "ready" and row["pid"]:
            return int(row["pid"])
        time.sleep(0.05)
    raise EnvError(f"no worker of {backend} came back after the first call", repair=f"lz env probe {backend}")


class _Gdb:
    """gdb at a process, which goes on until it gets a deadly signal or is interrupted. Raises EnvError."""

    def __init__(self, program: str, pid: int, core: Path | None) -> None:
        commands = [
            "set pagination off",
            "set confirm off",
            "handle SIGPIPE SIGUSR1 SIGUSR2 nostop noprint pass",
            f"echo {MARK}\\n",
            "continue",
            "thread apply all backtrace 64",
            *([] if core is None else [f"generate-core-file {core}"]),
            f"handle {DEADLY} nostop noprint pass",
            "continue",
        ]
        words = [program, "-nx", "-batch", "-p", str(pid)]
        for command in commands:
            words += ["-ex", command]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
        self._said = bytearray()
        self._is_there = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._is_there.wait(ATTACH_S) or self._process.poll() is not None or MARK not in self._text:
            said = self._text
            self.close()
            raise EnvError(
                f"gdb cannot look at the worker: {said[-300:].strip() or 'it said nothing in time'}",
                repair="sysctl kernel.yama.ptrace_scope=0, or run it as root",
            )

    @property
    def _text(self) -> str:
        return bytes(self._said).decode(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        while part := os.read(self._process.stdout.fileno(), 65_536):
            self._said += part[: max(MOST_BYTES - len(self._said), 0)]
            if MARK.encode() in self._said or b"ptrace" in self._said:
                self._is_there.set()
        self._is_there.set()

    def interrupt(self) -> None:
        """Stop the process where it is; the stacks are told, and it goes on."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def end(self, *, has_died: bool) -> str:
        """All that it has said since it was attached."""
        if has_died:
            self._reader.join(END_S)
        self.close()
        return self._text.partition(MARK)[2].strip()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(10)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
