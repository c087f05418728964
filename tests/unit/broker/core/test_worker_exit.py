"""In which order a dead worker's calls go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from layerzero.broker.core.worker_exit import Move, in_order


def move(client: int, seq: int, *, is_on_gpu: bool = True) -> Move:
    someone: Any = SimpleNamespace(number=client)
    return Move(someone, seq, is_on_gpu, lambda: None)


def order(moves: list[Move]) -> list[tuple[int, int]]:
    return [(one.client.number, one.seq) for one in in_order(moves)]


def test_calls_on_gpus_move_in_the_order_in_which_their_client_made_them() -> None:
    """Those that came by the broker stand before those on rings, also where these are older. A worker that had a later
    one first would wait for it in its streams, and CUDA may wait for all of them when it loads the next kernel."""
    assert order([move(1, 7), move(1, 9), move(1, 5), move(1, 6), move(1, 8)]) == [(1, n) for n in (5, 6, 7, 8, 9)]


def test_clients_keep_their_places() -> None:
    """None comes before others by that."""
    assert order([move(1, 7), move(2, 4), move(1, 5), move(2, 3)]) == [(1, 5), (2, 3), (1, 7), (2, 4)]


def test_calls_on_the_cpu_stay_where_they_are() -> None:
    """They wait for nobody; what ran comes before what was queued."""
    moves = [move(1, 9, is_on_gpu=False), move(1, 3), move(1, 8, is_on_gpu=False), move(1, 2)]
    assert order(moves) == [(1, 9), (1, 2), (1, 8), (1, 3)]
