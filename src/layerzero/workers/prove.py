"""A throw-away process that tries a lifted call (ipc/lifting/proof.py), with the driver alone:
`python -m layerzero.workers.prove GPU BROKER_PID` with a packed specimen on its stdin and a verdict on its stdout."""

from __future__ import annotations

import json
import sys

from layerzero.ipc.cuda import driver
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError
from layerzero.ipc.lifting.proof import Verdict, prove_bytes
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.workers.boot import die_with_parent


def main(argv: list[str]) -> int:
    gpu, parent = argv
    die_with_parent(int(parent))
    data = sys.stdin.buffer.read()
    try:
        context = Context(driver.load(), gpu)
    except (OSError, CudaError) as exc:  # a broker whose container has no GPU, say
        verdict = Verdict(LiftReason.PROOF_IMPOSSIBLE, str(exc))
    else:
        verdict = prove_bytes(context, data)
    reason = "" if verdict.reason is None else verdict.reason.value
    print(json.dumps({"reason": reason, "detail": verdict.detail[:2000]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
