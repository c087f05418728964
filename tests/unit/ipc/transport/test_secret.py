"""The stack's secret: its file, and the proofs that are made of it."""

from __future__ import annotations

import os
import socket
import stat
import threading
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
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    """Whoever wrote it knows it."""
    path = tmp_path / "secret"
    secret.create(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="has owner 12345"):
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
