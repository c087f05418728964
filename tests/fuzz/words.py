"""What a client reads that a worker has written: ends of calls on lanes, outcomes, results and sizes, tokens and texts.
A lying worker gives wrong results, never an exception that is not ours, or bytes that are not the call's."""

from __future__ import annotations

import random

from tests.fuzz import values
from tests.fuzz.source import Source, chunk

from layerzero.client.connection.call import error_of
from layerzero.client.connection.express import _outcome
from layerzero.client.connection.report import Candidate
from layerzero.client.planning.tokenizer import read_offsets, read_texts, read_token_ids
from layerzero.ipc.errors import BackendError, LayerZeroError, OutputTooSmall, ProtocolError
from layerzero.ipc.shm import lane
from layerzero.ipc.transport import messages
from layerzero.ipc.transport.messages import Decision, Outcome, encode
from layerzero.ipc.transport.plain import pack_body

TYPED = (ProtocolError,)
_LANE, _FAILED, _DECISION, _TOKENS, _TEXTS = range(5)


def run(data: bytes) -> None:
    source = Source(data)
    kind = source.number(1) % 5
    if kind == _LANE:
        end = _outcome(1, source.number(1) % 3, source.number(8), source.rest())
        if isinstance(end, LayerZeroError):
            pack_body(end.to_wire())
    elif kind == _FAILED:
        error, outcome = error_of(source.rest())
        str(error)
        list(outcome.attempts)
    elif kind == _DECISION:
        messages.decode(source.rest(), Decision)
    else:
        _read_tokens(kind, memoryview(source.chunk()), memoryview(source.rest()))


def _read_tokens(kind: int, splits: memoryview, flat: memoryview) -> None:
    """Buffers have the sizes that the client gave them: whole numbers."""
    splits, flat = splits[: len(splits) // 8 * 8], flat[: len(flat) // 8 * 8]
    if kind == _TEXTS:
        assert sum(len(text.encode()) for text in read_texts(flat, splits)) <= len(flat)
    else:
        assert sum(map(len, read_token_ids(flat, splits))) <= len(flat) // 4
        assert sum(map(len, read_offsets(flat, splits))) <= len(flat) // 8


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    head = 10 if data[:1] == bytes([_LANE]) else 1
    changed = values.mutated(data[head:], rng)
    return None if changed is None else data[:head] + changed


def seeds() -> dict[str, bytes]:
    def numbers(size: int, *given: int) -> bytes:
        return b"".join(number.to_bytes(size, "little", signed=True) for number in given)

    error = BackendError("no", backend="a", exit_code=-11, stderr_tail="x").to_wire()
    small = OutputTooSmall("more", needed=[64, 16]).to_wire()
    candidate = {
        "kernel_id": "a.silu", "backend": "a", "accepted": True, "reasons": [], "score": 1.0, "measured_us": None,
        "terms": {"priority": 50.0}, "transforms": [], "notes": [],
    }  # fmt: skip
    Candidate.from_wire(candidate)
    decision = Decision(
        kernel_id="a.silu", backend="a", worker_pid=1, copies_inputs=False, copies_outputs=False, candidates=[candidate]
    )
    outcome = Outcome(error=small, attempts=[{"backend": "a"}], candidates=[candidate], result=b"r")
    return {
        "lane_ok": bytes([_LANE, lane.OK]) + bytes(8) + pack_body([3, 4]),
        "lane_raised": bytes([_LANE, lane.RAISED]) + bytes(8) + pack_body(error),
        "failed": bytes([_FAILED]) + encode(outcome),
        "decision": bytes([_DECISION]) + encode(decision),
        "tokens": bytes([_TOKENS]) + chunk(numbers(8, 0, 2, 4)) + numbers(4, 5, 6, 7, 8),
        "texts": bytes([_TEXTS]) + chunk(numbers(8, 0, 2, 5)) + "a\u00e9\u20acxy".encode(),
        "falling": bytes([_TEXTS]) + chunk(numbers(8, 0, 5, 2)) + b"abcdefgh",
    }
