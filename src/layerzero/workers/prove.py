"""A throw-away process that tries lifted calls (ipc/lifting/proof.py), with the driver alone:
`python -m layerzero.workers.prove GPU BROKER_PID FD`. For each line on its stdin there is a packed specimen of so many
bytes in the file FD, and it says a line of JSON on its stdout (broker/processes/prover.py)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError
from layerzero.ipc.lifting.gpu_digest import GpuDigest
from layerzero.ipc.lifting.proof import Verdict, prove_bytes
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT
from layerzero.workers.boot import die_with_parent


def main(argv: list[str]) -> int:
    gpu, parent, fd = argv
    die_with_parent(int(parent))
    try:
        context = Context(driver.load(), gpu)
    except (OSError, CudaError) as exc:  # a broker whose container has no GPU, say
        for _ in _read(int(fd)):
            _say(Verdict(LiftReason.PROOF_IMPOSSIBLE, str(exc)))
        return 0
    digests = GpuDigest(context.driver)
    for data in _read(int(fd)):
        try:
            _say(prove_bytes(context, data, digests))
        except CudaError as exc:
            _say(Verdict(LiftReason.PROOF_FAULTED, exc.message))
            return STICKY_EXIT
    return 0


def _read(fd: int) -> Iterator[bytes]:
    for line in sys.stdin.buffer:
        yield os.pread(fd, int(line), 0)


def _say(verdict: Verdict) -> None:
    reason = "" if verdict.reason is None else verdict.reason.value
    print(json.dumps({"reason": reason, "detail": verdict.detail[:2000]}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
