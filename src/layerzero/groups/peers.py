"""The other ranks of a group, each at the other end of a socket: messages in order, and how the end of one is seen.

Sockets are pairs that the meeting's host made and handed out (groups/meeting.py). A rank that ends closes its end,
which wakes whoever waits; a descriptor of its process tells the same where a child of it still has that end. Who waits
looks for a moment before it sleeps, as at lanes (ipc/spinning.py), and where it takes long, now and then whether one is
ending (groups/ending.py), for both come late in that. No thread watches.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress

from layerzero.groups import descriptors, faults
from layerzero.groups.ending import LOOK_MS, is_ending
from layerzero.groups.faults import broken, named
from layerzero.ipc.errors import GroupBroken, LayerZeroError, ProtocolError, RanksDisagree, from_wire
from layerzero.ipc.spinning import Spin
from layerzero.ipc.transport import unwanted
from layerzero.ipc.transport.plain import pack_body, unpack_body

MESSAGE_BYTES = 1 << 17  # the most that is received at once
COLLECTIVE, POINT = b"C", b"P"  # first bytes of messages: of calls of all ranks, of send and recv
_FAULT, _LEFT = b"X", b"L"
OFFER = b"PO"  # a send that waits for its recv
HEAD = b"CH"  # of a call of all ranks: what it is
_DESCRIPTOR = b"CD"  # one comes along


class Peers:
    """`doing`: the call that this rank is in, for texts."""

    def __init__(
        self,
        name: str,
        generation: int,
        rank: int,
        sockets: Mapping[int, socket.socket],
        pids: Mapping[int, int],
        spin_ns: int = 0,
    ) -> None:
        """Takes the sockets over, by rank. `pids`: 0 for one that nobody knows. `spin_ns`: for how long to look for a
        message at most before sleeping."""
        self.name, self.generation, self.rank, self.pids = name, generation, rank, dict(pids)
        self.doing = "between calls"
        self.waited_ns = 0
        self.is_crossed = False  # a send has met a call of all ranks: they cannot go on
        self._sockets = dict(sockets)
        self.ranks = sorted(self._sockets)
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._inbox = {kind: {rank: deque[bytes]() for rank in self.ranks} for kind in (COLLECTIVE, POINT)}
        self._lost: dict[int, str] = {}
        self._fault: LayerZeroError | None = None
        self._fds: list[int] | None = None  # that have come, while one is expected
        self._look_at_s = 0.0
        self._spin = Spin(spin_ns)
        for rank, sock in self._sockets.items():
            sock.setblocking(False)
            self._poll.register(sock.fileno(), select.POLLIN)
            self._rank_of[sock.fileno()] = rank
            pidfd = _pidfd(self.pids.get(rank, 0))
            if pidfd is not None:
                self._pidfds[pidfd] = rank
                self._poll.register(pidfd, select.POLLIN)

    # --- messages

    def send(self, rank: int, message: bytes, until_s: float, fd: int | None = None) -> None:
        """`fd`: a descriptor that goes along. Raises GroupBroken."""
        sock = self._sockets[rank]
        while True:
            try:
                if fd is None:
                    sock.send(message, socket.MSG_NOSIGNAL)
                else:
                    socket.send_fds(sock, [message], [fd], socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:  # it has not read for long
                self._wait_for_room(rank, sock, until_s)
            except OSError:
                self._drain(rank)
                self._demand([rank])
                raise self._error(faults.RANK_LEFT, f"rank {rank} has closed its connection", [rank]) from None

    def send_all(self, message: bytes, until_s: float) -> None:
        """To every other rank. Raises GroupBroken."""
        for rank in self.ranks:
            self.send(rank, message, until_s)

    def take(self, kind: bytes, ranks: Iterable[int], until_s: float) -> dict[int, bytes]:
        """The next message of that kind from each of these ranks. Raises GroupBroken, and RanksDisagree where one waits
        for a call that this rank will not make."""
        boxes = self._inbox[kind]
        wanted = tuple(ranks)
        missing = [rank for rank in wanted if not boxes[rank]]
        if missing:
            start_ns = time.perf_counter_ns()
            try:
                while missing:
                    if not self._spun():
                        self._step(missing, until_s)
                    missing = [rank for rank in missing if not boxes[rank]]
                    if missing:
                        self._demand(missing)
                        self._demand_same_kind(kind, missing)
            finally:
                self.waited_ns += time.perf_counter_ns() - start_ns
        return {rank: boxes[rank].popleft() for rank in wanted}

    def give_descriptor(self, rank: int, fd: int, until_s: float) -> None:
        """To a rank that has said that it expects one. Raises GroupBroken."""
        self.send(rank, _DESCRIPTOR, until_s, fd)

    def expect_descriptor(self) -> None:
        """To be called before this rank says so, until it is taken, or forgotten. At other times what comes along with
        a message is closed unseen."""
        self._fds = []

    def take_descriptor(self, rank: int, until_s: float) -> int:
        """The caller's own from now on. Raises GroupBroken."""
        assert self._fds is not None
        try:
            said = self.take(COLLECTIVE, [rank], until_s)[rank]
            if said != _DESCRIPTOR or len(self._fds) != 1:
                raise self._error(faults.FAILED, f"rank {rank} has given no descriptor", [rank])
            return self._fds.pop()
        finally:
            self.forget_descriptors()

    def forget_descriptors(self) -> None:
        """None is expected."""
        fds, self._fds = self._fds or (), None
        unwanted.close_all(fds)

    def wait_for(self, fds: Iterable[int], until_s: float) -> None:
        """Until one of these can be read, or was closed by its writer. Raises GroupBroken where a rank is lost
        before."""
        others = list(fds)
        for fd in others:
            self._poll.register(fd, select.POLLIN)
        try:
            while not self._step(self.ranks, until_s) & set(others):
                self._demand(self.ranks)
        finally:
            for fd in others:
                self._poll.unregister(fd)

    def look(self, until_s: float) -> None:
        """Take in what has come. Raises GroupBroken where a rank is lost, or the time is over."""
        self._take_in(self._poll.poll(0))
        if time.monotonic() > self._look_at_s:
            self._lose_ending()
        self._demand(self.ranks)
        if time.monotonic() > until_s:
            raise self._error(faults.DEADLINE, f"{named(self.ranks)} did not come within timeout_s", self.ranks)

    def is_ending(self) -> bool:
        """Whether a process of a rank runs no more, or is ending. Any thread may ask."""
        return any(is_ending(self.pids[rank]) for rank in list(self._pidfds.values()))

    def ends(self) -> list[tuple[int, int]]:
        """Descriptors, the caller's own, that tell of a rank's end, and what each is to be polled for."""
        ends = [(os.dup(fd), select.POLLIN) for fd in self._pidfds]
        return ends + [(os.dup(sock.fileno()), 0) for sock in self._sockets.values()]

    def hear_fault(self, within_s: float) -> LayerZeroError | None:
        """What another rank says of why it gave the call up, if it says so soon."""
        until_s = time.monotonic() + within_s
        with suppress(GroupBroken):
            while self._fault is None and len(self._lost) < len(self.ranks):
                self._step(self.ranks, until_s)
        return self._fault

    # --- the end

    def tell(self, error: LayerZeroError) -> None:
        """Say to all why this rank gives the group up, as far as they can be told at once."""
        self._say(_FAULT + pack_body(error.to_wire()))

    def leave(self) -> None:
        """Say to all that this rank has closed the group."""
        self._say(_LEFT)

    def close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        for sock in self._sockets.values():
            sock.close()
        self.forget_descriptors()
        self._pidfds, self._sockets, self.ranks = {}, {}, []

    def _say(self, message: bytes) -> None:
        for sock in self._sockets.values():
            with suppress(OSError):
                sock.send(message, socket.MSG_NOSIGNAL)

    # --- looking

    def _spun(self) -> bool:
        """Look for what happens next without sleeping, for a moment, and take it in; False where nothing did."""
        limit_ns, took_ns = self._spin.next_ns(), 0
        if not limit_ns:
            return False
        start_ns = time.perf_counter_ns()
        while not (events := self._poll.poll(0)) and took_ns < limit_ns:
            took_ns = time.perf_counter_ns() - start_ns
        self._spin.note(took_ns if events else None)
        self._take_in(events)
        return bool(events)

    def _step(self, missing: Iterable[int], until_s: float) -> set[int]:
        """Wait for the next things that happen, and take them in; of which descriptors. Raises GroupBroken when the
        time is over."""
        left_s = until_s - time.monotonic()
        events = self._poll.poll(min(max(left_s, 0.0) * 1000, LOOK_MS))
        if not events:
            self._lose_ending()
        if not events and left_s <= 0:
            late = list(missing)
            raise self._error(faults.DEADLINE, f"{named(late)} did not come within timeout_s", late)
        self._take_in(events)
        return {fd for fd, _ in events}

    def _take_in(self, events: Iterable[tuple[int, int]]) -> None:
        for fd, _ in events:
            rank = self._rank_of.get(fd)
            if rank is not None:
                self._receive(rank)
            elif fd in self._pidfds:
                rank = self._pidfds[fd]
                self._drain(rank)
                self._lose(rank, faults.RANK_DIED)

    def _lose_ending(self) -> None:
        """Ranks whose processes run no more, although their sockets are open yet."""
        self._look_at_s = time.monotonic() + LOOK_MS / 1e3
        for rank in [rank for rank in self._pidfds.values() if rank not in self._lost]:
            if is_ending(self.pids[rank]):
                self._drain(rank)
                self._lose(rank, faults.RANK_DIED)

    def _receive(self, rank: int) -> bool:
        """One message; False where there is none."""
        try:
            data = self._read(self._sockets[rank])
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it has closed without reading all; what it has sent is still to be read
            return self._receive(rank)
        except OSError:
            data = b""
        kind = data[:1]
        if kind in self._inbox:
            self._inbox[kind][rank].append(data)
        elif kind == _FAULT and self._fault is None:
            self._fault = self._told(rank, data[1:])
        elif kind == _LEFT:
            self._lose(rank, faults.RANK_LEFT)
        elif not data:
            self._lose(rank, faults.RANK_DIED)
        return bool(data)

    def _read(self, sock: socket.socket) -> bytes:
        if self._fds is None:
            return sock.recv(MESSAGE_BYTES)
        data, fds = descriptors.receive(sock, MESSAGE_BYTES)
        self._fds += fds
        return data

    def _drain(self, rank: int) -> None:
        """All that one has sent which may have ended."""
        while rank not in self._lost and self._receive(rank):
            pass

    def _lose(self, rank: int, reason: str) -> None:
        if rank not in self._lost:
            self._lost[rank] = reason
            ends = [fd for fds in (self._rank_of, self._pidfds) for fd, one in fds.items() if one == rank]
            for fd in ends:
                with suppress(KeyError):
                    self._poll.unregister(fd)

    def _wait_for_room(self, rank: int, sock: socket.socket, until_s: float) -> None:
        self._poll.modify(sock.fileno(), select.POLLIN | select.POLLOUT)
        try:
            self._step([rank], until_s)
            self._demand([rank])
        finally:
            if rank not in self._lost:
                self._poll.modify(sock.fileno(), select.POLLIN)

    # --- errors

    def _demand(self, ranks: Iterable[int]) -> None:
        """Raises what has become of the group, if one of these ranks is needed and will not come."""
        if self._fault is not None:
            raise self._fault
        gone = [rank for rank in ranks if rank in self._lost]
        if not gone:
            return
        died = [rank for rank in gone if self._lost[rank] == faults.RANK_DIED]
        if died:
            where = ", ".join(f"pid {self.pids[rank]}" for rank in died if self.pids.get(rank))
            raise self._error(faults.RANK_DIED, f"{named(died)} has died{f' ({where})' if where else ''}", died)
        raise self._error(faults.RANK_LEFT, f"{named(gone)} has closed the group", gone)

    def _demand_same_kind(self, kind: bytes, missing: Iterable[int]) -> None:
        """A rank that waits for another call of ours than we are in would wait until its deadline."""
        other, opening = (POINT, OFFER) if kind == COLLECTIVE else (COLLECTIVE, HEAD)
        for rank in missing:
            box = self._inbox[other][rank]
            if box and box[0].startswith(opening):
                theirs = "a call of all ranks" if other == COLLECTIVE else f"send(to={self.rank})"
                self.is_crossed = True
                given = {str(one): what for one, what in sorted([(self.rank, self.doing), (rank, theirs)])}
                met = ", ".join(f"rank {one} is in {what}" for one, what in given.items())
                text = f"let all ranks make the same calls: {met}"
                raise RanksDisagree(f"{text} (group {self.name!r})", group=self.name, given=given)

    def _error(self, reason: str, what: str, ranks: Iterable[int]) -> GroupBroken:
        return broken(reason, what, group=self.name, generation=self.generation, ranks=sorted(ranks), doing=self.doing)

    def _told(self, rank: int, body: bytes) -> LayerZeroError:
        try:
            error = from_wire(unpack_body(body))
        except ProtocolError as exc:
            return self._error(faults.FAILED, f"rank {rank} sent {exc.message}", [rank])
        error.facts["told_by"] = rank
        return error


def _pidfd(pid: int) -> int | None:
    """None where processes cannot be watched like that: another pid namespace, an old kernel. The socket's end tells
    then, unless a child of that process has it."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
