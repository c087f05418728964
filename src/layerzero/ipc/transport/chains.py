"""A chain: calls of one client that one worker runs one after the other, for one message of an express lane.

The client writes the calls into a table in its own memory, once, and a call on the lane with CHAIN in place of a plan
names the table, its digest, and the blocks of memory that differ from run to run (variables). docs/protocol.md, section
12, has the layout; the worker believes nothing of it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.lane import MAX_CALL_BYTES, MAX_WORD_BYTES
from layerzero.ipc.transport.wire import REF_BYTES, Ref, pack_refs, unpack_refs

CHAIN = 0  # in place of a plan's number; those count from 1
DIGEST_BYTES = 16
MAX_STEPS = MAX_WORD_BYTES // 8  # each one's time is told
MAX_TABLE_BYTES = 1 << 16
MAX_VARIABLES = (MAX_CALL_BYTES - DIGEST_BYTES) // REF_BYTES - 1
_STEP = struct.Struct("<QHHI")  # plan, references, bytes of values behind them, 0


class ChainStep(NamedTuple):
    """One call: its plan, its references, and behind them the values of a neighbour's symbols, as a call on the lane
    has them. A reference with flags n > 0 lies in the chain's variable n - 1, its offset is from there; its arena is
    0."""

    plan: int
    refs: tuple[Ref, ...]
    values: bytes = b""


class ChainCall(NamedTuple):
    """What a call on the lane says of its chain."""

    table: Ref
    digest: bytes
    variables: tuple[Ref, ...]


def pack_table(steps: Sequence[ChainStep]) -> bytes:
    """The table of a chain of at most MAX_STEPS steps."""
    parts = []
    for step in steps:
        parts += [_STEP.pack(step.plan, len(step.refs), len(step.values), 0), pack_refs(step.refs), step.values]
    return b"".join(parts)


def unpack_table(table: bytes) -> list[ChainStep]:
    """The steps of a table. Raises ProtocolError for what is none."""
    steps: list[ChainStep] = []
    at = 0
    while at < len(table):
        if len(table) - at < _STEP.size or len(steps) == MAX_STEPS:
            raise ProtocolError(f"a chain's table of {len(table)} bytes ends in step {len(steps)}")
        plan, count, values_bytes, _ = _STEP.unpack_from(table, at)
        at += _STEP.size
        refs = tuple(unpack_refs(table[at : at + count * REF_BYTES], count))
        at += count * REF_BYTES
        values = table[at : at + values_bytes]
        if len(values) < values_bytes:
            raise ProtocolError(f"a chain's table of {len(table)} bytes ends in step {len(steps)}")
        steps.append(ChainStep(plan, refs, values))
        at += values_bytes
    return steps


def digest_of(table: bytes) -> bytes:
    """By which worker and client know that they speak of the same table."""
    return hashlib.blake2b(table, digest_size=DIGEST_BYTES).digest()


def pack_chain_call(table: Ref, digest: bytes, variables: Sequence[Ref] = ()) -> bytes:
    """The body of a call on the lane; at most MAX_VARIABLES."""
    return pack_refs([table]) + digest + pack_refs(variables)


def unpack_chain_call(body: bytes) -> ChainCall:
    """As `pack_chain_call` was given. Raises ProtocolError."""
    count, rest = divmod(len(body) - DIGEST_BYTES, REF_BYTES)
    if rest or count < 1:
        raise ProtocolError(f"a chain's call has {len(body)} bytes")
    digest = body[REF_BYTES : REF_BYTES + DIGEST_BYTES]
    variables = unpack_refs(body[REF_BYTES + DIGEST_BYTES :], count - 1)
    return ChainCall(unpack_refs(body, 1)[0], digest, tuple(variables))


def pack_times(times: Sequence[int]) -> bytes:
    """How many ns each step took, as a worker says it behind the end of a chain."""
    return struct.pack(f"<{len(times)}Q", *times)


def unpack_times(said: bytes) -> tuple[int, ...]:
    """As many as there are whole."""
    return struct.unpack_from(f"<{len(said) // 8}Q", said)


def resolve(step: ChainStep, variables: Sequence[Ref]) -> bytes:
    """The body that the step would have as a call of its own. Raises ProtocolError for a reference that is not inside
    its variable."""
    return pack_refs([_placed(ref, variables) for ref in step.refs]) + step.values


def _placed(ref: Ref, variables: Sequence[Ref]) -> Ref:
    if not ref.flags:
        return ref
    if ref.flags > len(variables):
        raise ProtocolError(f"a chain has {len(variables)} variables, and names number {ref.flags}")
    home = variables[ref.flags - 1]
    if ref.offset + ref.nbytes > home.nbytes or home.offset + home.nbytes >= 1 << 64:
        raise ProtocolError(f"bytes {ref.offset}+{ref.nbytes} are outside a variable of {home.nbytes}")
    return Ref(home.arena, 0, home.offset + ref.offset, ref.nbytes)
