"""Which GPU a call's results are on by its option `device`: what a forked child knows of its parent's."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from layerzero.functions import devices
from layerzero.ipc.errors import InvalidArgument


def test_a_forked_child_asks_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses it, and says why; the parent's tensor is none of the child's."""
    is_child = False

    def empty(*_: object, **__: object) -> object:
        if is_child:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return object()

    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, current_device=lambda: 0)
    torch = SimpleNamespace(cuda=cuda, empty=empty, float32="float32", device=lambda *_: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(devices, "describe", lambda made: made)
    before = dict(devices._likes)
    devices._likes.clear()
    try:
        assert devices.like_on("cuda:0") is devices.like_on("cuda")
        pid = os.fork()
        if not pid:
            is_child, ended = True, 1
            try:
                devices.like_on("cuda:0")
            except InvalidArgument as exc:
                ended = 0 if str(exc).startswith("leave device= out") and "forked subprocess" in str(exc) else 2
            finally:
                os._exit(ended)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        devices._likes.clear()
        devices._likes.update(before)
