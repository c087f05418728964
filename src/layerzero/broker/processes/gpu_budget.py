"""The memory of a GPU that workers may hold together: above it those that were called longest ago end, and start again
when they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from layerzero.broker.core import events as ev
from layerzero.broker.core.model import Worker
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.ipc.cuda.usage import GpuUsage
from layerzero.ipc.logs import log

LOOK_S = 1.0


class GpuBudget:
    """For the broker's own thread. Of workers of kernels and of functions alike."""

    def __init__(
        self,
        limit_bytes: int,
        state: BrokerState,
        is_free: Callable[[str, int], bool],
        handle: Callable[[ev.Event], None],
        usage: Callable[[], Mapping[int, Mapping[str, int]]] | None = None,
    ) -> None:
        """`limit_bytes`: of each GPU; 0: any amount. `is_free`: whether a worker, by backend and generation, is in no
        call and keeps nothing. `handle` takes what the core must hear. `usage`: bytes by pid and GPU, as the driver
        tells them when left out."""
        self._limit, self._state, self._is_free, self._handle = limit_bytes, state, is_free, handle
        self._usage = usage or (GpuUsage().by_process if limit_bytes else dict)
        self._uses: dict[str, tuple[tuple[int, int, int], float]] = {}  # and since when they are the same
        self._exceeded: set[str] = set()  # GPUs where nobody can be ended, which was said
        self._due_s = 0.0

    def look(self, now_s: float) -> None:
        """End whom the budget asks for, once a second at most."""
        if not self._limit or now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_S
        held: dict[str, Counter[str]] = {}  # by GPU and backend
        used = self._usage()
        for backend, worker in self._state.workers.items():
            self._note_use(backend, worker, now_s)
            for gpu, nbytes in used.get(worker.pid, {}).items() if worker.pid and not worker.is_joined else ():
                held.setdefault(gpu, Counter())[backend] = nbytes
        for gpu, by_backend in held.items():
            self._keep(gpu, by_backend, now_s)

    def _note_use(self, backend: str, worker: Worker, now_s: float) -> None:
        uses = (worker.generation, worker.answered, worker.failed)
        if self._uses.get(backend, (None,))[0] != uses:
            self._uses[backend] = (uses, now_s)

    def _keep(self, gpu: str, held: Counter[str], now_s: float) -> None:
        """One GPU's. What is freed is seen when the process has ended: until then it counts as free."""
        workers = self._state.workers
        left = held.total() - sum(held[one] for one in held if workers[one].is_resting)
        for backend in sorted(held, key=lambda one: self._uses[one][1]):
            if left <= self._limit:
                break
            worker, since_s = workers[backend], self._uses[backend][1]
            is_idle = worker.state is WorkerState.READY and worker.is_idle and since_s < now_s
            if worker.is_resting or not is_idle or not self._is_free(backend, worker.generation):
                continue
            for _ in range(2):  # lanes to it are taken back first
                self._handle(ev.WorkerSpared(backend))
            if worker.is_resting:
                left -= held[backend]
                log("gpu_budget.reclaimed", backend=backend, gpu=gpu, bytes=held[backend], held=held.total())
        if left <= self._limit:
            self._exceeded.discard(gpu)
        elif gpu not in self._exceeded:
            self._exceeded.add(gpu)
            log("gpu_budget.exceeded", gpu=gpu, bytes=left, limit=self._limit, backends=sorted(held))
