"""The worker processes that there are now, by backend and generation (supervisor.py has the mechanism)."""

from __future__ import annotations

from collections.abc import Callable

import layerzero
from layerzero.broker import events as ev
from layerzero.broker import supervisor
from layerzero.broker.descriptors import Descriptors
from layerzero.broker.launcher import Launcher
from layerzero.broker.settings import Settings
from layerzero.ipc import control
from layerzero.ipc.endpoints import Endpoints
from layerzero.ipc.errors import EnvError, LayerZeroError
from layerzero.ipc.logs import log


class Processes:
    """`handle` takes what became of starts; `on_end` takes a process that has ended and is none of these any more."""

    def __init__(
        self,
        settings: Settings,
        endpoints: Endpoints,
        launcher: Launcher,
        descriptors: Descriptors,
        handle: Callable[[ev.Event], None],
        on_end: Callable[[supervisor.Process], None],
    ) -> None:
        self._settings = settings
        self._endpoints = endpoints
        self._launcher = launcher
        self._descriptors = descriptors
        self._handle = handle
        self._on_end = on_end
        self._live: dict[tuple[str, int], supervisor.Process] = {}

    def get(self, key: tuple[str, int]) -> supervisor.Process | None:
        return self._live.get(key)

    def of_ticket(self, ticket: bytes) -> supervisor.Process | None:
        return next((process for process in self._live.values() if process.ticket == ticket), None)

    def executing(self) -> dict[tuple[str, int], int]:
        """What their control pages say."""
        return {key: process.page.read()[0] for key, process in self._live.items()}

    def spawn(self, action: ev.Spawn) -> None:
        backend, generation = action.backend, action.generation
        try:
            process = supervisor.spawn(
                backend,
                generation,
                self._launcher.launch(backend),
                control_path=self._endpoints.control,
                log=self._endpoints.worker_log(backend),
                package=layerzero.__version__,
                failpoints=self._settings.failpoints_of(backend),
            )
        except (OSError, LayerZeroError) as exc:
            error = exc if isinstance(exc, LayerZeroError) else EnvError(f"cannot start the worker: {exc}", env=backend)
            self._handle(ev.SpawnFailed(backend, generation, error))
            return
        self._live[backend, generation] = process
        self._descriptors.watch(process.pidfd, lambda: self._end(process))
        log("worker.started", backend=backend, generation=generation, pid=process.pid)
        self._handle(ev.WorkerSpawned(backend, generation, process.pid))

    def _end(self, process: supervisor.Process) -> None:
        if not control.is_readable(process.pidfd):
            return  # an event of another descriptor that had this number before
        self._descriptors.unwatch(process.pidfd)
        del self._live[process.backend, process.generation]
        self._on_end(process)

    def kill(self, backend: str, generation: int) -> None:
        """Its end is seen later. Nothing happens when it has ended already."""
        process = self.get((backend, generation))
        if process is not None:
            supervisor.kill(process)

    def kill_all(self) -> None:
        for process in self._live.values():
            supervisor.kill(process)

    def close(self) -> None:
        """Kill all and wait for their ends."""
        for process in self._live.values():
            supervisor.kill(process)
            supervisor.reap(process)
        self._live.clear()
