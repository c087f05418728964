"""The worker processes that there are now, by backend and generation: ours (supervisor.py has the mechanism), and those
that have joined (joined.py)."""

from __future__ import annotations

import hmac
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io import frame_codec
from layerzero.broker.io.poller import Poller
from layerzero.broker.processes import stacks, supervisor
from layerzero.broker.processes.last_calls import LastCalls
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.processes.self_registered import Joined, RemoteWorker
from layerzero.ipc import oom
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.logs import log
from layerzero.ipc.transport import control
from layerzero.ipc.transport.endpoints import Endpoints
from layerzero.ipc.version import __version__

AnyWorker = supervisor.Process | RemoteWorker


class Processes:
    """`handle` takes what became of starts; `on_end` takes a process that has ended and is none of these any more."""

    def __init__(
        self,
        settings: Settings,
        endpoints: Endpoints,
        launcher: Launcher,
        poller: Poller,
        joined: Joined,
        handle: Callable[[ev.Event], None],
        on_end: Callable[[supervisor.Process], None],
    ) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._launcher = launcher
        self._poller = poller
        self._joined = joined
        self._handle = handle
        self._on_end = on_end
        self.last_calls = LastCalls()
        self.to_worker = self.last_calls.noting(frame_codec.TO_WORKER)  # what makes frames
        self._live: dict[tuple[str, int], supervisor.Process] = {}
        self._oom_kills = oom.OomKills()
        self._stacks = stacks.StackWatch(settings.stacks_after_s, stacks.find(os.environ.get("PATH", os.defpath)))

    def get(self, key: tuple[str, int]) -> AnyWorker | None:
        return self._live.get(key) or self._joined.get(key)

    def _all(self) -> list[AnyWorker]:
        return [*self._live.values(), *self._joined.workers()]

    def of_ticket(self, ticket: bytes) -> AnyWorker | None:
        return next((process for process in self._all() if hmac.compare_digest(process.ticket, ticket)), None)

    def executing(self) -> dict[tuple[str, int], int]:
        """What their control pages say."""
        return {(process.backend, process.generation): process.page.read()[0] for process in self._all()}

    def is_free(self, backend: str, generation: int) -> bool:
        """Whether a worker is in no call and keeps nothing, as its control page says."""
        process = self.get((backend, generation))
        return process is not None and process.page.read()[0] == 0 and process.page.read_kept() == 0

    def spawn(self, action: act.Spawn) -> None:
        backend, generation = action.backend, action.generation
        if backend in self._joined.names:
            self._joined.start(backend, generation, self._settings.failpoints_of(backend))
            return
        try:
            process = supervisor.spawn(
                backend,
                generation,
                self._launcher.launch(backend),
                control_path=self._endpoints.control,
                log=self._log_of(backend),
                package=__version__,
                failpoints=self._settings.failpoints_of(backend),
                oom_kills=self._oom_kills,
            )
        except (OSError, LayerZeroError) as exc:
            with suppress(OSError):
                self._return_log(backend)
            error = exc if isinstance(exc, LayerZeroError) else supervisor.start_error(exc, backend)
            self._handle(ev.SpawnFailed(backend, generation, error))
            return
        self._live[backend, generation] = process
        self._stacks.add(process)
        self._poller.watch(process.pidfd, lambda: self._end(process))
        log("worker.started", backend=backend, generation=generation, pid=process.pid)
        self._handle(ev.WorkerSpawned(backend, generation, process.pid))

    def end_of(self, process: AnyWorker, rings: Mapping[int, ev.RingSnapshot]) -> ev.WorkerExited:
        """How a process ended, which is reaped by it; its last calls are kept. `rings`: what was left on those of its
        backend, by lanes."""
        self.last_calls.note_end(process)
        ended = process.reap()
        return ev.WorkerExited(
            process.backend,
            process.generation,
            ended.exit_code,
            ended.executing,
            ended.phase,
            ended.stderr_tail,
            rings,
            is_departure=isinstance(process, RemoteWorker) and not process.has_agent,
            oom=ended.oom,
        )

    def _log_of(self, backend: str) -> Path:
        """The backend's log. A worker that another one starts beside goes on in the file that was before it, so that
        the last words of each are its own."""
        path = self._endpoints.worker_log(backend)
        for one in self._live.values():
            if one.log == path:
                with suppress(OSError):
                    one.log = path.rename(path.with_suffix(".log.1"))
        return path

    def _end(self, process: supervisor.Process) -> None:
        if not control.is_readable(process.pidfd):
            return  # an event of another descriptor that had this number before
        self._poller.unwatch(process.pidfd)
        del self._live[process.backend, process.generation]
        self._stacks.remove(process)
        with suppress(OSError):
            self._return_log(process.backend, process)
        self._on_end(process)

    def _return_log(self, backend: str, ended: supervisor.Process | None = None) -> None:
        """Where one has `ended`, or did not start, that was to take over, the log is that of the worker before again,
        with its words at the end."""
        path = self._endpoints.worker_log(backend)
        before = next((one for (name, _), one in self._live.items() if name == backend and one.log != path), None)
        if before is None or (ended is not None and ended.log != path):
            return
        if ended is not None:
            ended.log_start = before.log.stat().st_size
            with before.log.open("ab") as file, path.open("rb") as said:
                shutil.copyfileobj(said, file)
        before.log = before.log.replace(path)

    def bound_logs(self) -> None:
        for process in self._live.values():
            process.bound_log()

    def kill(self, backend: str, generation: int) -> None:
        """Its end is seen later. Nothing happens when it has ended already."""
        process = self.get((backend, generation))
        if isinstance(process, RemoteWorker):
            self._joined.kill(process)
        elif process is not None:
            process.kill()

    def hung_up(self, backend: str, generation: int) -> None:
        """It has closed its connection: it is ending, or of no more use; one that is ending keeps its exit code."""
        process = self.get((backend, generation))
        if isinstance(process, RemoteWorker):
            self._joined.hung_up(process)
        elif process is not None:
            process.kill()

    def kill_all(self) -> None:
        for process in self._all():
            self.kill(process.backend, process.generation)

    def close(self) -> None:
        """Kill all of ours and wait for their ends. Those that joined end with the connections of their agents."""
        for process in self._live.values():
            process.kill()
            process.reap()
        self._live.clear()
        self._joined.close()
