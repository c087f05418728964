"""Peers of a broker that misbehave: other versions, noise, strangers, floods, and what they may open."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
import zmq
from tests.process.harness import PATIENCE_S, Site, bare_client, wait_until

import layerzero as lz
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control, messages, wire

X = np.array([1, 2, 3], np.float32)


def check(x: np.ndarray, result: np.ndarray) -> None:
    np.testing.assert_allclose(result, x / (1 + np.exp(-x.astype(np.float64))), rtol=1e-5)


def test_another_protocol_version_is_refused_by_name(connected: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guessing at the other side's bytes gives wrong results; both versions and the way out must be named."""
    sock = control.connect(connected.endpoints.control, timeout_s=5)
    hello = messages.Hello(protocols=[98, 99], role="client", package="9.9", pid=os.getpid())
    control.send(sock, hello)
    answer, _ = control.receive(sock, messages.Refused)
    assert answer.error["code"] == "VERSION_MISMATCH"
    for fact in (f"speaks protocol {wire.PROTOCOL}", "9.9", "98, 99", "lz down"):
        assert fact in answer.error["message"]
    assert sock.recv(1) == b""
    sock.close()
    lz.disconnect()
    protocol = wire.PROTOCOL
    monkeypatch.setattr(wire, "PROTOCOL", 99)
    with pytest.raises(lz.VersionMismatch, match=rf"speaks protocol {protocol}.*speaks 99"):
        connected.connect()


NOISE: dict[str, bytes] = {
    "nothing": b"",
    "random bytes": random.Random(7).randbytes(4000),
    "too large": b"\xc1" * 65_000,
    "a bomb of nested lists": b"\x91" * 60_000,
    "a map that claims four billion entries": b"\xdf\xff\xff\xff\xff",
    "another message than a hello": messages.encode(messages.RetireArena(arena=1)),
    "an unknown role": messages.encode(messages.Hello(protocols=[wire.PROTOCOL], role="king", package="0", pid=1)),
    "a worker without a ticket": messages.encode(
        messages.Hello(protocols=[wire.PROTOCOL], role="worker", package="0", pid=1, ticket=b"guess")
    ),
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_on_the_control_socket_is_cut_off(connected: Site, noise: str) -> None:
    """Any process of the user can connect; only those that speak the protocol stay."""
    sock = control.connect(connected.endpoints.control, timeout_s=10)
    if NOISE[noise]:
        sock.send(NOISE[noise])
        wait_until(lambda: sock.recv(1 << 16) == b"")  # after a last word, perhaps
    sock.close()
    check(X, lz.silu(X))


def test_a_client_that_breaks_the_protocol_is_dropped_alone(connected: Site) -> None:
    """Its mistakes must not cost others a call, the broker its life, or a worker its time."""
    connected.wait_ready("alpha", "beta")
    mine = [c["number"] for c in lz.status()["clients"]]
    workers = [connected.backend(name)["pid"] for name in ("alpha", "beta")]
    route = messages.encode(messages.Route(op="null", inputs=[], outputs=[], attrs={}))
    silu_route = messages.Route(
        op="silu", inputs=[["float32", [4], [1]]], outputs=[["float32", [4], [1]]], attrs={}, backend=""
    )
    requests: list[list[bytes]] = [
        [b""],
        [b"\xff" * 31],
        [struct.pack("<H", 7) + b"\0" * 60],
        [wire.pack(99)],
        [wire.pack(wire.Kind.RUN)],
        [wire.pack(wire.Kind.EXECUTE, route=5, seq=1)],
        [wire.pack(wire.Kind.ROUTE, route=1, body=b"\xc1")],
        [wire.pack(wire.Kind.ROUTE, route=1, body=route), wire.pack(wire.Kind.ROUTE, route=1, body=route)],
        [wire.pack(wire.Kind.POISONED, route=1, body=b"short")],
        [wire.pack(wire.Kind.REQUEST, seq=1, body=b"\xc1")],
        [
            wire.pack(wire.Kind.ROUTE, route=1, body=messages.encode(silu_route)),
            wire.pack(wire.Kind.EXECUTE, route=1, seq=1, body=wire.pack_refs([wire.Ref(3, 0, 0, 16)] * 2)),
        ],
        [
            wire.pack(wire.Kind.ROUTE, route=1, body=messages.encode(silu_route)),
            wire.pack(wire.Kind.EXECUTE, route=1, seq=1, body=b"\0" * 7),
        ],
    ]
    context = zmq.Context()
    for frames in requests:
        sock, dealer = bare_client(connected, context)
        for frame in frames:
            dealer.send(frame)
        try:
            wait_until(lambda sock=sock: sock.recv(1 << 16) == b"")  # type: ignore[misc]
        except (AssertionError, TimeoutError):
            pytest.fail(f"{frames} is accepted")
        dealer.close(linger=0)
        sock.close()
    context.term()
    wait_until(lambda: [c["number"] for c in lz.status()["clients"]] == mine)
    assert [connected.backend(name)["pid"] for name in ("alpha", "beta")] == workers
    check(X, lz.silu(X))


def test_requests_that_make_no_sense_are_answered_with_an_error(connected: Site) -> None:
    """`lz` of another version may ask for more than this broker knows; that is no reason to hang up."""
    for method, params in (
        ("stauts", {}),
        ("explain", {}),
        ("explain", {"route": 7}),
        ("reset", {"backend": "nowhere"}),
        ("reset", {"backend": ["alpha"]}),
        ("provider", {"backend": ["alpha"]}),
    ):
        with pytest.raises(lz.LayerZeroError) as failure:
            lz.session().ask(method, **params)
        assert failure.value.code == "INVALID_ARGUMENT"
    with pytest.raises(lz.InvalidArgument, match="did you mean 'status'"):
        lz.session().ask("stauts")
    check(X, lz.silu(X))


def test_strangers_on_the_zmq_socket_are_ignored(connected: Site) -> None:
    """Without a welcome nobody has an identity that the broker knows."""
    paths = [p for p in connected.folder.iterdir() if p.is_socket() and p != connected.endpoints.control]
    assert len(paths) == 2
    context = zmq.Context()
    for path in paths:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{path}")
        for frame in (b"", b"\xff" * 100_000, wire.pack(wire.Kind.REQUEST), wire.pack(wire.Kind.READY)):
            dealer.send(frame)
            dealer.send_multipart([frame, frame, frame])
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(path))
        raw.send(b"GET / HTTP/1.0\r\n\r\n")
        check(X, lz.silu(X))
        raw.close()
        dealer.close(linger=0)
    context.term()
    check(X, lz.silu(X))


def test_a_flood_of_silent_connections_shuts_nobody_out(connected: Site) -> None:
    """Whoever connects and says nothing takes a descriptor; there is a limit, and the oldest goes first."""
    before = len(os.listdir(f"/proc/{connected.broker_pid}/fd"))
    flood = [control.connect(connected.endpoints.control, timeout_s=5) for _ in range(300)]
    lz.status()  # whoever connected before this was asked is accepted by now
    wait_until(lambda: len(os.listdir(f"/proc/{connected.broker_pid}/fd")) < before + 80)
    other = connected.python("lz.connect()\nprint(lz.null(backend='alpha'))")
    assert other.communicate(timeout=PATIENCE_S)[0].split() == ["None"]
    for sock in flood:
        sock.close()
    check(X, lz.silu(X))


def test_arenas_are_checked_before_they_are_lent(connected: Site) -> None:
    """A memfd that can still shrink is a SIGBUS in every worker that maps it."""
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    good = memory.create_memfd("good", 4096)
    empty = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    context = zmq.Context()
    bad = (((unsealed,), 4096), ((good,), 8192), ((), 4096), ((good, good), 4096), ((0,), 4096), ((empty,), 0))
    for fds, nbytes in bad:
        sock, dealer = bare_client(connected, context)
        control.send(sock, messages.AddArena(arena=1, nbytes=nbytes), fds)
        answer, _ = control.receive(sock, messages.Refused)
        assert answer.error["code"] == "BAD_MESSAGE"
        assert sock.recv(1) == b""
        dealer.close(linger=0)
        sock.close()
    context.term()
    for fd in (unsealed, good, empty):
        os.close(fd)
    check(X, lz.silu(X))


# --- the runtime folder


def test_a_runtime_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    """Whoever can write there could put a socket of his own in the broker's place."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    with pytest.raises(lz.ConfigError, match=r"mode 0700.*mode 0755.*chmod 0700"):
        lz.connect(runtime_dir=folder)
    folder.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(lz.ConfigError, match="must be a directory"):
        lz.connect(runtime_dir=link)
    with pytest.raises(lz.ConfigError, match="too long for unix sockets"):
        lz.connect(runtime_dir=tmp_path / ("x" * 100))


def test_sockets_and_logs_are_for_their_owner_only(connected: Site) -> None:
    """Payloads never pass there, but identities do."""
    connected.wait_ready("alpha")
    open_to_others = [p.name for p in connected.folder.iterdir() if not p.is_dir() and p.stat().st_mode & 0o077]
    assert open_to_others == []
    assert connected.folder.stat().st_mode & 0o077 == 0
