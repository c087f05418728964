"""Methods of objects on the express lane: a call like the last one takes none of the steps that settled it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from layerzero.client.session.session import Session
from layerzero.functions.calls import Call, Owner
from layerzero.functions.express import Express
from layerzero.functions.held import Hold, Lent, Stay
from layerzero.functions.use import Use
from layerzero.ipc.functions import frames
from layerzero.ipc.transport.plain import pack_tree


class Borrowed(NamedTuple):
    """What a call has of an object until it has ended."""

    stay: Stay
    loan: Lent


class MethodExpress(Express):
    """Of one method of one object, in the worker that it was in at first. It keeps neither."""

    def __init__(self, owner: Owner, counts: range, name: str, label: str, hold: Hold) -> None:
        super().__init__(owner, counts, label, (hold.backend,))
        self._name, self._reference = name, hold.reference

    def is_of(self, hold: Hold) -> bool:
        """Whether this is the object that it is of: another one takes its place once it was lost."""
        return hold.reference is self._reference

    def head(self) -> bytes:
        """As Express."""
        name = pack_tree(frames.METHOD) + pack_tree(self._name)
        return b"\x97" + pack_tree(frames.USE) + pack_tree(self._reference.place) + name

    def call(self, args: Sequence[Any], session: Session, loan: Any) -> Call:
        """As Express."""
        stay, lent = loan
        owner = self.owner
        return Use(stay, owner, frames.METHOD, self._name, args, {}, owner._options, session=session, loan=lent)
