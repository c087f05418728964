"""What a rank's end costs those who are told of it; without a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from layerzero.groups.nccl import Nccl, wait_for_ends

PATIENCE_S = 60.0


class Slow:
    """A process group whose abort lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.has_ended = threading.Event(), threading.Event(), False

    def abort(self) -> None:
        self.begun.set()
        self.has_ended = self.may_end.wait(PATIENCE_S)


def test_nobody_waits_for_the_abort_but_the_next_nccl(tmp_path: Path) -> None:
    """It takes NCCL a second, and the error is to be told in less."""
    made: Any = Nccl(tmp_path, "tp", 1, 0, 0)
    slow = made._group = Slow()
    made.drop()
    assert slow.begun.wait(PATIENCE_S)
    assert not slow.has_ended
    waiting = threading.Thread(target=wait_for_ends)
    waiting.start()
    assert waiting.is_alive()
    slow.may_end.set()
    waiting.join(PATIENCE_S)
    assert slow.has_ended
    made.drop()  # a second time does nothing
    wait_for_ends()
