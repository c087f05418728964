"""Calls with new extents that need no word of the broker: neighbours of a lease (ipc/vocabulary/neighbours.py)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import replace

from layerzero.client.connection.call import Route
from layerzero.client.planning.plans import Plan
from layerzero.ipc.vocabulary.neighbours import pack_values

MAX_KINDS = 1024
MAX_BASES = 4  # leased routes kept for each kind
NOTE = "decided for a call with other extents, which is ranked as this one"


def kind_of(plan: Plan, backend: str | None, overlay: str) -> Hashable:
    """What a call has in common with its neighbours, of those that are made on the CPU."""
    attrs = tuple((name, type(value), value) for name, value in plan.attrs.items())
    tensors = tuple(
        None if one is None else (one.dtype, *[(extent - 1).bit_length() if extent else -1 for extent in one.shape])
        for one in (*plan.inputs, *plan.outputs)
    )  # neighbours are measured as one: their extents are in the same powers of two
    return plan.op, attrs, tensors, backend, overlay


class Neighbours:
    """The leased routes of one connection that have neighbours. Threads may share it."""

    def __init__(self) -> None:
        self._bases: OrderedDict[Hashable, deque[Route]] = OrderedDict()

    def note(self, route: Route) -> None:
        """It has a lease with neighbours."""
        bases = self._bases.setdefault(route.kind, deque(maxlen=MAX_BASES))
        if route not in bases:
            bases.appendleft(route)
        if len(self._bases) > MAX_KINDS:
            self._bases.popitem(last=False)

    def lend(self, route: Route) -> bool:
        """Give a route that the broker does not know the lease of one that it is a neighbour of. Whether there is
        one."""
        specs = (*route.plan.inputs, *route.plan.outputs)
        for base in list(self._bases.get(route.kind, ())):
            lease = base.lease
            if lease is None or lease.neighbours is None:
                continue
            values = lease.neighbours.values(specs)
            if lease.neighbours.apply((*base.plan.inputs, *base.plan.outputs), values) == specs:
                route.near = base
                note = f"{NOTE}; {lease.note}" if lease.note else NOTE
                route.lease = replace(lease, values=pack_values(values), neighbours=None, note=note)
                return True
        return False
