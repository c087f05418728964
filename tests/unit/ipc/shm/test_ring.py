"""The ring of calls on a GPU."""

from __future__ import annotations

import os
import struct

from layerzero.ipc.shm.ring import Ring, create_page
from layerzero.ipc.shm.ring_words import MAX_CALL_BYTES, SLOT_BYTES, SLOTS_AT
from layerzero.ipc.shm.timeline_words import TimelinePoint


def test_a_call_that_claims_too_many_bytes_has_those_of_its_slot() -> None:
    """A client may write anything: the next slots are other calls, and a worker must not copy for ever."""
    fd = create_page()
    client, worker = Ring(fd), Ring(fd)
    client.put(1, 1, 7, 1, TimelinePoint(0, 1), b"\1" * MAX_CALL_BYTES)
    client.put(2, 1, 7, 2, TimelinePoint(0, 2), b"\2" * MAX_CALL_BYTES)
    for nbytes in (MAX_CALL_BYTES + 1, 1 << 31, (1 << 32) - 1):
        os.pwrite(fd, struct.pack("I", nbytes), SLOTS_AT + SLOT_BYTES + struct.calcsize("<QIIQII"))
        found = worker.call(1)
        assert found is not None
        assert found.refs == b"\1" * MAX_CALL_BYTES
    for end in (client, worker):
        end.close()
    os.close(fd)
