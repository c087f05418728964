"""client/connection/call.py: what tells two calls apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerzero.client.arrays.recognition import describe
from layerzero.client.connection.arena import pool
from layerzero.client.connection.call import Request, Submitted, microseconds
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS

A, B = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)


def request(op: str, *args: Any) -> Request:
    return Request(op, args, {}, lambda *_: None)  # type: ignore[arg-type, return-value]


def digest(op: str, *args: Any) -> bytes:
    arrays = tuple(None if arg is None else describe(arg) for arg in args)
    nothing: Any = None
    return Submitted(
        nothing, nothing, request(op, *args), nothing, arrays, [], [], None, None, False, [], 0, b"", frozenset(), None
    ).digest()


def test_a_digest_is_of_every_input() -> None:
    """A harmless call must not be taken for a poisonous one that shares its first input, nor the other way."""
    assert digest("matmul", A, B) == digest("matmul", A.copy(), B.copy())
    assert len({digest("matmul", A, A), digest("matmul", A, B), digest("matmul", B, A), digest("matmul", B, B)}) == 4


def test_a_digest_of_a_function_on_a_gpu_is_of_its_frame() -> None:
    """What lies on the GPU is not looked at; which function it is, and its arguments here, are in shared memory."""
    nothing: Any = None

    def of(text: bytes) -> bytes:
        block, arena, offset = pool.allocate(len(text))
        block[: len(text)] = text
        there: Any = object()
        asked = request("function")
        asked.places, asked.on_gpu = ((arena, offset, len(text)), (there, 0, 64)), there
        arrays = (None,) * len(OPS["function"].inputs)
        rest = (asked, nothing, arrays, [], [], None, None, False, [], 0, b"", frozenset(), None)
        return Submitted(nothing, nothing, *rest).digest()  # type: ignore[arg-type]

    assert of(b"good") == of(b"good") != of(b"evil")


def test_a_digest_leaves_out_what_the_call_writes() -> None:
    """A cache is another one at each call, so that no poison would be known again."""
    slots = np.zeros(1, np.int64)
    unscaled = None, None
    assert digest("append_kv", A, A, A, A, slots, *unscaled) == digest("append_kv", A, A, B, B, slots, *unscaled)
    assert digest("append_kv", A, A, A, A, slots, *unscaled) != digest("append_kv", A, A, A, A, slots + 1, *unscaled)


def test_the_shortest_time_is_no_time_without_end() -> None:
    """On the wire 0 stands for the broker's own limit."""
    assert [microseconds(seconds) for seconds in (1e-9, 1e-6, 1.5)] == [1, 1, 1_500_000]
    with pytest.raises(InvalidArgument, match="more than 0"):
        microseconds(0)
