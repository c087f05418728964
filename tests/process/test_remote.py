"""Questions over tcp: answered for keys that are accepted, and for nobody else; no calls."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.client.connection import remote
from layerzero.ipc.transport import keys


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Keys of a broker and of one who asks, each of whom accepts the other."""
    broker, ours = tmp_path / "broker", tmp_path / "ours"
    public = {folder: keys.make(folder) for folder in (broker, ours)}
    keys.allow(broker, "monitor", str(public[ours]))
    keys.allow(ours, remote.BROKER, str(public[broker]))
    return broker, ours


def listening(new_site: Callable[..., Site], folder: Path) -> str:
    """The address of a broker that is asked there."""
    site = new_site(remote="tcp://127.0.0.1:*", keys=folder).start()
    endpoint: str = site.events("remote.listens")[0]["endpoint"]
    return endpoint


def test_status_and_health_are_answered_over_tcp(new_site: Callable[..., Site], folders: tuple[Path, Path]) -> None:
    """A monitor on another machine has no runtime folder."""
    broker, ours = folders
    endpoint = listening(new_site, broker)
    assert remote.ask(endpoint, ours, "health", {"backend": "alpha"})["ok"] is True
    names = [row["name"] for row in remote.ask(endpoint, ours, "status", {})["backends"]]
    assert "alpha" in names
    with pytest.raises(lz.InvalidArgument, match="no backend is called 'nobody'"):
        remote.ask(endpoint, ours, "health", {"backend": "nobody"})


@pytest.mark.parametrize("method", ["shutdown", "reset", "learn", "provider", "stay"])
def test_nothing_that_changes_a_broker_is_answered_over_tcp(
    new_site: Callable[..., Site], folders: tuple[Path, Path], method: str
) -> None:
    """A key to look is no key to steer."""
    broker, ours = folders
    with pytest.raises(lz.NotAllowed, match="not answered over tcp; allowed: health, ping, status"):
        remote.ask(listening(new_site, broker), ours, method, {})


def test_a_key_that_is_not_accepted_is_refused(new_site: Callable[..., Site], folders: tuple[Path, Path]) -> None:
    """To know the broker's key is not enough: it is public."""
    broker, ours = folders
    stranger = ours.parent / "stranger"
    keys.make(stranger)
    keys.allow(stranger, remote.BROKER, str(broker / "own.key"))
    with pytest.raises(lz.NotAllowed, match="does not accept this side's key"):
        remote.ask(listening(new_site, broker), stranger, "ping", {})


def test_a_broker_with_another_key_is_not_talked_to(new_site: Callable[..., Site], folders: tuple[Path, Path]) -> None:
    """Whoever listens on that port now must prove to be the broker."""
    broker, ours = folders
    keys.allow(ours, remote.BROKER, str(ours / "own.key"))
    with pytest.raises(lz.BrokerLost, match="its key is not the one that is accepted"):
        remote.ask(listening(new_site, broker), ours, "ping", {}, timeout_s=1.0)


def test_who_speaks_without_encryption_hears_nothing(new_site: Callable[..., Site], folders: tuple[Path, Path]) -> None:
    """There is no plain mode to fall back to."""
    endpoint = listening(new_site, folders[0])
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(endpoint)
        sock.send(b"\1\0\3\0" + bytes(28))
        assert sock.poll(500) == 0


class _HalfOpen:
    """Stands between two ends of tcp, and drops what the listener says from some byte on. Both connections stay open:
    neither end is told."""

    def __init__(self, endpoint: str, after_bytes: int) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._there, self._left = (host, int(port)), after_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(self._there)
                self._open += [here, there]
                threading.Thread(target=self._pass_on, args=(there, here), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(here, there), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if self._left <= 0:
                    continue
                if source.getpeername() == self._there:
                    self._left -= len(data)
                sink.sendall(data)

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.mark.parametrize("after_bytes", [0, 400], ids=["before the handshake", "after it"])
def test_a_connection_that_goes_silent_hangs_neither_end(
    new_site: Callable[..., Site], folders: tuple[Path, Path], after_bytes: int
) -> None:
    """As when a machine or a NAT between them is gone: no FIN, no RST. Others are answered meanwhile."""
    broker, ours = folders
    site = new_site(remote="tcp://127.0.0.1:*", keys=broker).start()
    endpoint = site.events("remote.listens")[0]["endpoint"]
    proxy = _HalfOpen(endpoint, after_bytes)
    try:
        with pytest.raises(lz.BrokerLost, match=r"nothing came back from tcp://127\.0\.0\.1:\d+ within 1 s"):
            remote.ask(proxy.endpoint, ours, "status", {}, timeout_s=1.0)
        assert remote.ask(endpoint, ours, "ping", {})["pid"] == site.broker_pid
        process = psutil.Process(site.broker_pid)
        wait_until(lambda: [c for c in process.net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED] == [])
    finally:
        proxy.close()


@pytest.mark.parametrize("what", ["no pair", "nobody accepted", "no tcp"])
def test_a_broker_does_not_listen_without_keys(
    new_site: Callable[..., Site], folders: tuple[Path, Path], what: str
) -> None:
    """Refused, with the command that mends it, rather than open to all."""
    broker, _ = folders
    endpoint = "ipc:///tmp/x" if what == "no tcp" else "tcp://127.0.0.1:*"
    if what == "no pair":
        (broker / "own.secret").unlink()
    elif what == "nobody accepted":
        (broker / "allowed" / "monitor.key").unlink()
    says = {"no pair": "lz keys make", "nobody accepted": "lz keys allow", "no tcp": "allowed: tcp://"}[what]
    with pytest.raises(lz.ConfigError, match=says):
        new_site(remote=endpoint, keys=broker).start()


def test_calls_over_tcp_are_refused_with_the_reason() -> None:
    """Memory crosses as file descriptors."""
    with pytest.raises(lz.ConfigError, match="over tcp a broker answers questions alone"):
        lz.connect(runtime_dir="tcp://127.0.0.1:7777")


def test_secret_keys_are_their_owners_alone(folders: tuple[Path, Path]) -> None:
    """A pair that others can read is no proof of anything."""
    path = folders[0] / "own.secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(lz.ConfigError, match="has a key pair already"):
        keys.make(folders[0])
    path.chmod(0o640)
    with pytest.raises(lz.ConfigError, match=f"owner {os.getuid()} and mode 0640"):
        keys.own(folders[0])


@pytest.mark.parametrize(("name", "key"), [("../x", "0" * 40), ("x", "0" * 39), ("x", "'" * 40)])
def test_what_is_no_key_is_refused(tmp_path: Path, name: str, key: str) -> None:
    """A file of that name would lie where it pleases, or accept nobody."""
    with pytest.raises(lz.ConfigError):
        keys.allow(tmp_path, name, key)
    assert json.dumps(list(keys.allowed(tmp_path))) == "[]"
