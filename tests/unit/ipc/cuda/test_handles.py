"""Descriptions of GPU memory survive the wire, and nothing else passes for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from layerzero.ipc.cuda.handles import TRANSPORTS, ArenaHandle, check_span
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES

HANDLE = ArenaHandle("GPU-1", "client-1", 3, 2, "ipc", 2 << 20, bytes(range(64)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handle_is_the_same_after_the_wire(transport: str) -> None:
    """Both sides must mean the same memory."""
    handle = HANDLE if transport == "ipc" else replace(HANDLE, transport=transport, handle=b"")
    assert ArenaHandle.from_wire(msgpack.unpackb(msgpack.packb(handle.to_wire()))) == handle
    assert handle.has_fd == (transport != "ipc")


def test_mapping_is_known_by_client_arena_and_generation() -> None:
    """Handle bytes, pids and addresses come back for other memory."""
    assert HANDLE.key == ("client-1", 3, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": ""},
        {"gpu": "g" * 65},
        {"gpu": 0},
        {"client": ""},
        {"client": "c" * 65},
        {"arena": -1},
        {"arena": 1 << 32},
        {"arena": True},
        {"generation": -1},
        {"generation": 1 << 32},
        {"generation": 1.0},
        {"transport": "telepathy"},
        {"transport": "vmm"},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": MAX_NBYTES + 1},
        {"nbytes": "4096"},
        {"handle": b""},
        {"handle": bytes(63)},
        {"handle": "x" * 64},
    ],
    ids=str,
)
def test_handle_that_cannot_be_true_is_refused(change: dict[str, Any]) -> None:
    """It comes from another process and ends in a call of the driver."""
    with pytest.raises(ProtocolError, match="arena handle"):
        ArenaHandle.from_wire({**HANDLE.to_wire(), **change})


@pytest.mark.parametrize("value", [None, [], {}, b"", {"gpu": "GPU-1"}])
def test_anything_else_is_no_handle(value: object) -> None:
    """A field that is missing must not become a default."""
    with pytest.raises(ProtocolError, match="not an arena handle"):
        ArenaHandle.from_wire(value)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 100), (100, 0), (36, 64)])
def test_bytes_within_the_arena_pass(offset: int, nbytes: int) -> None:
    """Up to the last one."""
    check_span(offset, nbytes, 100)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, -1), (0, 101), (100, 1), (101, 0), (2**64 - 8, 16), (1, 2**64 - 1)]
)
def test_bytes_outside_the_arena_are_refused(offset: int, nbytes: int) -> None:
    """Also where a 64-bit sum would wrap around: other tensors lie behind the end."""
    with pytest.raises(ProtocolError, match="not within an arena of 100 bytes"):
        check_span(offset, nbytes, 100)
