"""The control socket: whole messages, descriptors that are never lost, and a hang-up that is noticed."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from layerzero.ipc.errors import ConfigError, ProtocolError
from layerzero.ipc.transport import control
from layerzero.ipc.transport.endpoints import Endpoints, default_runtime_dir, open_endpoints
from layerzero.ipc.transport.messages import AddArena, ArenaAdded, RetireArena


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    other.setblocking(False)
    yield one, other
    one.close()
    other.close()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


Pair = tuple[socket.socket, socket.socket]


def test_descriptor_travels_with_its_message(pair: Pair) -> None:
    """And nobody's child inherits it."""
    read, write = os.pipe()
    control.send(pair[0], AddArena(arena=1, nbytes=64), (write,))
    message, (fd,) = control.receive(pair[1], AddArena)
    assert message == AddArena(arena=1, nbytes=64)
    os.write(fd, b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(fd)
    for one in (read, write, fd):
        os.close(one)


def test_messages_keep_their_bounds(pair: Pair) -> None:
    """Two sends are two messages."""
    control.send(pair[0], RetireArena(arena=1))
    control.send(pair[0], RetireArena(arena=2))
    assert control.receive(pair[1], RetireArena)[0].arena == 1
    assert control.receive(pair[1], RetireArena)[0].arena == 2
    with pytest.raises(BlockingIOError):
        control.receive(pair[1], RetireArena)


@pytest.mark.parametrize("data", [b"\xc1", msgpack.packb({"kind": "arena_added", "arena": 1})])
def test_descriptors_of_a_bad_message_are_closed(pair: Pair, data: bytes) -> None:
    """A peer must not be able to fill the broker's descriptor table with nonsense."""
    fd, (read, write) = os.memfd_create("one"), os.pipe()
    before = open_fds()
    socket.send_fds(pair[0], [data], [fd, fd])
    with pytest.raises(ProtocolError):
        control.receive(pair[1], AddArena, RetireArena)
    assert open_fds() == before
    socket.send_fds(pair[0], [data], [write])
    os.close(write)
    with pytest.raises(ProtocolError):
        control.receive(pair[1], AddArena, RetireArena)
    assert os.read(read, 1) == b""  # when a thread has closed the last one
    os.close(read)
    os.close(fd)


def test_oversized_message_and_too_many_descriptors_are_refused(pair: Pair) -> None:
    """A cut message must not be mistaken for a whole one."""
    data = msgpack.packb({"kind": "arena_added", "arena": 1, "more": b"x" * (control.MAX_BYTES + 1)})
    pair[0].send(data)
    with pytest.raises(ProtocolError, match="larger than 65536 bytes"):
        control.receive(pair[1], ArenaAdded)
    fd = os.memfd_create("one")
    before = open_fds()
    socket.send_fds(pair[0], [msgpack.packb({"kind": "arena_added", "arena": 1})], [fd] * 9)
    with pytest.raises(ProtocolError, match="too many descriptors"):
        control.receive(pair[1], ArenaAdded)
    assert open_fds() == before
    os.close(fd)


def test_hang_up_is_closed_on_both_ways(pair: Pair) -> None:
    """It is how either side learns of the other's death."""
    pair[0].close()
    with pytest.raises(control.Closed):
        control.receive(pair[1], ArenaAdded)
    with pytest.raises(control.Closed):
        control.send(pair[1], ArenaAdded(arena=1))


def test_kernel_says_who_the_peer_is(pair: Pair) -> None:
    """Not the peer."""
    assert control.peer_credentials(pair[0]) == (os.getpid(), os.getuid(), os.getgid())


def test_socket_is_owner_only_and_replaces_a_stale_one(tmp_path: Path) -> None:
    """Another user must not reach it, whatever the umask; a killed broker leaves its file behind."""
    path = tmp_path / "broker.sock"
    previous = os.umask(0)
    try:
        control.listen(path).close()
        listener = control.listen(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    control.connect(path, timeout_s=1.0).close()
    listener.close()
    with pytest.raises(OSError, match="refused"):
        control.connect(path, timeout_s=1.0)


# --- the runtime folder --------------------------------------------------------------------------------------


def test_last_word_of_a_peer_that_left_ours_unread_is_heard() -> None:
    """The kernel says first that the connection was reset."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        control.send(ours, RetireArena(arena=1))
        control.send(its, ArenaAdded(arena=2))
        its.close()
        assert control.receive(ours, ArenaAdded)[0] == ArenaAdded(arena=2)
        with pytest.raises(control.Closed):
            control.receive(ours, ArenaAdded)


def test_runtime_folder_is_made_owner_only(tmp_path: Path) -> None:
    """Its sockets are as open as the folder."""
    endpoints = open_endpoints(tmp_path / "a" / "b")
    assert stat.S_IMODE(endpoints.folder.stat().st_mode) == 0o700
    assert endpoints == Endpoints(tmp_path / "a" / "b") == open_endpoints(tmp_path / "a" / "b")
    assert endpoints.zmq_path("client", "ab") != endpoints.zmq_path("client", "cd")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_open_runtime_folder_is_refused_with_the_repair(tmp_path: Path, mode: int) -> None:
    """Somebody else could put sockets there."""
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}. Repair it with chmod 0700"):
        open_endpoints(tmp_path)


def test_runtime_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    """A link in /tmp may be anyone's."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="must be a directory"):
        open_endpoints(tmp_path / "link")


def test_long_runtime_folder_is_refused_before_bind_fails(tmp_path: Path) -> None:
    """The kernel's own message names neither the limit nor the setting."""
    with pytest.raises(ConfigError, match=r"at most 107 bytes.*set LAYERZERO_RUNTIME_DIR"):
        open_endpoints(tmp_path / ("x" * 100))


def test_default_runtime_folder_is_the_users_own() -> None:
    """Two users of one machine must not meet."""
    assert default_runtime_dir({"XDG_RUNTIME_DIR": "/run/user/1"}) == Path("/run/user/1/layerzero")
    assert default_runtime_dir({}).name == f"layerzero-{os.getuid()}"
