"""workers/functions/objects.py: how many objects there are, and what may be done with one."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code
from layerzero.workers.functions.objects import MAX_OBJECTS, Held, Objects, demand_use

CODE = Code("shop", "Cart", "/srv/shop.py", "0" * 64, "/srv", is_main=False)


def test_a_client_has_so_many_whatever_others_have() -> None:
    objects = Objects("plain")
    references = [objects.add(1, Held(n, CODE)) for n in range(MAX_OBJECTS)]
    with pytest.raises(InvalidArgument, match="1,024 objects of this program"):
        objects.demand_room(1)
    objects.demand_room(2)
    objects.release(2, references[0])
    objects.release(1, references[3])
    objects.demand_room(1)
    assert objects.find(1, references[3]) is None
    assert objects.find(1, references[0]) == Held(0, CODE)


@pytest.mark.parametrize("reference", [None, [1], [1, 2, 3], ["a", 1], [True, 1], 7])
def test_what_is_no_reference_is_said_to_be_none(reference: Any) -> None:
    with pytest.raises(ProtocolError, match="no reference"):
        Objects("plain").find(1, reference)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (frames.METHOD, "_hidden"),
        (frames.METHOD, "__class__"),
        (frames.METHOD, "__init__"),
        (frames.GET, "__dict__"),
        (frames.GET, "__call__"),
        (frames.SET, "_hidden"),
        (frames.SET, "shown"),  # to nothing
        (4, "shown"),
        (frames.ITSELF, "_hidden"),
    ],
)
def test_what_is_private_or_no_use_is_refused(how: int, name: str) -> None:
    with pytest.raises(ProtocolError):
        demand_use(how, name, 0)
