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


SILU = TensorSpec.contiguous("float32", (4,))


def test_a_route_counts_as_told_once_it_was_sent() -> None:
    """Another thread that saw it told too early would call on what the broker does not know, and be dropped."""
    ours, link = routes.Routes(Mock(), Mock()), Mock()
    route = routes.Route(7, Plan("silu", (SILU,), {}, (SILU,), (SILU,)))
    link.send.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        ours.tell(link, route)
    link.send.side_effect = lambda frame: route.is_told and pytest.fail("told before it was sent")
    ours.tell(link, route, near=3)
    assert route.is_told
    header = wire.unpack(link.send.call_args.args[0])
    assert (header.kind, header.route, header.aux) == (Kind.ROUTE, 7, 3)
