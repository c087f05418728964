"""What of a worker is compiled: calls of express lanes that are ready to be run, served by workers/_serving.c. Where it
cannot be loaded, as in an image with another libc, the same steps run in Python."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from layerzero.ipc import spinning
from layerzero.ipc.shm import lane, recent_calls
from layerzero.ipc.vocabulary.worker_codes import EXECUTING, IDLE, MAPPED, WRITTEN, mark

if TYPE_CHECKING:
    from layerzero.ipc.shm.memory import ControlPage
    from layerzero.workers.provider import Bound

DISABLED = "LAYERZERO_NO_C"
Claimed: TypeAlias = tuple[int, int, bytes]  # a call: its number, plan, references
_fence = threading.Lock()
LAYOUT = (*lane.LAYOUT, IDLE, MAPPED, EXECUTING, WRITTEN, *recent_calls.LAYOUT)


def _load() -> Any:
    if os.environ.get(DISABLED):
        return None
    try:
        from layerzero.workers import _serving
    except ImportError:
        return None
    return _serving if _serving.LAYOUT == LAYOUT else None


library = _load()
"""The module, or None where there is none that fits."""


class Line(Protocol):
    """What of a lane is compiled, where that is. `last_call`: that was claimed."""

    last_call: int

    def tell(self, call: int, /) -> None:
        """Wake who sleeps until this call has ended: its end is on the page."""


class _PlainLine:
    last_call = 0

    def __init__(self, page: lane.Page, answer: socket.socket) -> None:
        self._page, self._answer = page, answer

    def tell(self, call: int, /) -> None:
        with _fence:  # a locked instruction: the end is on the page before it is asked who waits for it
            pass
        if self._page.is_awaited(call):
            lane.ring_back(self._answer)


def line_of(
    owner: object,
    number: int,
    page: lane.Page,
    bells: tuple[int, socket.socket],
    ready: dict[tuple[int, bytes], Bound],
    end: Callable[..., None] | None,
) -> Line:
    """Of a lane, `owner`, whose calls `ready` has. `end`: what ends them, where its page spoils ends."""
    doorbell, answer = bells
    if library is None:
        return _PlainLine(page, answer)
    made: Line = library.Line(page, ready, owner, end, page.address, mark(number, 0), doorbell, answer.fileno())
    return made


def server_of(
    serve: Callable[[Any, Claimed], bool],
    finish: Callable[[Any, int, int, int, Any], None],
    mute: Callable[[Any], None],
    page: ControlPage,
    sockets: tuple[int, int],
    *,
    spoils_calls: bool,
) -> Any:
    """Serves lines; None where nothing is compiled. Of a line's owner, `serve` runs a call that is not ready, and says
    whether the loop is to look around; `finish` tells the client how its call ended, with what the kernel returned or
    raised; `mute`: nobody listens to it any more. `spoils_calls`: what writes the page may do so."""
    if library is None:
        return None
    spin_ns = spinning.limit_ns(os.environ)
    cores = spinning.Cores().count if spin_ns else 0
    write = page.write if spoils_calls else None
    return library.Server(serve, finish, mute, write, page.address, spin_ns, cores, *sockets)
