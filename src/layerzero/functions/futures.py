"""Submitted calls of functions and objects, as their callers have them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any, Protocol

from layerzero.functions.report import FunctionReport


class Sending(Protocol):
    """A call that was sent: a Call, or what becomes one where it does not end plainly (functions/express.py)."""

    @property
    def label(self) -> str: ...

    @property
    def is_sent(self) -> bool: ...

    @property
    def report(self) -> FunctionReport | None: ...

    def finish(self, timeout: float | None = None) -> Any: ...


class FunctionFuture:
    """A submitted call of a function: `result()` waits; it can be awaited too."""

    def __init__(self, call: Sending) -> None:
        self._call = call
        self._lock = threading.Lock()
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True when `result()` would not wait for the environment. A retry or a fallback runs in `result()`."""
        return self._is_done or not self._call.is_sent

    def result(self, timeout: float | None = None) -> Any:
        """The function's result. Raises as a call does, and TimeoutError when it is not there after `timeout` seconds:
        the call goes on then."""
        with self._lock:
            if not self._is_done:
                try:
                    self._value = self._call.finish(timeout)
                except BaseException as exc:
                    goes_on = isinstance(exc, TimeoutError) or not isinstance(exc, Exception)
                    if goes_on and self._call.report is None:  # a fallback's own has ended it
                        raise
                    self._error = exc
                self._is_done = True
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def report(self) -> FunctionReport | None:
        """As Isolated.last_report, of this call; None until its result was taken."""
        return self._call.report

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "answered" if not self._is_done else "done"
        return f"<lz.FunctionFuture of {self._call.label}: {state}>"
