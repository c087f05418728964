"""The children of a keeper (workers/join.py): the probe and the worker of its backend, their lives and last words."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from layerzero.ipc import memory, messages
from layerzero.ipc.errors import ConfigError, ProtocolError
from layerzero.ipc.logs import log

TAIL_BYTES = 2048
RECORD = "lz-env.json"
CACHE_VARIABLE = "LAYERZERO_WORKER_CACHE"
_NOT_PASSED = ("LAYERZERO_SECRET_FILE", "LAYERZERO_RUNTIME_DIR")


class Send(Protocol):
    def __call__(self, message: messages.Message, fds: tuple[int, ...] = ()) -> None: ...


@dataclass(frozen=True)
class Place:
    """What is here: told to the broker, which makes it part of what certificates and times depend on."""

    backend: str
    provider: str  # instead of the broker's, if it is not empty
    env: str
    source: str


def describe_place(backend: str, provider: str) -> Place:
    """This interpreter's environment. `env` is empty when `lz env build` did not make it. Raises ConfigError."""
    path = Path(sys.prefix) / RECORD
    try:
        env = str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        env = ""
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is not a record of lz env build: {type(exc).__name__}: {exc}") from exc
    return Place(backend, provider, env, source_hash())


def source_hash() -> str:
    """Of our copy of ipc and workers; the same as envs/stage.py names it by."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("ipc", "workers"):
        for file in sorted((root / package).rglob("*")):
            if file.suffix in (".py", ".json") and file.is_file():
                data = file.read_bytes()
                name = f"{package}/{file.relative_to(root / package).as_posix()}"
                digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


@dataclass
class _Child:
    popen: subprocess.Popen[bytes]
    since_s: float
    due_s: float = 0.0  # when a probe is killed
    is_late: bool = False


class Children:
    """Call `look` when one of `fds` is readable, after signals and after `timeout_ms`."""

    def __init__(self, place: Place, control_path: Path, send: Send) -> None:
        self._place = place
        self._control_path = control_path
        self._send = send
        self._keep: messages.Keep | None = None
        self._descriptor_fd = -1
        self._probe: _Child | None = None
        self._out_fd = self._err_fd = -1  # of the probe
        self._worker: _Child | None = None
        self._generation = 0
        self._said_fd = -1  # what the worker prints
        self._tail = b""

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._said_fd,) if self._said_fd >= 0 else ()

    @property
    def timeout_ms(self) -> float | None:
        return max(self._probe.due_s - time.monotonic(), 0.0) * 1000 if self._probe is not None else None

    # --- what the broker asks for

    def keep(self, message: messages.Keep, fds: list[int]) -> None:
        """What to run, and whether to probe it first. Takes the descriptors over."""
        if len(fds) != 1 or self._keep is not None:
            for fd in fds:
                os.close(fd)
            raise ProtocolError("keep comes once, with the backend's descriptor")
        self._keep, self._descriptor_fd = message, fds[0]
        if message.probes:
            self._start_probe(message)

    def start_worker(self, message: messages.StartWorker) -> None:
        if self._keep is None or self._worker is not None:
            raise ProtocolError("start_worker before keep, or while a worker runs")
        self._generation, self._tail = message.generation, b""
        boot = messages.pack_body(
            {
                "control_path": str(self._control_path),
                "ticket": message.ticket,
                "provider": self._provider(self._keep),
                "backend": self._place.backend,
                "parent_pid": os.getpid(),
                "package": "",
                "failpoints": message.failpoints,
            }
        )
        boot_fd = memory.create_memfd("boot", len(boot))
        said_fd, out_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(said_fd, False)
        try:
            os.pwrite(boot_fd, boot, 0)
            popen = self._start("layerzero.workers", ["--boot-fd", str(boot_fd)], out_fd, out_fd, (boot_fd,))
        except OSError as exc:
            os.close(said_fd)
            self._send(messages.WorkerEnded(generation=message.generation, code=127, stderr_tail=str(exc)))
            return
        finally:
            os.close(boot_fd)
            os.close(out_fd)
        self._said_fd = said_fd
        self._worker = _Child(popen, time.monotonic())
        log("worker.started", backend=self._place.backend, generation=message.generation, pid=popen.pid)
        self._send(messages.WorkerStarted(generation=message.generation, pid=popen.pid))

    def kill_worker(self, generation: int) -> None:
        if self._worker is not None and self._generation == generation:
            _kill(self._worker)

    # --- what happens

    def look(self, ready: Collection[int]) -> None:
        """Pass on what the worker prints, reap what has ended (also what libraries have left to pid 1), end a late
        probe."""
        if self._said_fd in ready:
            self._read_said()
        if self._probe is not None and time.monotonic() >= self._probe.due_s:
            self._probe.is_late = True
            _kill(self._probe)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._reaped(pid, os.waitstatus_to_exitcode(status))

    def end(self) -> None:
        """Kill everything and wait for it: on return no process of ours can write anywhere."""
        for child in (self._worker, self._probe):
            if child is not None:
                _kill(child)
                with suppress(ChildProcessError):
                    os.waitpid(child.popen.pid, 0)
                child.popen.returncode = -signal.SIGKILL
        self._worker = self._probe = None
        for fd in (self._said_fd, self._descriptor_fd, self._out_fd, self._err_fd):
            if fd >= 0:
                os.close(fd)
        self._said_fd = self._descriptor_fd = self._out_fd = self._err_fd = -1

    def _reaped(self, pid: int, code: int) -> None:
        worker, probe = self._worker, self._probe
        if worker is not None and pid == worker.popen.pid:
            self._worker, worker.popen.returncode = None, code
            _kill(worker)  # what it has started
            self._read_said()
            self._close_said()
            log("worker.exited", backend=self._place.backend, generation=self._generation, code=code)
            tail = self._tail.decode(errors="replace")
            self._send(messages.WorkerEnded(generation=self._generation, code=code, stderr_tail=tail))
        elif probe is not None and pid == probe.popen.pid:
            self._probe, probe.popen.returncode = None, code
            _kill(probe)
            self._tell_probed(probe, code)

    def _read_said(self) -> None:
        """To our own stderr; the last of it is kept."""
        with suppress(BlockingIOError):
            while self._said_fd >= 0:
                data = os.read(self._said_fd, 1 << 16)
                if not data:  # all who could print have closed it
                    self._close_said()
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                with suppress(OSError):  # nobody reads us: no reason to stop
                    sys.stderr.buffer.write(data)
                    sys.stderr.flush()

    def _close_said(self) -> None:
        if self._said_fd >= 0:
            os.close(self._said_fd)
        self._said_fd = -1

    # --- processes

    def _provider(self, keep: messages.Keep) -> str:
        return self._place.provider or keep.provider

    def _start_probe(self, keep: messages.Keep) -> None:
        self._out_fd, self._err_fd = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("probe-out", "probe-err"))
        fd = self._descriptor_fd
        targets = [self._provider(keep), f"/proc/self/fd/{fd}", str(os.getpid())]
        popen = self._start("layerzero.workers.probe", targets, self._out_fd, self._err_fd, (fd,))
        now_s = time.monotonic()
        self._probe = _Child(popen, now_s, now_s + keep.timeout_s)

    def _tell_probed(self, probe: _Child, code: int) -> None:
        out_fd, err_fd, self._out_fd, self._err_fd = self._out_fd, self._err_fd, -1, -1
        size = os.fstat(err_fd).st_size
        tail = os.pread(err_fd, 2 * TAIL_BYTES, max(size - 2 * TAIL_BYTES, 0)).decode(errors="replace")
        seconds = round(time.monotonic() - probe.since_s, 3)
        log("probe.ended", backend=self._place.backend, code=code, seconds=seconds)
        message = messages.Probed(code=code, is_late=probe.is_late, seconds=seconds, stderr_tail=tail)
        try:
            self._send(message, (out_fd,))
        finally:
            os.close(out_fd)
            os.close(err_fd)

    def _start(
        self, module: str, args: list[str], out_fd: int, err_fd: int, pass_fds: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.DEVNULL,
            stdout=out_fd,
            stderr=err_fd,
            env=self._environ(),
            cwd="/",
            pass_fds=pass_fds,
            start_new_session=True,
        )

    def _environ(self) -> dict[str, str]:
        """The container's variables and those of the backend, which win: certificates depend on them."""
        assert self._keep is not None
        own = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED}
        caches = own.get(CACHE_VARIABLE) or str(Path(tempfile.gettempdir()) / "layerzero-caches")
        places = {"{site}": sysconfig.get_path("purelib"), "{cache}": caches, "{store}": caches}
        given = _texts(self._keep.environ)
        for name, (place, path) in ((n, p) for n in given for p in places.items()):
            given[name] = given[name].replace(place, path)
        return {**_texts(self._keep.defaults), **own, **given, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}


def _texts(variables: Mapping[object, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in variables.items()}


def _kill(child: _Child) -> None:
    """SIGKILL to it and to all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(child.popen.pid, signal.SIGKILL)
