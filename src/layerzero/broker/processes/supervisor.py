"""Worker processes: start, watch by pidfd, kill, reap. Mechanism only; when to do what is the core's decision."""

from __future__ import annotations

import errno
import os
import secrets
import select
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack

from layerzero.broker.io import fd_reserve
from layerzero.broker.processes import stacks
from layerzero.ipc import oom
from layerzero.ipc.errors import EnvError, LayerZeroError, OutOfMemory
from layerzero.ipc.shm import memory
from layerzero.ipc.vocabulary.worker_codes import phase_name

STDERR_TAIL_BYTES = 2048
UNDER = "LAYERZERO_UNDER"  # variable: a program that workers are started by, and its arguments, as a shell has them
UNDER_S = 5.0  # so long that program has to say it
LOG_LIMIT_BYTES = 16 << 20
LOG_KEPT_BYTES = 1 << 20  # of one that has become too long while its worker runs
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENOMEM, errno.EAGAIN, errno.EDQUOT)  # there may be room soon


@dataclass(frozen=True)
class Launch:
    """How to start a backend's worker."""

    python: Path
    environ: Mapping[str, str]
    provider: str
    lifts: bool = False  # as in BootConfig


@dataclass
class Process:
    """A started worker and what the broker holds of it. `pidfd` becomes readable when it has ended."""

    backend: str
    generation: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    ticket: bytes
    page_fd: int
    page: memory.ControlPage
    log: Path
    log_start: int
    oom_watch: oom.Watch
    look: stacks.Look | None = None  # where it was in a long call
    is_under: bool = False  # it was started by another program, which may have something to say when it has ended

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self) -> None:
        """SIGKILL to the worker and everything it started. Waits where another program started it, of a replay."""
        if self.is_under:
            select.select([self.pidfd], [], [], UNDER_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def bound_log(self) -> None:
        """Keep the end of a log that has become too long; its worker goes on at the new end."""
        with suppress(OSError), self.log.open("r+b") as file:
            if file.seek(0, os.SEEK_END) <= LOG_LIMIT_BYTES:
                return
            file.seek(-LOG_KEPT_BYTES, os.SEEK_END)
            end = file.read(LOG_KEPT_BYTES)
            try:
                with open(self.log.with_suffix(".log.1"), "wb", opener=_private) as old:
                    old.write(end)
            finally:  # on a full disk above all
                file.truncate(0)
                self.log_start = 0

    def reap(self) -> Exit:
        """Collect an ended worker, end what it left behind, release what the broker holds of it."""
        self.kill()
        exit_code = self.popen.wait()
        executing, phase = self.page.read()
        self.page.close()
        os.close(self.page_fd)
        os.close(self.pidfd)
        killed = self.oom_watch.explain() if exit_code == -signal.SIGKILL else ""
        tail = stderr_tail(self)
        if self.look is not None and self.look.executing == executing:
            stacks.tell(self.log, self.look)
        return Exit(exit_code, executing, phase_name(phase), tail, killed)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@dataclass(frozen=True)
class Exit:
    exit_code: int  # negative: the signal that killed it
    executing: int
    phase: str
    stderr_tail: str
    oom: str = ""  # where the kernel killed it for lack of memory, if it did


def spawn(
    backend: str,
    generation: int,
    launch: Launch,
    *,
    control_path: Path,
    log: Path,
    package: str,
    failpoints: str,
    oom_kills: oom.OomKills,
) -> Process:
    """Start a worker. Call it from a thread that lives as long as the broker: the kernel ties the worker's life to
    the thread that started it. Raises OSError."""
    ticket = secrets.token_bytes(16)
    under = shlex.split(os.environ.get(UNDER, ""))
    boot = msgpack.packb(
        {
            "control_path": str(control_path),
            "ticket": ticket,
            "provider": launch.provider,
            "backend": backend,
            "parent_pid": 0 if under else os.getpid(),
            "package": package,
            "failpoints": failpoints,
            "lifts": launch.lifts,
        }
    )
    with ExitStack() as kept, ExitStack() as passed:
        boot_fd = memory.create_memfd("boot", len(boot))
        passed.callback(os.close, boot_fd)
        os.pwrite(boot_fd, boot, 0)
        page_fd = memory.create_memfd("page", memory.PAGE_BYTES)
        kept.callback(os.close, page_fd)
        if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
            log.replace(log.with_suffix(".log.1"))
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        passed.callback(os.close, log_fd)
        log_start = os.fstat(log_fd).st_size
        popen = subprocess.Popen(
            [*under, str(launch.python), "-m", "layerzero.workers", "--boot-fd", str(boot_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            env=dict(launch.environ),
            cwd="/",
            pass_fds=(boot_fd,),
            start_new_session=True,
        )
        kept.callback(popen.wait)
        kept.callback(os.killpg, popen.pid, signal.SIGKILL)
        page = memory.ControlPage(page_fd, writable=False)
        pidfd = os.pidfd_open(popen.pid)
        kept.pop_all()
    fd_reserve.hand_down(popen.pid)
    watch = oom_kills.watch(popen.pid)
    its = (ticket, page_fd, page, log, log_start, watch)
    return Process(backend, generation, popen, pidfd, *its, is_under=bool(under))


def start_error(exc: OSError, backend: str) -> LayerZeroError:
    """Why a process could not be started: something is wrong with its environment, or the machine has no descriptor,
    disk or memory for it at this moment."""
    text = f"cannot start a process of backend {backend}: {exc}"
    return OutOfMemory(text) if exc.errno in PASSING else EnvError(text, env=backend)


def stderr_tail(process: Process) -> str:
    """The last lines that this start of the worker wrote."""
    try:
        with process.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(process.log_start, size - STDERR_TAIL_BYTES))
            return file.read(STDERR_TAIL_BYTES).decode(errors="replace")
    except OSError as exc:
        return f"(log unreadable: {exc})"
