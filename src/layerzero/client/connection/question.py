"""Questions to the broker, of those who make no calls, too."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layerzero.client.connection.call import error_of
from layerzero.client.connection.link import Link, Pending
from layerzero.ipc.errors import Busy
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.plain import unpack_body
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.version import __version__

_FAILED = int(Kind.FAILED)  # enums are slow


def ask(link: Link, method: str, params: dict[str, Any], within_s: float = math.inf) -> Any:
    """The answer, as plain values. Raises Busy when there is none `within_s` seconds, and what the broker raised."""
    pending = Pending()
    body = messages.encode(messages.Request(method=method, params=params))
    link.submit(pending, lambda seq: wire.pack(Kind.REQUEST, seq=seq, body=body))
    if not link.wait(pending, time.monotonic() + within_s):
        raise Busy(f"the broker has not answered {method} within {within_s:g} s")
    if pending.error is not None:
        raise pending.error
    assert pending.header is not None
    if pending.header.kind == _FAILED:
        raise error_of(pending.body)[0]
    return unpack_body(pending.body)


def asker(path: Path, key: bytes | None) -> Callable[[str], dict[str, Any]]:
    """What asks the broker whose socket that is, by a connection that stays: each time costs both sides two fifths of
    what `ask_once` does. It makes no calls. Raises as a connection does."""
    link = Link(path, __version__, _heed_not, _heed_not, key)
    return lambda method: dict(ask(link, method, {}))


def ask_once(path: Path, key: bytes | None, method: str) -> dict[str, Any]:
    """Of the broker whose socket that is, by a connection that is gone afterwards: it keeps no broker. A Session has
    much that only calls need."""
    link = Link(path, __version__, _heed_not, _heed_not, key)
    try:
        answer: dict[str, Any] = ask(link, method, {})
    finally:
        link.close()
    return answer


def _heed_not(*_: object) -> None:
    """No calls, no decisions and no leases."""
