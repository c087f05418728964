"""What a rank hears of another that ends: what it said last, whatever it had not read."""

from __future__ import annotations

import os
import socket
import time

import pytest

from layerzero.groups.faults import broken
from layerzero.groups.peers import COLLECTIVE, Peers
from layerzero.ipc.errors import GroupBroken
from layerzero.ipc.transport.plain import pack_body


@pytest.fixture(params=[0, 10_000_000], ids=["sleeps", "looks"])
def pair(request: pytest.FixtureRequest) -> tuple[Peers, socket.socket]:
    """Where cores are free, the second one looks for messages before it sleeps."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Peers("tp", 1, 0, {1: mine}, {1: os.getpid()}, request.param), theirs


def test_a_rank_that_gives_up_is_heard_though_it_read_nothing(pair: tuple[Peers, socket.socket]) -> None:
    """The kernel says "reset" first, of a socket that was closed with messages unread: it was taken for a death."""
    peers, other = pair
    peers.send(1, b"C unread", time.monotonic() + 5)
    why = broken("RANK_DIED", "rank 2 has died", group="tp", generation=1, ranks=[2], doing="call 1, barrier")
    other.send(b"X" + pack_body(why.to_wire()))
    other.close()
    with pytest.raises(GroupBroken) as caught:
        peers.take(COLLECTIVE, [1], time.monotonic() + 5)
    assert caught.value.facts["ranks"] == [2]
    assert caught.value.facts["told_by"] == 1
    peers.close()


def test_messages_before_the_end_count(pair: tuple[Peers, socket.socket]) -> None:
    """Who ends after its last message has done its part."""
    peers, other = pair
    other.send(b"C last")
    other.close()
    assert peers.take(COLLECTIVE, [1], time.monotonic() + 5) == {1: b"C last"}
    with pytest.raises(GroupBroken, match="rank 1 has died"):
        peers.take(COLLECTIVE, [1], time.monotonic() + 5)
    peers.close()


def test_bytes_that_are_no_error_break_the_group_and_no_more(pair: tuple[Peers, socket.socket]) -> None:
    peers, other = pair
    other.send(b"X\xc1")
    with pytest.raises(GroupBroken, match="rank 1 sent not msgpack") as caught:
        peers.take(COLLECTIVE, [1], time.monotonic() + 5)
    assert caught.value.facts["reason"] == "FAILED"
    other.close()
    peers.close()


def test_a_descriptor_comes_along_where_one_is_expected(pair: tuple[Peers, socket.socket]) -> None:
    """At other times it is closed unseen: nobody fills this process with them."""
    peers, other = pair
    until_s = time.monotonic() + 5
    given = os.memfd_create("given")
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(other, [b"C unasked"], [given])
    assert peers.take(COLLECTIVE, [1], until_s) == {1: b"C unasked"}
    assert len(os.listdir("/proc/self/fd")) == before
    peers.expect_descriptor()
    socket.send_fds(other, [b"CD"], [given])
    taken = peers.take_descriptor(1, until_s)
    assert not os.get_inheritable(taken)
    os.write(taken, b"here")
    assert os.pread(given, 10, 0) == b"here"
    os.close(taken)
    peers.give_descriptor(1, given, until_s)
    data, (another,), _, _ = socket.recv_fds(other, 10, 1)
    assert (data, os.pread(another, 10, 0)) == (b"CD", b"here")
    os.close(another)
    for message, fds in ((b"CD", []), (b"C other", [given]), (b"CD", [given, given])):
        peers.expect_descriptor()
        socket.send_fds(other, [message], fds)
        with pytest.raises(GroupBroken, match="rank 1 has given no descriptor"):
            peers.take_descriptor(1, until_s)
    peers.expect_descriptor()
    socket.send_fds(other, [b"C early"], [given])
    assert peers.take(COLLECTIVE, [1], until_s) == {1: b"C early"}
    peers.forget_descriptors()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(given)
    other.close()
    peers.close()
