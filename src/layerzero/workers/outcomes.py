"""What a kernel returned or raised, as it travels."""

from __future__ import annotations

import traceback
from typing import Any

import msgpack

from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.shm import lane


def said_of(outcome: Any) -> tuple[int, bytes]:
    """The status of a lane's call that returned this or raised it, and what fits behind its end."""
    if isinstance(outcome, Exception):
        return lane.RAISED, short_error(outcome)
    if outcome is None:
        return lane.OK, b""
    try:
        said: bytes = msgpack.packb(outcome)
    except Exception as exc:
        return lane.RAISED, short_error(exc)
    return (lane.OK, said) if len(said) <= lane.MAX_WORD_BYTES else (lane.DECLINED, b"")


def short_error(exc: Exception) -> bytes:
    """An error as it fits behind a call's end."""
    packed: bytes = msgpack.packb(BackendError(f"{type(exc).__name__}: {exc}"[:400]).to_wire())
    return packed


def error_body(exc: Exception) -> bytes:
    """The error as it travels. Texts that UTF-8 cannot hold and facts that are not plain are reduced to ASCII."""
    try:
        packed: bytes = msgpack.packb(_describe(exc).to_wire())
    except (TypeError, ValueError, OverflowError):
        packed = msgpack.packb(BackendError(ascii(exc)[:2000], exception=type(exc).__name__).to_wire())
    return packed


def _describe(exc: Exception) -> LayerZeroError:
    if isinstance(exc, LayerZeroError):
        exc.message = exc.message[:2000]
        return exc
    text = "".join(traceback.format_exception(exc))
    return BackendError(f"{type(exc).__name__}: {exc}"[:2000], exception=type(exc).__name__, traceback=text[-4000:])
