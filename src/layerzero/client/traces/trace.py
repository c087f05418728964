"""lz.trace: calls of this process, recorded from start to stop."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero.client.traces.calls import RecordedCall, ScopeRecord
from layerzero.client.traces.contents import MAX_ROWS, TraceContents
from layerzero.client.traces.form import load
from layerzero.client.traces.keeping import DEFAULT_BYTES, Keeper
from layerzero.client.traces.recorder import Buffer, recorder
from layerzero.client.traces.rerun import TraceRun
from layerzero.client.traces.scopes import ModuleScopes, TraceScope, here
from layerzero.client.traces.snapshot import Snapshot
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.version import __version__

MOST_CALLS = 100_000


class Trace:
    """Records every call of an op and of an isolated function of this process, from all threads, between `start` and
    `stop`, or in a `with` block. It may be started again, and goes on then; several may be on at the same time.

    Printed it is a table. Everything else of `contents` is here, too: calls, scopes, text, mermaid, save, run.
    """

    def __init__(self, *, model: Any, most: int, tensors: bool | int) -> None:
        """As lz.trace."""
        if type(most) is not int or most < 1:
            raise InvalidArgument(f"most is {most!r:.40}; allowed: how many of the newest calls are kept, 1 or more")
        if type(tensors) is not bool and (type(tensors) is not int or tensors < 1):
            raise InvalidArgument(f"tensors is {tensors!r:.40}; allowed: True, False, or bytes that may be kept")
        if model is not None and not hasattr(model, "named_modules"):
            raise InvalidArgument(f"model is a {type(model).__name__}; allowed: a module of torch")
        keeper = Keeper(DEFAULT_BYTES if tensors is True else int(tensors)) if tensors else None
        self._buffer, self._model = Buffer(most, keeper), model
        self._modules: ModuleScopes | None = None
        self._clock = (time.time_ns(), time.perf_counter_ns())
        self._seen: tuple[int, TraceContents] | None = None

    @property
    def is_on(self) -> bool:
        """Whether it records. In a forked child it does not."""
        return recorder.has(self._buffer)

    def start(self) -> Trace:
        """Record from now on; nothing where it does already. Returns the trace."""
        if not self.is_on:
            if self._model is not None:
                self._modules = ModuleScopes(self._model)
            self._clock = (time.time_ns(), time.perf_counter_ns())
            recorder.add(self._buffer)
        return self

    def stop(self) -> Trace:
        """Record no more. What was recorded stays. Returns the trace."""
        recorder.remove(self._buffer)
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        return self

    def __enter__(self) -> Trace:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def purge(self) -> None:
        """Forget all that was recorded, and free its memory; go on recording, if it is on."""
        self._buffer.clear()
        self._seen = None

    def scope(self, name: str) -> TraceScope:
        """As lz.trace_scope."""
        return TraceScope(name)

    # --- what was recorded

    @property
    def contents(self) -> TraceContents:
        """What there is now, fixed. Of a call on a GPU that no worker has taken yet it waits for that."""
        noted = self._buffer.noted
        if self._seen is None or self._seen[0] != noted or self.is_on:
            found = Snapshot(self._buffer)
            threads = {one: here.names[one] for one in found.threads}
            self._seen = (
                noted,
                TraceContents(found.calls, found.scopes, found.dropped, self._clock, threads, found.memory, _facts()),
            )
        return self._seen[1]

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """In the order in which they ended."""
        return self.contents.calls

    @property
    def scopes(self) -> tuple[ScopeRecord, ...]:
        return self.contents.scopes

    @property
    def dropped(self) -> int:
        """So many older calls had to make room."""
        return self.contents.dropped

    def text(self, by: str = "backend", most: int | None = MAX_ROWS) -> str:
        """As TraceContents.text."""
        return self.contents.text(by, most)

    def mermaid(self) -> str:
        """As TraceContents.mermaid."""
        return self.contents.mermaid()

    def run(self, backend: str | Sequence[str] | None = None, **options: Any) -> TraceRun:
        """As TraceContents.run."""
        return self.contents.run(backend, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """As TraceContents.save."""
        self.contents.save(path)

    def __len__(self) -> int:
        return len(self._buffer.calls)

    def __str__(self) -> str:
        return str(self.contents)

    def __repr__(self) -> str:
        return f"<lz.Trace, {'on' if self.is_on else 'off'}: {len(self._buffer.calls):,} messages recorded>"

    def _repr_html_(self) -> str:
        return self.contents._repr_html_()


def _facts() -> Mapping[str, Any]:
    import platform  # only where somebody looks

    return {
        "layerzero": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "program": os.path.basename(sys.argv[0]) if sys.argv else "",
        "pid": os.getpid(),
    }


def trace(model: Any = None, *, most: int = MOST_CALLS, tensors: bool | int = False) -> Trace:
    """A trace: what calls this process makes, where they ran, what they took, and which feeds which.

    `with lz.trace() as trace: ...`, then `print(trace)`; or `trace = lz.trace().start()` and `trace.stop()` later.
    model: a module of torch, whose modules' forwards are scopes. most: of the newest calls so many are kept. tensors:
    keep the bytes of arguments and results on the CPU, too, at most so many (True: 256 MiB), those of the newest calls;
    copying and hashing them takes its time. Without, no byte of the caller's is kept. Raises InvalidArgument.
    """
    return Trace(model=model, most=most, tensors=tensors)


def load_trace(path: str | os.PathLike[str]) -> TraceContents:
    """What a trace's `save` wrote, here or elsewhere: everything in it is checked, and nothing of it is run. Raises
    InvalidArgument for a file that is none, or that is damaged."""
    return load(Path(path))


trace_scope = TraceScope
