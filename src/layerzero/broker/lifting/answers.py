"""What workers say of the calls that they were to lift, checked before anything is made of it; what clients get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from layerzero.broker.io.peers import Peer
from layerzero.broker.lifting.known import Known
from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.lifting.keys import call_key
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.results import has_samples
from layerzero.ipc.lifting.specimen import MAX_BYTES, Specimen
from layerzero.ipc.shm import memory
from layerzero.ipc.transport import control
from layerzero.ipc.transport.messages import LiftedGiven

NO_KERNEL, NO_PAGE = "no kernel serves it at present", "the GPU was not offered to its client yet"
BUSY = frozenset({LiftReason.WORKER_FAILED, LiftReason.PROOF_LATE, LiftReason.TOO_LARGE})  # of the machine, perhaps
# What another try may end in another way: it is not kept.
PASSING = frozenset(
    {
        LiftReason.WORKER_FAILED,
        LiftReason.PROOF_LATE,
        LiftReason.PROOF_IMPOSSIBLE,
        LiftReason.TOO_LARGE,
        LiftReason.NO_CUPTI,
        LiftReason.IMPORT_DAMAGED,
    }
)


def specimen_of(known: Known, data: bytes, *, is_repeatable: bool) -> Specimen:
    """The specimen of the call that its worker was asked for; `is_repeatable` as in messages.Lift. Raises
    ProtocolError."""
    specimen = Specimen.unpack(data)
    lifted = specimen.lifted
    if lifted.kernel_id != known.kernel_id:
        raise ProtocolError(f"it is of {lifted.kernel_id!r:.80}, and {known.kernel_id} was asked for")
    if call_key(lifted, lifted.alignments, known.what) != known.key:
        raise ProtocolError(f"it is of another call of {known.kernel_id} than was asked for")
    if set(specimen.trials) != set(known.seeds):
        raise ProtocolError(f"it was tried with {sorted(specimen.trials)!r:.80}; asked for: {known.seeds}")
    if is_repeatable and has_samples(specimen.trials):
        raise ProtocolError(f"{known.kernel_id} repeats its bytes, by its descriptor, and has numbers to compare")
    return specimen


def reason_of(text: str) -> LiftReason:
    """Raises ProtocolError."""
    try:
        return LiftReason(text)
    except ValueError:
        raise ProtocolError(f"a worker cannot lift for the reason {text!r:.80}, which is none") from None


def bytes_of(fd: int) -> bytes:
    """A packed specimen in a memfd. Raises ProtocolError."""
    nbytes = os.fstat(fd).st_size
    if not 0 < nbytes <= MAX_BYTES:
        raise ProtocolError(f"a specimen of {nbytes} bytes; allowed: {MAX_BYTES}")
    memory.check_memfd(fd, nbytes)
    return os.pread(fd, nbytes, 0)


def refused(reason: LiftReason, detail: str) -> dict[str, Any]:
    """What a client is told whose calls stay in their worker."""
    return {"state": "refused", "reason": reason.value, "detail": detail}


def later(why: str) -> dict[str, Any]:
    """What a client is told that is to ask again after some calls."""
    return {"state": "later", "why": why}


def give(peer: Peer, digest: str, data: bytes) -> None:
    """Hand over what a client has asked for by its digest."""
    fd = memory.create_memfd("layerzero-lifted", len(data))
    try:
        os.pwrite(fd, data, 0)
        control.send(peer.sock, LiftedGiven(digest=digest, nbytes=len(data)), (fd,))
    finally:
        os.close(fd)


def numbers_in(params: Mapping[str, Any]) -> list[int]:
    """Of calls, which a client tells of. Raises InvalidArgument."""
    numbers = params.get("numbers")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise InvalidArgument("lift_fault needs `numbers`, a list of whole numbers")
    return numbers


def is_digest(text: str) -> bool:
    """Whether it can be a digest, by which a client asks."""
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
