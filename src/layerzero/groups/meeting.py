"""How the processes of a group find each other: at a socket in the broker's runtime folder, by the group's name.

Whoever comes first listens there and is the host: it counts who is there, and hands each rank a socket pair to every
other one and their shared memory, read-only. Nothing of the meeting is left then. Where the host dies the others come
again, and one of them is the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.groups import descriptors, faults
from layerzero.groups.faults import broken, named
from layerzero.ipc.errors import ConfigError, InvalidArgument, LayerZeroError, ProtocolError, from_wire
from layerzero.ipc.transport import control, unwanted
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.version import __version__

MAX_RANKS = 64
NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKENS = re.compile(r"[0-9a-f]{8}")
_AGAIN_S = 0.002  # between looks at a lock that somebody holds for some microseconds
_BYTES, _FDS = 1 << 16, 253


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself. `calls`: how many it has made in the last generation; -1 for one that is new."""

    name: str
    rank: int
    size: int
    generation: int
    calls: int
    chunk_bytes: int

    def to_wire(self) -> bytes:
        fields = [self.name, self.rank, self.size, self.generation, self.calls, self.chunk_bytes]
        return pack_body([__version__, *fields])

    @classmethod
    def from_wire(cls, data: bytes) -> Hello:
        """Raises ProtocolError, InvalidArgument."""
        match unpack_body(data):
            case [str(version), str(name), int(rank), int(size), int(generation), int(calls), int(chunk_bytes)]:
                if version != __version__:
                    raise InvalidArgument(f"use one layerzero on all ranks: {__version__} and {version:.40} meet here")
                if 0 <= rank < size <= MAX_RANKS and generation >= 0 and calls >= -1 and chunk_bytes > 0:
                    return cls(name, rank, size, generation, calls, chunk_bytes)
        raise ProtocolError("not the hello of a rank")


@dataclass(frozen=True)
class Roster:
    """A group that is whole: of the other ranks their sockets and the memory that they share; of all of them pids and
    how many calls each had made; `token` is no other group's, whatever its name. The caller owns the descriptors."""

    generation: int
    sockets: dict[int, socket.socket]
    memories: dict[int, int]
    pids: dict[int, int]
    calls: dict[int, int]
    token: str


@dataclass
class _Member:
    """`sock`: to it; None for the host itself."""

    hello: Hello
    pid: int
    memory: int
    sock: socket.socket | None = None


@dataclass
class _Table:
    """The host's: who has come, by rank."""

    name: str
    size: int
    members: dict[int, _Member] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.members]


def demand(name: str, rank: int, size: int) -> None:
    """Raises InvalidArgument for what no group can be."""
    if not isinstance(name, str) or not NAMES.fullmatch(name):
        raise InvalidArgument(f"lz.group: name is {name!r:.80}; allowed: letters, digits, . _ - and at most 64 of them")
    if type(size) is not int or not 1 <= size <= MAX_RANKS:
        raise InvalidArgument(f"lz.group: size is {size!r:.40}; allowed: 1 to {MAX_RANKS}")
    if type(rank) is not int or not 0 <= rank < size:
        raise InvalidArgument(f"lz.group: rank is {rank!r:.40}; allowed: 0 to {size - 1}, as size is {size}")


def meet(runtime: Path, hello: Hello, memory: int, until_s: float) -> Roster:
    """Wait until all ranks are there. `memory`: what this one shares, a descriptor that may be handed out.

    Raises GroupBroken naming those that did not come, InvalidArgument where this rank does not fit, ConfigError.
    """
    place = _Place(runtime, hello.name)
    missing: list[int] = [rank for rank in range(hello.size) if rank != hello.rank]
    try:
        while True:
            with place.locked(until_s, missing, hello):
                sock, is_host = place.join()
            with sock:
                found = _host(place, sock, hello, memory, until_s) if is_host else _attend(sock, hello, memory, until_s)
            if isinstance(found, Roster):
                return found
            missing = found or missing  # the host is gone: come again
    finally:
        place.close()


class _Place:
    """Where a group meets: a socket, and a lock under which one sees whether somebody listens there."""

    def __init__(self, runtime: Path, name: str) -> None:
        """Raises ConfigError."""
        folder = runtime / "groups"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise ConfigError(
                f"start a broker of your own (LAYERZERO_RUNTIME_DIR): {folder} cannot be used: {exc.strerror}"
            ) from exc
        info = os.fstat(self._folder)
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            os.close(self._folder)
            raise ConfigError(f"run: chmod 0700 {folder}\nit must be a folder of this user's that others cannot enter")
        # However deep the runtime folder lies: a socket's name has at most 107 bytes.
        self._sock = Path(f"/proc/self/fd/{self._folder}/{name}.sock")
        self._lock = f"{name}.lock"

    @contextlib.contextmanager
    def locked(self, until_s: float, missing: list[int], hello: Hello) -> Iterator[None]:
        while True:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(fd):
                    yield
                    return
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise incomplete(hello, missing) from None
                time.sleep(_AGAIN_S)
            finally:
                os.close(fd)

    def _is_current(self, fd: int) -> bool:
        """Whether the lock is still the one that others take: whoever ends a meeting removes it."""
        try:
            found = os.stat(self._lock, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        mine = os.fstat(fd)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def join(self) -> tuple[socket.socket, bool]:
        """A connection to the host, or as the new one a socket that listens."""
        try:
            return control.connect(self._sock, timeout_s=1.0), False
        except (FileNotFoundError, ConnectionError, TimeoutError):
            return control.listen(self._sock), True

    def end(self) -> None:
        """Under the lock: the next who come begin anew."""
        self._sock.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._lock, dir_fd=self._folder)

    def close(self) -> None:
        os.close(self._folder)


# --- the host


def _host(place: _Place, listening: socket.socket, hello: Hello, memory: int, until_s: float) -> Roster:
    table = _Table(hello.name, hello.size)
    table.members[hello.rank] = _Member(hello, os.getpid(), memory)
    guests: list[socket.socket] = []  # that have not said who they are
    try:
        while table.missing:
            _see(table, listening, guests, until_s)
        return _hand_out(table, hello.rank)
    finally:
        with contextlib.suppress(LayerZeroError), place.locked(time.monotonic() + 1.0, [], hello):
            place.end()
        for sock in [*guests, *(one.sock for one in table.members.values() if one.sock is not None)]:
            sock.close()
        for member in table.members.values():
            if member.sock is not None:
                os.close(member.memory)


def _see(table: _Table, listening: socket.socket, guests: list[socket.socket], until_s: float) -> None:
    """The next things that happen at the table."""
    members = {one.sock.fileno(): one for one in table.members.values() if one.sock is not None}
    poll = select.poll()
    for fd in (listening.fileno(), *members, *(sock.fileno() for sock in guests)):
        poll.register(fd, select.POLLIN)
    left_s = until_s - time.monotonic()
    events = poll.poll(max(left_s, 0.0) * 1000)
    if not events and left_s <= 0:
        (host,) = (one.hello for one in table.members.values() if one.sock is None)
        raise incomplete(host, table.missing)
    for fd, _ in events:
        if fd == listening.fileno():
            with contextlib.suppress(BlockingIOError):
                guests.append(listening.accept()[0])
        elif fd in members:  # nobody says anything here: it has ended
            _drop(table, members[fd])
        else:
            guest = next(sock for sock in guests if sock.fileno() == fd)
            guests.remove(guest)
            _seat(table, guest)


def _seat(table: _Table, guest: socket.socket) -> None:
    """A guest that has said something: a member from now on, or refused."""
    pid, uid, _ = control.peer_credentials(guest)
    guest.setblocking(False)
    fds: list[int] = []
    try:
        data, fds = descriptors.receive(guest, _BYTES, _FDS)
        if uid != os.geteuid() or not data or len(fds) != 1:
            raise ProtocolError("not a rank of this user's")
        hello = Hello.from_wire(data)
        _demand_fit(table, hello)
    except (LayerZeroError, OSError) as exc:
        unwanted.close_all(fds)
        if isinstance(exc, InvalidArgument):
            _send(guest, pack_body(["refused", exc.to_wire()]))
        guest.close()
        return
    table.members[hello.rank] = _Member(hello, pid, fds[0], guest)
    _announce(table)


def _demand_fit(table: _Table, hello: Hello) -> None:
    """Raises InvalidArgument."""
    first = next(iter(table.members.values())).hello
    for what, ours, theirs in (
        ("size", table.size, hello.size),
        ("LAYERZERO_GROUP_KIB", first.chunk_bytes, hello.chunk_bytes),
    ):
        if ours != theirs:
            raise InvalidArgument(
                f"lz.group: {what} must be the same on all ranks of {table.name!r}: rank {hello.rank} has {theirs}, "
                f"rank {first.rank} has {ours}"
            )
    taken = table.members.get(hello.rank)
    if taken is not None and (taken.sock is None or not control.is_readable(taken.sock.fileno())):
        raise InvalidArgument(
            f"lz.group: rank {hello.rank} of {table.name!r} is there already, as pid {taken.pid}; give each process a "
            "rank of its own, and each program a name"
        )
    if taken is not None:
        _drop(table, taken)


def _drop(table: _Table, member: _Member) -> None:
    del table.members[member.hello.rank]
    os.close(member.memory)
    assert member.sock is not None
    member.sock.close()
    _announce(table)


def _announce(table: _Table) -> None:
    body = pack_body(["missing", table.missing])
    for one in table.members.values():
        if one.sock is not None:
            _send(one.sock, body)


def _hand_out(table: _Table, rank: int) -> Roster:
    """To every member its ends of the sockets, and what the others share."""
    ranks = sorted(table.members)
    ends: dict[tuple[int, int], socket.socket] = {}
    for one in ranks:
        for other in ranks[one + 1 :]:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            ends[one, other], ends[other, one] = pair
    generation = 1 + max(one.hello.generation for one in table.members.values())
    pids = [table.members[one].pid for one in ranks]
    calls = [table.members[one].hello.calls for one in ranks]
    token = os.urandom(4).hex()
    body = pack_body(["group", generation, pids, calls, token])
    for one in ranks:
        others = [other for other in ranks if other != one]
        sock = table.members[one].sock
        if sock is not None:
            mine = [ends.pop((one, other)) for other in others]
            _send(sock, body, [end.fileno() for end in mine] + [table.members[other].memory for other in others])
            for end in mine:
                end.close()
    others = [other for other in ranks if other != rank]
    memories = {other: os.dup(table.members[other].memory) for other in others}
    sockets = {other: ends[rank, other] for other in others}
    return Roster(generation, sockets, memories, dict(enumerate(pids)), dict(enumerate(calls)), token)


# --- everybody else


def _attend(sock: socket.socket, hello: Hello, memory: int, until_s: float) -> Roster | list[int]:
    """What the host gives; where it has gone, who was missing then."""
    missing: list[int] = []
    _, uid, _ = control.peer_credentials(sock)
    if uid != os.geteuid():
        raise ConfigError(f"run: lz down\nsomebody else, user {uid}, listens for group {hello.name!r}")
    sock.setblocking(False)
    _send(sock, hello.to_wire(), [memory])
    while True:
        if not control.is_readable(sock.fileno(), until_s - time.monotonic()):
            raise incomplete(hello, missing)
        try:
            data, fds = descriptors.receive(sock, _BYTES, _FDS)
        except OSError:
            return missing
        if not data:
            return missing
        match unpack_body(data):
            case ["missing", list(ranks)]:
                missing = [rank for rank in ranks if isinstance(rank, int)]
            case ["refused", error]:
                raise from_wire(error)
            case ["group", int(generation), list(pids), list(calls), str(token)] if len(pids) == len(
                calls
            ) == hello.size and _TOKENS.fullmatch(token):
                return _roster(hello, generation, pids, calls, token, fds)
            case _:
                unwanted.close_all(fds)
                raise ProtocolError(f"the host of group {hello.name!r} sent what is no message of a meeting")


def _roster(hello: Hello, generation: int, pids: list[Any], calls: list[Any], token: str, fds: list[int]) -> Roster:
    others = [rank for rank in range(hello.size) if rank != hello.rank]
    if len(fds) != 2 * len(others):
        unwanted.close_all(fds)
        raise ProtocolError(f"descriptors are missing of what the host of group {hello.name!r} sent; see ulimit -n")
    sockets = {rank: socket.socket(fileno=fd) for rank, fd in zip(others, fds[: len(others)], strict=True)}
    memories = dict(zip(others, fds[len(others) :], strict=True))
    its = dict(enumerate(map(int, pids))), dict(enumerate(map(int, calls)))
    return Roster(generation, sockets, memories, *its, token)


def _send(sock: socket.socket, body: bytes, fds: list[int] | None = None) -> None:
    """As far as it is there to hear it."""
    with contextlib.suppress(OSError):
        socket.send_fds(sock, [body], fds or [], socket.MSG_NOSIGNAL)


def incomplete(hello: Hello, missing: list[int]) -> LayerZeroError:
    found = missing or [rank for rank in range(hello.size) if rank != hello.rank]
    error = broken(
        faults.INCOMPLETE,
        f"{named(found)} of {hello.size} did not come within timeout_s",
        group=hello.name,
        generation=hello.generation,
        ranks=found,
        doing="meeting",
    )
    error.message = error.message.replace("call group.reform() on all ranks", "start the missing ranks, and call again")
    error.args = (error.message,)
    return error
