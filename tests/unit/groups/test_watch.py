"""Calls on GPUs that nobody waits for, while a rank goes; without a GPU."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from layerzero.groups.nccl import _Watch

PATIENCE_S = 60.0


def watching(
    is_done: Callable[[], bool], abort: Callable[[], None], is_ending: Callable[[], bool] = bool
) -> tuple[_Watch, socket.socket]:
    """A watch, and the other rank's end of the socket that it looks at."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watch = _Watch([(os.dup(ours.fileno()), 0)], is_done, abort, is_ending)
    ours.close()
    return watch, theirs


def test_what_cannot_end_any_more_is_aborted() -> None:
    aborted = threading.Event()
    watch, rank = watching(lambda: False, aborted.set)
    rank.send(b"a message is no end")
    assert not watch.has_aborted
    rank.close()
    assert aborted.wait(PATIENCE_S)
    watch.close()
    assert watch.has_aborted


def test_a_rank_that_is_ending_is_seen_before_its_socket_is_closed() -> None:
    """Its memory may take long to give back."""
    aborted = threading.Event()
    watch, rank = watching(lambda: False, aborted.set, lambda: True)
    assert aborted.wait(PATIENCE_S)
    watch.close()
    rank.close()


def test_what_has_ended_is_left_alone() -> None:
    aborted, looked = threading.Event(), threading.Event()
    watch, rank = watching(lambda: looked.set() is None, aborted.set)
    rank.close()
    assert looked.wait(PATIENCE_S)
    watch.close()
    assert not watch.has_aborted
    assert not aborted.is_set()


def test_a_group_that_closes_ends_its_watch() -> None:
    before = threading.active_count()
    watch, rank = watching(lambda: False, lambda: None)
    watch.close()
    rank.close()
    assert (threading.active_count(), watch.has_aborted) == (before, False)
