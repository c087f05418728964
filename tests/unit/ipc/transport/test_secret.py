"""The stack's secret: its file, and the proofs that are made of it."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerzero.ipc.errors import ConfigError, NotAllowed
from layerzero.ipc.transport import control, messages, secret
from layerzero.ipc.transport.hello import greet
from layerzero.ipc.transport.secret import Handshake

HELLO = messages.Hello(protocols=[1], role="client", package="", pid=1)
WELCOME = messages.Welcome(
    protocol=1,
    package="",
    broker="",
    broker_pid=1,
    endpoint="",
    identity=b"L",
    number=1,
    max_in_flight=1,
    timeout_s=1.0,
)


def test_a_new_secret_is_its_owners_alone_and_stays(tmp_path: Path) -> None:
    """Another one over it would lock everybody out."""
    path = tmp_path / "secret"
    secret.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(secret.read(path)) == 64
    with pytest.raises(ConfigError, match="is there already"):
        secret.create(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused_with_the_repair(tmp_path: Path, mode: int) -> None:
    """What everybody knows keeps nobody out."""
    path = tmp_path / "secret"
    secret.create(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}; .*chmod 0600"):
        secret.read(path)


def test_a_secret_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would have a container wait for ever for somebody to write."""
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(ConfigError, match="allowed: a file"):
        secret.read(tmp_path / "secret")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: files of other users")
@pytest.mark.parametrize("owner", [1, 12345])
def test_a_secret_of_another_user_is_refused(tmp_path: Path, owner: int) -> None:
    """Whoever wrote it knows it."""
    path = tmp_path / "secret"
    secret.create(path)
    os.chown(path, owner, owner)
    with pytest.raises(ConfigError, match=f"has owner {owner}"):
        secret.read(path)


@pytest.fixture
def user() -> Iterator[int]:
    """We are this user, who may do what root may."""
    os.setresuid(12345, 0, 0)
    yield 12345
    os.setresuid(0, 0, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: to be another user")
@pytest.mark.parametrize(("mode", "is_fit"), [(0o640, True), (0o755, True), (0o660, False), (0o642, False)])
def test_a_secret_that_root_put_there_may_be_read_by_others_and_written_by_none(
    tmp_path: Path, user: int, mode: int, is_fit: bool
) -> None:
    """A mounted secret is root's, and a group's to read; whoever can write it lets in whom they like."""
    path = tmp_path / "secret"
    path.write_text("s" * 32)
    path.chmod(mode)
    if is_fit:
        assert secret.read(path) == b"s" * 32
    else:
        with pytest.raises(ConfigError, match=f"has owner 0 and mode {mode:04o}; allowed: a file of user {user} .*"):
            secret.read(path)


@pytest.mark.parametrize("text", ["x" * 16, "x" * 4096, " " + "x" * 16 + "\r\n"])
def test_a_secret_is_its_text_without_what_is_around_it(tmp_path: Path, text: str) -> None:
    """Of any size that is allowed; an editor adds a line end."""
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    assert secret.read(path) == text.strip().encode()


def test_a_secret_that_cannot_be_made_is_named_with_the_cause(tmp_path: Path) -> None:
    """The folder is a setting, and may be wrong."""
    with pytest.raises(ConfigError, match="none/secret cannot be written: No such file or directory"):
        secret.create(tmp_path / "none" / "secret")


def test_of_a_large_file_no_more_is_read_than_shows_that_it_is_large(tmp_path: Path) -> None:
    """The path may lead to anything."""
    path = tmp_path / "secret"
    path.write_text("x" * 5000)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="holds 4097 bytes"):
        secret.read(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000])
def test_a_secret_of_a_strange_size_is_refused(tmp_path: Path, text: str) -> None:
    """An empty file, or one that was not meant."""
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="allowed: 16 to 4096"):
        secret.read(path)


def test_a_missing_secret_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    """The path is a setting, and may be wrong."""
    with pytest.raises(ConfigError, match=r"none cannot be read: .*lz keys secret"):
        secret.read(tmp_path / "none")


def test_proofs_are_as_documented_and_of_one_side_role_and_connection_each() -> None:
    """Other implementations compute the same; nothing can be used twice."""
    known = Handshake(b"k" * 32, "client", b"\1" * 32, b"\2" * 32)
    assert known.peer_mac.hex() == "b9baa77cbbcbd74274e1375832410a5771295a2b545c2df277bd993ce5e871f4"
    others = [
        Handshake(b"l" * 32, "client", b"\1" * 32, b"\2" * 32),
        Handshake(b"k" * 32, "agent", b"\1" * 32, b"\2" * 32),
        Handshake(b"k" * 32, "client", b"\3" * 32, b"\2" * 32),
        Handshake(b"k" * 32, "client", b"\1" * 32, b"\3" * 32),
    ]
    macs = [mac for one in (known, *others) for mac in (one.peer_mac, one.broker_mac)]
    assert len(set(macs)) == len(macs)


@pytest.mark.parametrize(
    ("answers", "refusal"),
    [
        ([WELCOME], "has not proved that it knows the secret"),
        ([messages.Challenge(nonce=b"\2" * 32), WELCOME], "has not proved that it knows the secret"),
    ],
    ids=["asks-for-none", "wrong-mac"],
)
def test_a_broker_that_cannot_prove_itself_is_refused(answers: list[messages.Message], refusal: str) -> None:
    """It would get descriptors of the client's memory."""
    ours, brokers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def answer() -> None:
        for message in answers:
            control.receive(brokers, messages.Hello, messages.Proof)
            control.send(brokers, message)

    thread = threading.Thread(target=answer)
    thread.start()
    with ours, brokers:
        with pytest.raises(NotAllowed, match=refusal):
            greet(ours, HELLO, b"k" * 32)
        thread.join()
