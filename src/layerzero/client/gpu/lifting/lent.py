"""What launched calls work on of libraries that show no stream, such as JAX: kept until their kernels are through. Its
library would give the memory to the next array before that, in an order of its own."""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from layerzero.client.gpu.device import Gpu
from layerzero.ipc.errors import CudaError

DESCRIBED = "dlpack"  # kind of arrays that show no stream, as JAX's: they are described at each call, and lent
KINDS = ("torch", "cupy", DESCRIBED)  # of arrays that calls are lifted for


def unsupported(kind: str) -> str:
    """Why calls with arrays of another kind are not lifted."""
    return f"ARRAYS_UNSUPPORTED: {kind}; allowed: {', '.join(KINDS)}"


class Lent:
    """Of one connection. Threads may share it."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], deque[tuple[Gpu, int, object]]] = {}  # by GPU and stream: with events
        self._lock = threading.Lock()

    def keep(self, gpu: Gpu, stream: int, lent: object) -> None:
        """Until all that is enqueued on the stream now is done. Needs the GPU's context to be current."""
        driver = gpu.memory.context.driver
        event = driver.create_event()
        driver.record_event(event, stream)
        with self._lock:
            held = self._held.setdefault((gpu.uuid, stream), deque())
            held.append((gpu, event, lent))
            done = []
            while held and driver.is_event_done(held[0][1]):
                done.append(held.popleft())
        for _, passed, _ in done:
            driver.destroy_event(passed)

    def close(self) -> None:
        """Wait for the kernels, and give back what they worked on."""
        with self._lock:
            queues, self._held = self._held, {}
        for (_, stream), held in queues.items():
            for gpu, event, _ in held:
                with contextlib.suppress(CudaError), gpu.memory.context as context:  # a GPU that is lost is through
                    context.driver.synchronize_stream(stream)
                    context.driver.destroy_event(event)
