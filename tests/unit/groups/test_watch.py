"""Calls on GPUs that nobody waits for, while a rank goes; without a GPU."""

from __future__ import annotations

import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.groups import nccl
from layerzero.groups.nccl import Nccl
from layerzero.groups.nccl_watch import Watch
from layerzero.ipc.errors import OutOfMemory

PATIENCE_S = 60.0


def watching(
    is_done: Callable[[], bool], abort: Callable[[], None], is_ending: Callable[[], bool] = bool
) -> tuple[Watch, socket.socket]:
    """A watch, and the other rank's end of the socket that it looks at."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watch = Watch([(os.dup(ours.fileno()), 0)], is_done, abort, is_ending)
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


def test_a_call_behind_a_watch_that_is_over_has_another_one(tmp_path: Path) -> None:
    """A rank may have agreed to a call, and gone before it: all that had been left open was done when that was seen."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    aborted, is_done = threading.Event(), True

    class Watched(Nccl):
        def _stream(self) -> Any:
            return None

        def _recorded(self) -> Any:
            return SimpleNamespace(query=lambda: is_done)

        def _abort(self) -> None:
            aborted.set()

    made = Watched(tmp_path, "group", 1, 0, 0)
    peers: Any = SimpleNamespace(ends=lambda: [(os.dup(ours.fileno()), 0)], is_ending=bool)
    made.launch(peers, lambda: None)
    assert made._watch is not None
    theirs.close()
    made._watch._thread.join(PATIENCE_S)
    is_done = False
    made.launch(peers, lambda: None)
    assert aborted.wait(PATIENCE_S)
    made.drop()
    ours.close()


def test_a_group_that_closes_ends_its_watch() -> None:
    before = threading.active_count()
    watch, rank = watching(lambda: False, lambda: None)
    watch.close()
    rank.close()
    assert (threading.active_count(), watch.has_aborted) == (before, False)


class Communicator:
    """One whose kernels end as soon as it is aborted, and which is taken down once `may_end` is set."""

    def __init__(self) -> None:
        self.has_stopped, self.may_end = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.has_stopped.set()
        assert self.may_end.wait(PATIENCE_S)

    def query(self) -> bool:
        """As the event behind its last call."""
        return self.has_stopped.is_set()


def test_who_is_told_of_a_death_waits_for_kernels_and_not_for_the_rest(tmp_path: Path) -> None:
    """That is for the next one, and for the end of the process."""
    made, one = Nccl(tmp_path, "group", 1, 0, 0), Communicator()
    made._group = made._latest = one
    made.drop()
    assert one.has_stopped.is_set()
    nccl.finish_teardowns(0.0)
    (teardown,) = nccl._teardowns
    assert teardown.is_alive()
    one.may_end.set()
    nccl._end()  # as at the end of the process
    assert not nccl._teardowns


def test_a_gpu_is_let_go_on_until_all_its_streams_are_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: behind something else of the program's one may come to wait only later. Until then what
    they work with is not let go of."""
    made, one = Nccl(tmp_path, "group", 1, 0, 0), Communicator()
    released, is_through = [0], threading.Event()

    class OneShot:
        def release(self) -> None:
            released[0] += 1
            if released[0] == 5:
                is_through.set()

    one_shot = OneShot()
    made.release_by(one_shot)  # type: ignore[arg-type]
    made._group, made._latest = one, SimpleNamespace(query=lambda: True)
    made._open = {"another stream": (SimpleNamespace(query=is_through.is_set), 1)}
    monkeypatch.setattr(nccl, "ABORT_S", 0.0)
    one.may_end.set()
    assert not made.is_done()
    made.drop()
    for thread in threading.enumerate():
        if thread.name == "nccl-release":
            thread.join()
    assert released[0] >= 5
    assert made.is_done()
    is_through.clear()
    assert not made.is_done()
    nccl.finish_teardowns()


def test_what_was_launched_after_the_watch_had_aborted_is_let_go_on_too(tmp_path: Path) -> None:
    made, is_through = Nccl(tmp_path, "group", 1, 0, 0), threading.Event()
    one_shot = SimpleNamespace(release=is_through.set)
    made.release_by(one_shot)  # type: ignore[arg-type]
    made._latest = SimpleNamespace(query=is_through.is_set)
    made.drop()
    assert is_through.wait(PATIENCE_S)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_what_was_enqueued_before_an_error_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """It may wait for a rank that met the same, and does not come."""
    made, event = Nccl(tmp_path, "group", 1, 0, 0), SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(made, "_recorded", lambda: event)
    monkeypatch.setattr(nccl, "Watch", lambda *_: SimpleNamespace(is_over=False, has_aborted=False))
    monkeypatch.setattr(made, "_stream", lambda: "stream")
    peers: Any = SimpleNamespace(ends=lambda: [], is_ending=bool)
    monkeypatch.setattr(made, "_failed", lambda peers, exc: exc)

    def work() -> None:
        raise kind

    with pytest.raises(kind):
        made.launch(peers, work)
    assert not made.is_done()
    made.launch(peers, lambda: None)
    made.launch(peers, lambda: None, is_counted=False)
    assert made.void() == 2


def test_a_run_behind_the_watchs_abort_is_void_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Nccl(tmp_path, "group", 1, 0, 0)
    monkeypatch.setattr(made, "_recorded", lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(made, "_stream", lambda: "stream")
    monkeypatch.setattr(made, "_failed", lambda peers, exc: exc)
    made._watch = SimpleNamespace(is_over=True, has_aborted=True, join=lambda: None)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="a rank has gone"):
        made.launch(None, lambda: None)  # type: ignore[arg-type]
    assert made.void() == 1


def test_an_interrupt_is_told_though_a_rank_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Nccl(tmp_path, "group", 1, 0, 0)

    def record() -> None:
        raise RuntimeError("a rank has gone")

    def work() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_recorded", record)
    with pytest.raises(KeyboardInterrupt):
        made.launch(None, work)  # type: ignore[arg-type]


def test_what_a_rank_that_gave_up_has_let_go_on_is_void(tmp_path: Path) -> None:
    """It told this GPU that summands were there which were none; both GPUs are through."""
    made, done = Nccl(tmp_path, "group", 1, 0, 0), SimpleNamespace(query=lambda: True)
    one_shot = SimpleNamespace(is_void=lambda: False, release=lambda: None)
    made.release_by(one_shot)  # type: ignore[arg-type]
    peers: Any = SimpleNamespace(look=lambda until_s: None)
    made._open = {"stream": (done, 3)}
    made._wait_for(done, peers, 0.0)
    assert made.void() == 0
    one_shot.is_void = lambda: True
    assert made.void() == 3
    with pytest.raises(RuntimeError, match="a rank went"):
        made._wait_for(done, peers, 0.0)


def test_what_is_launched_while_a_thread_lets_the_gpu_go_on_is_let_go_on_too(tmp_path: Path) -> None:
    made, ends = Nccl(tmp_path, "group", 1, 0, 0), [threading.Event() for _ in range(2)]
    later = SimpleNamespace(query=ends[1].is_set)

    def release() -> None:
        if made._latest is later:
            ends[1].set()
        made._latest = later
        ends[0].set()

    one_shot = SimpleNamespace(release=release)
    made.release_by(one_shot)  # type: ignore[arg-type]
    made._latest = SimpleNamespace(query=ends[0].is_set)
    (thread,) = made._releasing(made._one_shots)
    thread.join(PATIENCE_S)
    assert ends[1].is_set()


def test_graphs_are_destroyed_by_who_launches_them_and_at_the_end_of_the_process(tmp_path: Path) -> None:
    """A thread that aborts may meet a launch; and NCCL cannot be taken down before they are gone."""
    made, one = Nccl(tmp_path, "group", 1, 0, 0), Communicator()

    class Graph:
        def let_go(self) -> None:
            one.may_end.set()

    graph = Graph()
    made.hold(weakref.WeakMethod(graph.let_go))
    made._group = made._latest = one
    made._abort()
    assert one.has_stopped.is_set()
    assert not one.may_end.is_set()
    nccl._end()
    assert one.may_end.is_set()
    assert not nccl._teardowns


def test_two_threads_that_wait_for_a_teardown_see_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whom one takes it out."""

    class Ended(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            nccl._teardowns.remove(self)  # as the other does meanwhile

    monkeypatch.setattr(nccl, "_teardowns", [Ended()])
    nccl.finish_teardowns()
    assert not nccl._teardowns


def test_memory_that_is_not_there_is_said_before_anybody_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused then, and the group goes on."""

    class Full(RuntimeError):
        """As torch raises it."""

    def empty(*_: Any, **__: Any) -> Any:
        raise Full("CUDA out of memory. Tried to allocate 8.00 GiB")

    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(empty=empty, device=lambda *_: None, float32="float32", cuda=None)
    )
    with pytest.raises(OutOfMemory, match="free memory of GPU 3"):
        Nccl(tmp_path, "group", 1, 0, 3).empty("float32", (1 << 31,))


def test_without_a_call_to_wait_for_all_of_it_is_awaited(tmp_path: Path) -> None:
    made, one = Nccl(tmp_path, "group", 1, 0, 0), Communicator()
    made._group = one
    dropping = threading.Thread(target=made.drop)
    dropping.start()
    assert one.has_stopped.wait(PATIENCE_S)
    assert dropping.is_alive()
    one.may_end.set()
    dropping.join(PATIENCE_S)
    assert not any(teardown.is_alive() for teardown in nccl._teardowns)
