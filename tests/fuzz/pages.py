"""Pages of memory that a peer can write at any time: lanes, rings, timeline pages, control pages. Whoever reads one
takes what makes sense or says that it makes none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fuzz.source import Source

from layerzero.broker.core.leases import Leases
from layerzero.broker.io.lane_pages import LanePages
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm import lane, memory, ring, ring_words, timeline_words
from layerzero.ipc.shm.ring import Ring
from layerzero.ipc.shm.timeline_page import TimelinePage
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.vocabulary.worker_codes import lane_of

TYPED = (ProtocolError,)
_LANE, _RING, _ORDER, _CONTROL = range(4)
_WORDS = {  # places in which there is something
    _LANE: (0, 8, 128, 136, 256, 264, 4096, 4104, 4112, 4224, 5248, 5256, 5264, 5272, 5280, 5376, 4096 + 63 * 3200),
    _RING: (0, 8, 128, 256, 264, 384, 392, 400, 4096, 8192, 8192 + 512, 8192 + 511 * 512),
    _ORDER: (0, 128, 256, 512, 1024, 64 * 512 - 256, 64 * 512, 64 * 512 + 4 * 4095, 64 * 512 + 4 * 4096, 65_536),
    _CONTROL: (0, 8),
}
_SIZES = {
    _LANE: lane.PAGE_BYTES,
    _RING: ring_words.PAGE_BYTES,
    _ORDER: timeline_words.PAGE_BYTES,
    _CONTROL: memory.PAGE_BYTES,
}


def run(data: bytes) -> None:
    source = Source(data)
    kind = source.number(1) % 4
    number = source.number(8)
    with _page(kind, source) as fd, _page(_ORDER, source) as order_fd:
        if kind == _LANE:
            _read_lane(fd, number)
        elif kind == _RING:
            _read_ring(fd, order_fd, number)
        elif kind == _ORDER:
            _read_order(fd, number)
        else:
            dispatch, _ = memory.ControlPage(fd, writable=False).read()
            lane_of(dispatch)


@contextmanager
def _page(kind: int, source: Source) -> Iterator[int]:
    """A page of zeros with a few writes of a peer."""
    size, words = _SIZES[kind], _WORDS[kind]
    fd = memory.create_memfd("fuzz", size)
    try:
        for _ in range(min(source.number(1), 16)):
            at = source.pick(words) + source.number(1) % 3 * 8
            os.pwrite(fd, source.take(source.number(1) % 64), min(at, size - 64))
        yield fd
    finally:
        os.close(fd)


def _read_lane(fd: int, call: int) -> None:
    ends = LanePages()
    ends.add(1, [os.dup(fd)])  # owns it from here on
    try:
        page = lane.Page(fd)
        found = page.get_call(call)
        assert found is None or len(found[1]) <= lane.MAX_CALL_BYTES
        page.step_of(call)
        leases = Leases()
        for seen in ends.seen():
            assert leases.lanes.get(seen.lane) is None
        page.last_time()
        end = page.get_end(call)
        if end is not None:
            assert len(end[2]) <= lane.MAX_WORD_BYTES
        ends.has_ended(1, call)
    finally:
        ends.close()


def _read_ring(fd: int, order_fd: int, call: int) -> None:
    ends = LanePages()
    ends.add(1, [os.dup(fd)], is_ring=True)
    orders = TimelinePage(order_fd)
    try:
        for _ in range(2):
            look = ends.look(1, orders)
            assert look is not None
            assert len(look.calls) <= ring_words.SLOTS
            list(ends.seen())
        worker = Ring(fd)
        worker.status(call)
        for _ in range(4):
            taken = worker.take()
            if taken is None:
                break
            assert len(taken.refs) <= ring_words.MAX_CALL_BYTES
            worker.note(taken.call & (1 << 56) - 1, ring_words.LEFT)
        ends.call(1, call)
    finally:
        ends.close()


def _read_order(fd: int, number: int) -> None:
    page = TimelinePage(fd)
    try:
        page.rung()
        for graph_slot in (number % timeline_words.GRAPH_SLOTS, number):
            page.graph_slot(graph_slot)
            page.is_graph_slot_done(graph_slot)
            for linked in (page.next_graph_slot(graph_slot), page.previous_graph_slot(graph_slot)):
                if linked is not None:
                    page.graph_slot(linked)
        point = TimelinePoint(number & 0xFFFF_FFFF, number >> 32)
        page.is_ready(point)
        page.error(point)
        page.fail(point, 7)
        assert page.is_done(point)
    finally:
        page.close()


def seeds() -> dict[str, bytes]:
    def write(word: int, *values: int, step: int = 0) -> bytes:
        data = b"".join(value.to_bytes(8, "little") for value in values)
        return bytes([word, step, len(data)]) + data

    one = (1).to_bytes(8, "little")
    slot = ring._SLOT.pack(1, 1, 2, 5, 3, 9, 24)[:40]
    return {
        "lane": bytes([_LANE]) + one + bytes([2]) + write(2, 1, 2, 48) + write(6, 1, 0, 500, 3, 2) + b"\0",
        "lane_wrong": bytes([_LANE]) + one + bytes([1]) + write(6, 9, 9, 2**64 - 1, 2**64 - 1, 7) + b"\0",
        "ring": bytes([_RING])
        + one
        + bytes([3])
        + write(2, 1)
        + bytes([9, 0, len(slot)])
        + slot
        + write(3, 1)
        + bytes([1])
        + write(1, 9),
        "ring_far": bytes([_RING]) + one + bytes([1]) + write(2, 2**63) + b"\0",
        "order": bytes([_ORDER]) + one + bytes([3]) + write(0, 5) + write(1, 4) + write(6, 1) + b"\0",
        "control": bytes([_CONTROL]) + one + bytes([1]) + write(0, 1 << 63 | 1 << 32, 2) + b"\0",
    }
