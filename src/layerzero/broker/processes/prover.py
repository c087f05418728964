"""The process that tries lifted calls (workers/prove.py), from the broker's side: one specimen after the other."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time

from layerzero.envs.probe.child import Ended, kill_group
from layerzero.ipc.lifting.proof import Verdict
from layerzero.ipc.lifting.reasons import LiftReason

MAX_LINE_BYTES = 1 << 16
MAX_TOLD_BYTES = 4096  # of what it wrote to stderr at last
END_S = 5.0  # so long it may take to end by itself


class Prover:
    """Of one GPU. For one thread, but for `kill`."""

    def __init__(self, gpu: str) -> None:
        """Raises OSError on a machine that starts no processes."""
        self.gpu = gpu
        self.tried = 0
        self.is_spent = False  # it has ended
        self._reaping = threading.Lock()  # its number is its own until it is reaped
        # What is long lies in memory: no pipe is ever full.
        self._specimen, self._told = os.memfd_create("specimen"), os.memfd_create("told")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "layerzero.workers.prove", gpu, str(os.getpid()), str(self._specimen)],
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._told,
                pass_fds=(self._specimen,),
                start_new_session=True,
            )
        except OSError:
            self._close_files()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def verdict(self, data: bytes, timeout_s: float) -> Verdict | None:
        """On a packed specimen; None when the process has ended and had tried others before: one of those may be to
        blame. Blocks."""
        is_first, self.tried = not self.tried, self.tried + 1
        os.ftruncate(self._specimen, 0)
        os.pwrite(self._specimen, data, 0)
        with contextlib.suppress(BrokenPipeError):  # it says no line then, either
            os.write(self._in.fileno(), b"%d\n" % len(data))
        line = self._line(time.monotonic() + timeout_s)
        self.is_spent = not line
        if line is None:
            self.kill()
            return Verdict(LiftReason.PROOF_LATE, f"it did not end within {timeout_s:g} s")
        if line:
            said = json.loads(line)
            return Verdict(LiftReason(said["reason"]) if said["reason"] else None, str(said["detail"]))
        return self._how_it_ended(self._end()) if is_first else None

    def kill(self) -> None:
        """From any thread, at any time."""
        with self._reaping:
            if self._process.returncode is None:
                kill_group(self._process.pid)

    def close(self) -> None:
        """It has no more to do, and ends. Blocks until it has."""
        self._in.close()
        self._end()
        self._out.close()
        self._close_files()

    def _end(self) -> int:
        """Its exit code. What it has started ends with it."""
        if self._process.returncode is None:
            fd, poll = os.pidfd_open(self._process.pid), select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(1e3 * END_S)
            os.close(fd)
        self.kill()
        with self._reaping:
            return self._process.wait()

    def _close_files(self) -> None:
        os.close(self._specimen)
        os.close(self._told)

    def _line(self, end_s: float) -> bytes | None:
        """What it says next: empty when it has ended, None when it does not come to that."""
        fd, line, poll = self._out.fileno(), b"", select.poll()
        poll.register(fd, select.POLLIN)
        while not line.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not poll.poll(1e3 * left_s):
                return None
            more = os.read(fd, MAX_LINE_BYTES)
            if not more or len(line) > MAX_LINE_BYTES:
                return b""
            line += more
        return line

    def _how_it_ended(self, code: int) -> Verdict:
        size = os.fstat(self._told).st_size
        told = os.pread(self._told, MAX_TOLD_BYTES, max(size - MAX_TOLD_BYTES, 0))
        last = told.decode(errors="replace").strip().splitlines()[-1:]
        how = Ended(code, b"", told).death or f"exit code {code}"
        return Verdict(LiftReason.PROOF_FAULTED, f"the process that tried it ended with {how}: {''.join(last)}")
