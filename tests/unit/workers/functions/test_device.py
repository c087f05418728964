"""The order of streams around a call of a function on a GPU."""

from __future__ import annotations

import sys
import types
from unittest import mock

import pytest

from layerzero.workers.functions.device import LEGACY, Device

STREAM = 5


def waits(device: Device, *, is_idle: bool) -> list[mock._Call]:
    driver = mock.Mock()
    driver.is_stream_idle.return_value = is_idle
    device._contexts[0] = 1
    device.leave(driver, STREAM)
    assert driver.record_event.call_args_list in ([], [mock.call(driver.create_event.return_value, LEGACY)])
    return list(driver.wait_event.call_args_list)


@pytest.mark.parametrize("library", ["cupy", "numba", "pycuda", "cuda"])
def test_streams_that_wait_for_the_default_one_may_be_busy_where_that_is_idle(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    for name in ("cupy", "numba", "pycuda", "cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert waits(Device(), is_idle=True) == []
    assert len(waits(Device(), is_idle=False)) == 1
    monkeypatch.setitem(sys.modules, library, types.ModuleType(library))
    assert len(waits(Device(), is_idle=True)) == 1
