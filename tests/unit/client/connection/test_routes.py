"""client/connection/routes.py: the broker hears of routes that nobody can call on any more."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from layerzero.client.connection import routes
from layerzero.client.planning.plans import Plan
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.vocabulary.tensors import TensorSpec


def test_a_route_is_forgotten_at_the_broker_once_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep one for every shape that a program ever had; but not one that a call in flight holds."""
    monkeypatch.setattr(routes, "MAX_ROUTES", 1)
    ours, link = routes.Routes(Mock(), Mock()), Mock()

    def define(size: int) -> routes.Route:
        spec = TensorSpec.contiguous("float32", (size,))
        return ours.define(link, (size,), Plan("silu", (spec,), {}, (spec,), (spec,)), None)

    held = define(1)
    define(2)  # the first is known no more, and held
    del held
    define(3)
    told = [wire.unpack(sent.args[0]) for sent in link.send.call_args_list]
    assert [header.route for header in told if header.kind == Kind.FORGET] == [1, 2]
    assert [header.route for header in told if header.kind == Kind.ROUTE] == [1, 2, 3]
