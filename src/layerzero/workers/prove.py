"""A throw-away process that tries lifted calls (ipc/lifting/proof.py), with the driver alone:
`python -m layerzero.workers.prove GPU BROKER_PID` with packed specimens on its stdin, each after its length in 8 bytes,
and a line of JSON for each on its stdout, as soon as its verdict is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import BinaryIO

from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError
from layerzero.ipc.lifting.proof import Verdict, prove_bytes
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT
from layerzero.workers.boot import die_with_parent

LENGTH_BYTES = 8


def main(argv: list[str]) -> int:
    gpu, parent = argv
    die_with_parent(int(parent))
    try:
        context = Context(driver.load(), gpu)
    except (OSError, CudaError) as exc:  # a broker whose container has no GPU, say
        for _ in _read(sys.stdin.buffer):
            _say(Verdict(LiftReason.PROOF_IMPOSSIBLE, str(exc)))
        return 0
    for data in _read(sys.stdin.buffer):
        try:
            _say(prove_bytes(context, data))
        except CudaError as exc:
            _say(Verdict(LiftReason.PROOF_FAULTED, exc.message))
            return STICKY_EXIT
    return 0


def _read(stream: BinaryIO) -> Iterator[bytes]:
    while length := stream.read(LENGTH_BYTES):
        yield stream.read(int.from_bytes(length, "little"))


def _say(verdict: Verdict) -> None:
    reason = "" if verdict.reason is None else verdict.reason.value
    print(json.dumps({"reason": reason, "detail": verdict.detail[:2000]}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
