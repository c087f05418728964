"""The ring of calls on a GPU."""

from __future__ import annotations

import os
import struct

from layerzero.ipc.shm.ring import Ring, create_page
from layerzero.ipc.shm.ring_words import ENQUEUED, LEFT, MAX_CALL_BYTES, SLOT_BYTES, SLOTS, SLOTS_AT
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


def test_a_call_may_have_a_time_limit_of_its_own_and_its_slot_says_what_became_of_it() -> None:
    fd = create_page()
    client, worker = Ring(fd), Ring(fd)
    for call, timeout_s in enumerate((0.0, 0.0001, 2.5, 1e9), 1):
        client.put(call, 1, 7, call, TimelinePoint(0, call), b"", timeout_s)
    found = [worker.take() for _ in range(4)]
    assert [one.timeout_s for one in found if one is not None] == [0.0, 0.001, 2.5, ((1 << 32) - 1) / 1e3]
    assert [client.is_over(call) for call in (1, 2)] == [False, False]
    worker.note(1, ENQUEUED)
    assert [client.is_over(call) for call in (1, 2)] == [True, False]
    worker.note(1 + SLOTS, LEFT)  # a later call has its slot
    assert (client.is_over(1), client.status(1)) == (True, 0)
    for end in (client, worker):
        end.close()
    os.close(fd)
