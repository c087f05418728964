"""Why a kernel cannot be lifted, on its way to the broker."""

from __future__ import annotations

from layerzero.ipc.lifting.reasons import LiftReason


class CannotLift(Exception):
    def __init__(self, reason: LiftReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason, self.detail = reason, detail
