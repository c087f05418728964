"""The bytes of calls' arguments and results, where a trace is asked to keep them: those of the newest calls, equal ones
once, as capsules have them (client/capsules/form.py)."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.capsules.form import MAX_SEGMENTS, Argument, Segment
from layerzero.client.capsules.taking import lay_out, spec_of
from layerzero.client.connection.call import Request, describe_args
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

DEFAULT_BYTES = 256 << 20


class Keeper:
    """Of one trace: at most so many bytes, those of the oldest calls go first. Threads may share it."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self.memory: dict[str, bytes] = {}
            self._uses: dict[str, int] = {}
            self._order: deque[str] = deque()
            self.nbytes = 0

    def add(self, digest: str, data: bytes) -> None:
        with self._lock:
            if digest not in self.memory:
                self.memory[digest] = data
                self.nbytes += len(data)
            self._uses[digest] = self._uses.get(digest, 0) + 1
            self._order.append(digest)
            while self.nbytes > self.most_bytes:
                oldest = self._order.popleft()
                self._uses[oldest] -= 1
                if not self._uses[oldest]:
                    del self._uses[oldest]
                    self.nbytes -= len(self.memory.pop(oldest))


class Kept:
    """What was kept of one call: `arguments` lie in `segments`, `results` are (name, row-major spec, SHA-256). `why`:
    why nothing was, "" where it was."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self._op = ""
        self.arguments: tuple[Argument, ...] = ()
        self.segments: tuple[Segment, ...] = ()
        self.results: list[tuple[str, TensorSpec, str]] = []
        self.why = ""

    @classmethod
    def of(cls, request: Request, keepers: Sequence[Keeper]) -> Kept:
        """Before the call runs: it may write into its arguments."""
        made = cls(keepers)
        made._op = request.op
        try:
            made._take(request)
        except (LayerZeroError, MemoryError) as exc:  # what is wrong with the call is said by the call itself
            made.why = f"not kept: {exc!s:.200}"
        return made

    def _take(self, request: Request) -> None:
        arrays = describe_args(request)
        names = OPS[request.op].inputs
        if request.output_bytes is not None or len(names) > MAX_SEGMENTS:
            self.why = f"calls of {request.op} have no tensors to be kept"
        elif any(one is not None and one.device != CPU for one in arrays):
            self.why = "its arrays are on a GPU"
        elif sum(one.nbytes for one in arrays if one is not None) > min(one.most_bytes for one in self._keepers):
            self.why = "its arguments are larger than all that the trace may keep"
        if self.why:
            return
        own: dict[str, Any] = {}
        given = [(name, one, spec_of(one)) for name, one in zip(names, arrays, strict=True) if one is not None]
        self.arguments, segments, blocks = lay_out(given, own)
        self.segments = tuple(
            replace(segment, sha256=self._add(bytes(block))) for segment, block in zip(segments, blocks, strict=True)
        )

    def take_results(self, value: Any, request: Request | None) -> None:
        """After it has run. `request`: for what an op wrote in place."""
        if self.why:
            return
        op = OPS[self._op]
        if value is None and request is not None:
            made = {name: request.args[op.inputs.index(name)] for name in op.in_place}
        else:
            made = dict(zip(op.outputs, value if isinstance(value, tuple) else (value,), strict=False))
        for name, one in made.items():
            with suppress(LayerZeroError, MemoryError):
                found = describe(one)
                block = bytearray(found.nbytes)
                copy_into(found, memoryview(block))
                spec = TensorSpec.contiguous(found.spec.dtype, found.spec.shape)
                self.results.append((name, spec, self._add(bytes(block))))

    def _add(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        for keeper in self._keepers:
            keeper.add(digest, data)
        return digest
