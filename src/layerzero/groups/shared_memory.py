"""Calls of all ranks by memory that they share, or, where there is little to say, by the messages that begin them.

A call goes in rounds: each rank writes into one of its areas, tells all others, waits until all have told, and reads
theirs. The next round has the other area, so nobody writes what somebody still reads: who tells of a round is done
with the one before. The first round is told by the message that begins the call. A sum takes two: each rank adds up a
slice of the chunk, in the order of the ranks, then takes the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from layerzero.groups import reducing, staging
from layerzero.groups.peers import COLLECTIVE, POINT, Peers
from layerzero.ipc.errors import ProtocolError

STEP = b"CS"
CHUNK, TAKEN = b"PC", b"PT"


class SharedMemory:
    """`copied`: bytes that this rank has copied in the present call. `opening`: tells its first round, and raises where
    ranks disagree."""

    def __init__(
        self, rank: int, size: int, peers: Peers, own: staging.OwnMemory, others: Mapping[int, tuple[Any, Any]]
    ) -> None:
        self._rank, self._size, self._peers, self._own = rank, size, peers, own
        self._others = others
        self._chunk = own.nbytes // 2
        self._round = 0
        self.copied = 0
        self.opening: Callable[[], None] | None = None

    # --- calls

    def all_gather(self, data: Any, out: Any, until_s: float) -> None:
        """`out`: of each rank as much as `data`, in their order."""
        nbytes = len(data)
        self._copy(out[self._rank * nbytes : (self._rank + 1) * nbytes], data)
        for start in range(0, nbytes, self._chunk):
            count = min(self._chunk, nbytes - start)
            self._copy(self._area[:count], data[start : start + count])
            for rank, area in self._exchanged(until_s).items():
                self._copy(out[rank * nbytes + start :][:count], area[:count])

    def broadcast(self, data: Any, out: Any, root: int, until_s: float) -> None:
        for start in range(0, len(out), self._chunk):
            count = min(self._chunk, len(out) - start)
            if self._rank == root:
                self._copy(self._area[:count], data[start : start + count])
            areas = self._exchanged(until_s)
            if self._rank != root:
                self._copy(out[start : start + count], areas[root][:count])
        if self._rank == root:
            self._copy(out, data)

    def all_to_all(self, data: Any, out: Any, until_s: float) -> None:
        """The n-th part of `data` goes to rank n."""

        def take(start: int, count: int, parts: list[Any]) -> None:
            for rank, part in enumerate(parts):
                self._copy(out[rank * share + start :][:count], part)

        share = len(data) // self._size
        self._scatter(data, take, until_s)

    def reduce_scatter(self, data: Any, out: Any, op: str, dtype: str, until_s: float) -> None:
        """Of the n-th part of all ranks' data, rank n gets the sum."""

        def take(start: int, count: int, parts: list[Any]) -> None:
            reducing.reduce_into(out[start : start + count], parts, op, dtype)

        self._scatter(data, take, until_s)

    def all_reduce(self, data: Any, out: Any, op: str, dtype: str, until_s: float) -> None:
        for start in range(0, len(data), self._chunk):
            count = min(self._chunk, len(data) - start)
            given = data[start : start + count]
            share = staging.aligned(-(-count // self._size))
            mine = slice(min(self._rank * share, count), min((self._rank + 1) * share, count))
            self._copy(self._area[: mine.start], given[: mine.start])
            self._copy(self._area[mine.stop : count], given[mine.stop :])
            areas = self._exchanged(until_s)
            total = self._area[mine]
            reducing.reduce_into(total, self._in_order(areas, given[mine], mine), op, dtype)
            result = out[start : start + count]
            self._copy(result[mine], total)
            for rank, area in self._exchanged(until_s).items():
                theirs = slice(min(rank * share, count), min((rank + 1) * share, count))
                self._copy(result[theirs], area[theirs])

    # --- from one rank to another

    def send(self, data: Any, to: int, until_s: float) -> None:
        """After the other has agreed."""
        for start in range(0, len(data), self._chunk):
            count = min(self._chunk, len(data) - start)
            self._copy(self._area[:count], data[start : start + count])
            self._peers.send(to, CHUNK, until_s)
            self._expect(to, TAKEN, until_s)

    def receive(self, out: Any, source: int, area_of: int, until_s: float) -> None:
        """`area_of`: the round that the sender is in, whose area it uses."""
        area = self._others[source][area_of % 2]
        for start in range(0, len(out), self._chunk):
            count = min(self._chunk, len(out) - start)
            self._expect(source, CHUNK, until_s)
            self._copy(out[start : start + count], area[:count])
            self._peers.send(source, TAKEN, until_s)

    @property
    def round(self) -> int:
        return self._round

    # --- rounds

    @property
    def _area(self) -> Any:
        return self._own.areas[self._round % 2]

    def _exchanged(self, until_s: float) -> dict[int, Any]:
        """Tell that this round's area is written, wait for the others' and give theirs; the round is over then."""
        opening, self.opening = self.opening, None
        if opening is not None:
            opening()
        else:
            self._tell_round(until_s)
        areas = {rank: areas[self._round % 2] for rank, areas in self._others.items()}
        self._round += 1
        return areas

    def _tell_round(self, until_s: float) -> None:
        message = STEP + self._round.to_bytes(8, "little")
        self._peers.send_all(message, until_s)
        for rank, told in self._peers.take(COLLECTIVE, self._peers.ranks, until_s).items():
            if told != message:
                raise ProtocolError(f"rank {rank} told {told[:32]!r} in round {self._round}")

    def _scatter(self, data: Any, take: Callable[[int, int, list[Any]], None], until_s: float) -> None:
        """`take` gets, for a stretch of this rank's part, what all ranks have there, in their order."""
        share = len(data) // self._size
        step = (self._chunk // self._size) // 64 * 64
        for start in range(0, share, step):
            count = min(step, share - start)
            for rank in self._others:
                self._copy(self._area[rank * step :][:count], data[rank * share + start :][:count])
            areas = self._exchanged(until_s)
            mine = slice(self._rank * step, self._rank * step + count)
            take(start, count, self._in_order(areas, data[self._rank * share + start :][:count], mine))

    def _in_order(self, areas: Mapping[int, Any], own: Any, part: slice) -> list[Any]:
        return [own if rank == self._rank else areas[rank][part] for rank in range(self._size)]

    def _copy(self, target: Any, source: Any) -> None:
        if len(source) and target.ctypes.data != source.ctypes.data:
            np.copyto(target, source)
            self.copied += len(source)

    def _expect(self, rank: int, message: bytes, until_s: float) -> None:
        told = self._peers.take(POINT, [rank], until_s)[rank]
        if told != message:
            raise ProtocolError(f"rank {rank} told {told[:32]!r} in place of {message!r} in group {self._peers.name!r}")
