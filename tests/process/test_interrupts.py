"""Ctrl-C at the worst moments: the interrupted call's memory stays lent, and nobody else's call is lost."""

from __future__ import annotations

import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import PAUSE, fault
from tests.process.harness import PATIENCE_S, Site, is_paused, wait_until

import layerzero as lz
from layerzero.client.connection.arena import pool

X = np.array([1, 2, 3], np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


class Interrupting:
    """A socket whose `send` does its work and is then hit by SIGINT."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, *args: Any) -> None:
        self._sock.send(*args)
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_right_after_sending_keeps_the_memory_lent(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may write to the output until it answers: handing that memory to the next call would spoil it."""
    (gamma,) = connected.wait_ready("gamma")
    lz.silu(X, backend="gamma")  # its route is known from here on: the interrupt hits the call itself
    gc.collect()
    link, before = lz.session().link, pool.stats()["slots"]
    paused = np.array([fault(PAUSE), 1, 2], np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(link, "_dealer", Interrupting(link._dealer))
        with pytest.raises(KeyboardInterrupt):
            lz.silu(paused, backend="gamma", timeout_s=2 * PATIENCE_S)
    wait_until(lambda: is_paused(gamma))
    gc.collect()  # the interrupt's traceback, which holds the memory too
    assert pool.stats()["slots"] == before + 2
    np.testing.assert_allclose(lz.silu(X), silu(X), rtol=1e-6)
    os.kill(gamma, signal.SIGCONT)
    wait_until(lambda: connected.backend("gamma")["running"] == 0)
    wait_until(lambda: lz.status() and pool.stats()["slots"] == before)


def test_an_interrupt_of_the_thread_that_reads_for_all_lets_another_read(connected: Site) -> None:
    """One thread reads for all; when Ctrl-C takes it away, those who wait must not wait for ever."""
    (gamma,) = connected.wait_ready("gamma")
    link, main = lz.session().link, threading.get_ident()
    paused = np.array([fault(PAUSE), 1], np.float32)
    first, second = (lz.submit(lz.silu, x, backend="gamma", timeout_s=2 * PATIENCE_S) for x in (paused, X))

    def interrupt_once_both_wait() -> None:
        wait_until(lambda: link._turn.get("reader") == main)
        waiter = threads.submit(second.result)
        wait_until(lambda: len(link._waiting) == 1)
        signal.pthread_kill(main, signal.SIGINT)
        wait_until(lambda: is_paused(gamma) and link._turn.get("reader") not in (None, main))
        os.kill(gamma, signal.SIGCONT)
        np.testing.assert_allclose(waiter.result(PATIENCE_S), silu(X), rtol=1e-6)

    with ThreadPoolExecutor(2) as threads:
        helper = threads.submit(interrupt_once_both_wait)
        with pytest.raises(KeyboardInterrupt):
            first.result()
        helper.result(2 * PATIENCE_S)
    np.testing.assert_allclose(first.result(), silu(paused), rtol=1e-6)


def test_an_interrupt_at_the_moment_of_becoming_the_reader_leaves_no_turn(
    connected: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that nobody ends is a session that nobody can use."""
    connected.wait_ready("alpha")
    link = lz.session().link
    future = lz.submit(lz.silu, X)
    take = link._take_turn

    def take_and_be_interrupted() -> bool:
        is_mine = take()
        signal.raise_signal(signal.SIGINT)
        return is_mine

    with monkeypatch.context() as patch:
        patch.setattr(link, "_take_turn", take_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            future.result()
    with ThreadPoolExecutor(1) as threads:
        np.testing.assert_allclose(threads.submit(future.result).result(timeout=PATIENCE_S), silu(X), rtol=1e-6)
