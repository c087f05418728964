"""Frames for clients that read slowly, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from layerzero.broker.io.poller import Poller
from layerzero.broker.io.routers import MAX_KEPT_BYTES, QUEUE, Routers, Unreachable

CLIENT = b"LC1"


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def routers(tmp_path: Path, poller: Poller) -> Iterator[Routers]:
    def take(identity: bytes, frame: bytes) -> None:
        heard.append(frame)

    heard: list[bytes] = []
    routers = Routers(tmp_path / "c", tmp_path / "w", poller, queue=4096, from_client=take, from_worker=take)
    routers.heard = heard  # type: ignore[attr-defined]
    yield routers
    routers.close()


@pytest.fixture
def client(tmp_path: Path, poller: Poller, routers: Routers) -> Iterator[zmq.Socket[bytes]]:
    """Connected, and with little room for what it does not read."""
    context: zmq.Context[Any] = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.ROUTING_ID, CLIENT)
    client.setsockopt(zmq.RCVHWM, 4)
    client.setsockopt(zmq.RCVTIMEO, 10_000)
    client.connect(f"ipc://{tmp_path / 'c'}")
    client.send(b"hello")
    while not routers.heard:  # type: ignore[attr-defined]
        poller.wait(1.0)
        routers.take()
    yield client
    client.close(linger=0)
    context.term()


def send_all(routers: Routers, frame: bytes, count: int) -> int:
    """How many of so many are taken."""
    for sent in range(count):
        try:
            routers.send_client(CLIENT, frame)
        except Unreachable:
            return sent
    return count


def test_frames_that_wait_for_a_client_are_counted_in_bytes(routers: Routers, client: zmq.Socket[bytes]) -> None:
    """399 answers of 1 MiB that nobody read were 1.5 GiB of the broker."""
    frame = b"x" * (1 << 20)
    sent = send_all(routers, frame, 1000)
    assert sent <= QUEUE + MAX_KEPT_BYTES // len(frame) + 16  # some are with the client


def test_a_slow_client_gets_all_in_order(routers: Routers, client: zmq.Socket[bytes], poller: Poller) -> None:
    """What was kept follows when there is room again, without anybody's asking."""
    frames = [number.to_bytes(4, "little") + b"x" * 5000 for number in range(2000)]
    for frame in frames:
        routers.send_client(CLIENT, frame)
    got = []
    for _ in frames:
        while not client.poll(1):
            poller.wait(0)
            routers.take()
        got.append(client.recv())
    assert got == frames
    routers.send_client(CLIENT, b"last")
    assert client.recv() == b"last"


def test_frames_are_kept_up_to_a_number_and_go_with_the_client(routers: Routers, client: zmq.Socket[bytes]) -> None:
    """As many as calls that may be open, four times."""
    sent = send_all(routers, b"x" * 3000, 20_000)
    assert 4096 <= sent < 6000
    routers.take()
    assert routers.keeps_frames
    assert not routers.may_have_input  # the loop may sleep
    routers.forget_client(CLIENT)
    with pytest.raises(Unreachable) as caught:
        routers.send_client(b"nobody", b"x")
    assert not caught.value.is_full
