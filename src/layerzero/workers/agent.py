"""The children of an agent (workers/join.py): the probe and the worker of its backend, their lives and last words."""

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

from layerzero.ipc import oom
from layerzero.ipc.errors import ConfigError, ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.plain import pack_body

TAIL_BYTES = 2048
MAX_WAITS = 10  # times its timeout that a child which gets on may take in all
PIPE_BYTES = 1 << 16  # what a pipe holds
RECORD = "lz-env.json"
CACHE_VARIABLE = "LAYERZERO_WORKER_CACHE"
WARM_VARIABLE = "LAYERZERO_WORKER_WARM"
FOLDER_VARIABLE = "LAYERZERO_CACHE_FOLDER"  # what its children are told
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
    return Place(backend, provider, env, source_hash(provider))


def source_hash(provider: str = "") -> str:
    """Of our copy of ipc and workers; the same as envs/build/stage.py names it by. With a provider of the agent's
    own, of that, too: it may compute what the broker's does not."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("ipc", "workers"):
        for file in sorted((root / package).rglob("*")):
            if file.suffix in (".py", ".json") and file.is_file():
                data = file.read_bytes()
                name = f"{package}/{file.relative_to(root / package).as_posix()}"
                digest.update(f"{name}\0{len(data)}\0".encode() + data)
    if provider:
        digest.update(f"provider\0{provider}\0".encode())
        with suppress(OSError):  # a module's name: it is part of the environment
            digest.update(Path(provider).read_bytes())
    return digest.hexdigest()[:16]


@dataclass
class _Tool:
    """A throw-away child: the probe, or a kernel's compiler."""

    popen: subprocess.Popen[bytes]
    out_fd: int
    err_fd: int
    since_s: float
    timeout_s: float  # so long it may say nothing, and MAX_WAITS times as long it may take
    due_s: float = 0.0  # when it is killed, unless it has said something
    said_ns: int = 0  # when it last did
    is_late: bool = False

    def __post_init__(self) -> None:
        self.due_s, self.said_ns = self.since_s + self.timeout_s, os.fstat(self.out_fd).st_mtime_ns

    def gets_on(self, now_s: float) -> bool:
        """It has said something, as a probe does with each case: it gets more time."""
        before, self.said_ns = self.said_ns, os.fstat(self.out_fd).st_mtime_ns
        if self.said_ns == before or now_s >= self.since_s + MAX_WAITS * self.timeout_s:
            return False
        self.due_s = now_s + self.timeout_s
        return True

    def close(self) -> None:
        os.close(self.out_fd)
        os.close(self.err_fd)


class Children:
    """Call `look` when one of `fds` is readable, after signals and after `timeout_ms`."""

    def __init__(self, place: Place, control_path: Path, send: Send) -> None:
        self._place = place
        self._control_path = control_path
        self._send = send
        self._keep: messages.Keep | None = None
        self._descriptor_fd = -1
        self._probe: _Tool | None = None
        self._compiler: _Tool | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._oom_kills = oom.OomKills()
        self._oom_watch: oom.Watch | None = None
        self._generation = 0
        self._said_fd = -1  # what the worker prints
        self._tail = b""

    @property
    def fds(self) -> tuple[int, ...]:
        return (self._said_fd,) if self._said_fd >= 0 else ()

    @property
    def _tools(self) -> list[_Tool]:
        return [tool for tool in (self._probe, self._compiler) if tool is not None]

    @property
    def timeout_ms(self) -> float | None:
        due_s = [tool.due_s for tool in self._tools if not tool.is_late]
        return max(min(due_s) - time.monotonic(), 0.0) * 1000 if due_s else None

    # --- what the broker asks for

    def keep(self, message: messages.Keep, fds: list[int]) -> None:
        """What to run, and whether to probe it first. Takes the descriptors over."""
        if len(fds) != 1 or self._keep is not None:
            for fd in fds:
                os.close(fd)
            raise ProtocolError("keep comes once, with the backend's descriptor")
        self._keep, self._descriptor_fd = message, fds[0]
        if message.probes:
            told = [json.dumps(message.calls)] if message.calls else []
            targets = [self._provider(message), f"/proc/self/fd/{fds[0]}", *told]
            self._probe = self._start_tool("layerzero.workers.probe", targets, message.timeout_s, (fds[0],))

    def compile(self, message: messages.CompileHere) -> None:
        if self._keep is None or self._compiler is not None:
            raise ProtocolError("compile_here before keep, or while something is compiled")
        call_fd = memory.create_memfd("call", len(message.call))
        try:
            os.pwrite(call_fd, message.call, 0)
            target = [self._provider(self._keep)]
            self._compiler = self._start_tool("layerzero.workers.compiler", target, message.timeout_s, (), call_fd)
        finally:
            os.close(call_fd)

    def start_worker(self, message: messages.StartWorker) -> None:
        if self._keep is None or self._worker is not None:
            raise ProtocolError("start_worker before keep, or while a worker runs")
        self._generation, self._tail = message.generation, b""
        boot = pack_body(
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
            args = ["--boot-fd", str(boot_fd)]
            popen = self._start("layerzero.workers", args, subprocess.DEVNULL, out_fd, out_fd, (boot_fd,))
        except OSError as exc:
            os.close(said_fd)
            self._send(messages.WorkerEnded(generation=message.generation, code=127, stderr_tail=str(exc)))
            return
        finally:
            os.close(boot_fd)
            os.close(out_fd)
        self._said_fd = said_fd
        self._worker, self._oom_watch = popen, self._oom_kills.watch(popen.pid)
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
        for tool in self._tools:
            now_s = time.monotonic()
            if not tool.is_late and now_s >= tool.due_s and not tool.gets_on(now_s):
                tool.is_late = True
                _kill(tool.popen)
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
        tools = self._tools
        for popen in (*([] if self._worker is None else [self._worker]), *(tool.popen for tool in tools)):
            _kill(popen)
            with suppress(ChildProcessError):
                os.waitpid(popen.pid, 0)
            popen.returncode = -signal.SIGKILL
        for tool in tools:
            tool.close()
        self._worker = self._probe = self._compiler = None
        self._close_said()
        if self._descriptor_fd >= 0:
            os.close(self._descriptor_fd)
        self._descriptor_fd = -1

    def _reaped(self, pid: int, code: int) -> None:
        worker, probe, compiler = self._worker, self._probe, self._compiler
        if worker is not None and pid == worker.pid:
            self._worker, worker.returncode = None, code
            _kill(worker)  # what it has started
            self._read_said()
            self._close_said()
            log("worker.exited", backend=self._place.backend, generation=self._generation, code=code)
            tail = self._tail.decode(errors="replace")
            killed = self._oom_watch.explain() if self._oom_watch is not None and code == -signal.SIGKILL else ""
            self._send(messages.WorkerEnded(generation=self._generation, code=code, stderr_tail=tail, oom=killed))
        elif probe is not None and pid == probe.popen.pid:
            self._probe = None
            self._tell(messages.Probed, probe, code, (probe.out_fd,))
        elif compiler is not None and pid == compiler.popen.pid:
            self._compiler = None
            self._tell(messages.CompiledHere, compiler, code)

    def _read_said(self) -> None:
        """To our own stderr; the last of it is kept. At most what the pipe holds: a worker that prints without end must
        not keep us from killing it."""
        if self._said_fd < 0:
            return
        try:
            data = os.read(self._said_fd, PIPE_BYTES)
        except BlockingIOError:
            return
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

    def _start_tool(
        self, module: str, args: list[str], timeout_s: float, pass_fds: tuple[int, ...], in_fd: int = subprocess.DEVNULL
    ) -> _Tool:
        out_fd, err_fd = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("tool-out", "tool-err"))
        popen = self._start(module, [*args, str(os.getpid())], in_fd, out_fd, err_fd, pass_fds)
        return _Tool(popen, out_fd, err_fd, time.monotonic(), timeout_s)

    def _tell(
        self, kind: type[messages.Probed | messages.CompiledHere], tool: _Tool, code: int, fds: tuple[int, ...] = ()
    ) -> None:
        """A throw-away child has ended; what it had started does now."""
        tool.popen.returncode = code
        _kill(tool.popen)
        size = os.fstat(tool.err_fd).st_size
        tail = os.pread(tool.err_fd, 2 * TAIL_BYTES, max(size - 2 * TAIL_BYTES, 0)).decode(errors="replace")
        seconds = round(time.monotonic() - tool.since_s, 3)
        log("tool.ended", backend=self._place.backend, what=kind.kind, code=code, seconds=seconds)
        try:
            self._send(kind(code=code, is_late=tool.is_late, seconds=seconds, stderr_tail=tail), fds)
        finally:
            tool.close()

    def _start(
        self, module: str, args: list[str], in_fd: int, out_fd: int, err_fd: int, pass_fds: tuple[int, ...]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=in_fd,
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
        if any("{cache}" in value for value in given.values()):
            given |= {FOLDER_VARIABLE: "{cache}", **self._warm(own.get(WARM_VARIABLE, ""))}
        for name, (place, path) in ((n, p) for n in given for p in places.items()):
            given[name] = given[name].replace(place, path)
        return {**_texts(self._keep.defaults), **own, **given, "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}

    def _warm(self, folder: str) -> dict[str, str]:
        """What the caches of this environment begin with, where nothing of them is here."""
        if not folder or not self._place.env:
            return {}
        from layerzero.ipc.compile_caches import exported

        try:
            lines = exported.shipped(Path(folder), self._place.backend, self._place.env)
        except OSError as exc:
            log("cache.warm_unreadable", backend=self._place.backend, folder=folder, cause=str(exc))
            return {}
        return {"LAYERZERO_CACHE_SHARED": "\n".join(lines)} if lines else {}


def _texts(variables: Mapping[str, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in variables.items()}


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """SIGKILL to it and to all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
