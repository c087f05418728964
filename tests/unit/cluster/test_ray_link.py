"""Joining a cluster of Ray: what is said where there is none."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.cluster import ray_link
from layerzero.ipc.errors import NotConnected


def tries_for_minutes(**_: Any) -> None:
    """As Ray's own, at an address where its head is gone."""
    pytest.fail("Ray was asked")


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=tries_for_minutes))


@pytest.mark.parametrize("is_named", [True, False])
def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch, is_named: bool) -> None:
    """A cluster that was stopped is left in RAY_ADDRESS."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(NotConnected, match=rf"^no Ray cluster answers at '{address}': .*refused") as refused:
        ray_link.attach(address if is_named else ray_link.AUTO)
    assert "ray start --head" in refused.value.facts["repair"]


def test_an_address_where_somebody_listens_is_rays_affair() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(pytest.fail.Exception, match="Ray was asked"):
        ray_link.attach(f"127.0.0.1:{server.getsockname()[1]}")
