"""Run a module of ours in a throw-away process of an environment, and end with it whatever it has started."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layerzero.envs.build.env import Env
from layerzero.envs.build.environ import worker_environ
from layerzero.envs.build.stage import stage
from layerzero.envs.probe.caches import make_folder

MAX_SAID_BYTES = 4 << 20  # of stdout and of stderr, that are read
MAX_WAITS = 10  # times its timeout that a child which gets on may take in all
MAX_FILE_BYTES = 1 << 30  # of any file that it writes: compilers' caches have some hundred MiB at most


@dataclass(frozen=True)
class Ended:
    """`code`: as of subprocess, None when it had to be ended, since it did not get on."""

    code: int | None
    out: bytes
    err: bytes

    @property
    def death(self) -> str:
        """The name of the signal that it died of; empty when it ended by itself or was ended."""
        if self.code is None or self.code >= 0:
            return ""
        return signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"


def run(
    env: Env,
    module: str,
    *args: str,
    timeout_s: float,
    data: bytes = b"",
    on_start: Callable[[int], None] | None = None,
) -> Ended:
    """Run `python -m MODULE ARGS OUR_PID` with `data` on its stdin. Blocks until it has ended, or has said nothing for
    `timeout_s`, as a probe does with each case: a machine that is busy only makes it slow. The process and its group
    are gone when this returns. `on_start` gets its pid, which is that of the group."""
    stage(env.store)  # an env that was only planned may be older than today's code
    make_folder(env)
    return run_process(
        [str(env.python), "-m", module, *args, str(os.getpid())],  # it ends with us, however we end
        environ=worker_environ(env.environ, os.environ),
        timeout_s=timeout_s,
        data=data,
        on_start=on_start,
    )


def run_process(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    timeout_s: float,
    data: bytes = b"",
    on_start: Callable[[int], None] | None = None,
    cwd: str = "/",
) -> Ended:
    """As `run`, for any command. A thread may end it early by `kill_group` of its pid."""
    # Files and no pipes: a process that the library starts keeps those open after its parent has ended. Files without a
    # name, in no folder of their own: whoever kills us leaves nothing behind.
    with (
        tempfile.TemporaryFile() as in_file,
        tempfile.TemporaryFile() as out_file,
        tempfile.TemporaryFile() as err_file,
    ):
        in_file.write(data)
        in_file.seek(0)
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environ,
            stdin=in_file,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
        )
        code: int | None = None
        _limit_files(process.pid)
        try:
            if on_start is not None:
                on_start(process.pid)
            code = _wait(process, out_file.fileno(), timeout_s)
        finally:
            kill_group(process.pid)
            process.wait()
        return Ended(code, _end_of(out_file.fileno()), _end_of(err_file.fileno()))


def _wait(process: subprocess.Popen[bytes], out_fd: int, timeout_s: float) -> int | None:
    """The exit code; None when it has written nothing for so long, or takes MAX_WAITS times as long."""
    end_s = time.monotonic() + MAX_WAITS * timeout_s
    said_ns, due_s = os.fstat(out_fd).st_mtime_ns, time.monotonic() + timeout_s
    while (now_s := time.monotonic()) < min(due_s, end_s):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(due_s - now_s, timeout_s / 8))
        if (last_ns := os.fstat(out_fd).st_mtime_ns) != said_ns:
            said_ns, due_s = last_ns, time.monotonic() + timeout_s
    return None


def _end_of(fd: int) -> bytes:
    """The last of what it said: a verdict is its last line."""
    size = os.fstat(fd).st_size
    return os.pread(fd, MAX_SAID_BYTES, max(size - MAX_SAID_BYTES, 0))


def _limit_files(pid: int) -> None:
    """It may write so much into one file; more is SIGXFSZ or an error."""
    with contextlib.suppress(OSError, ValueError):  # it has ended, or has a lower limit
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


def kill_group(pid: int) -> None:
    """SIGKILL to a process that leads a group, and to all of that."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
