"""Calls of objects that are in an environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerzero.client.capsules.of_function import CALL, GET, ITSELF, METHOD, SET
from layerzero.client.connection.call import Request
from layerzero.client.session.session import Session
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Call, Owner, Wrap
from layerzero.functions.capsules import Asked
from layerzero.functions.held import Lent, Stay
from layerzero.functions.options import Options
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame

_KINDS = {frames.METHOD: METHOD, frames.GET: GET, frames.SET: SET, frames.ITSELF: ITSELF}


class Use(Call):
    """A call of an object. Raises InvalidArgument once that is closed."""

    def __init__(
        self,
        stay: Stay,
        owner: Owner,
        how: int,
        name: str,
        args: Any,
        kwargs: Any,
        options: Options,
        wrap: Wrap | None = None,
        libraries: tuple[str, str] = ("", ""),
        session: Session | None = None,
        loan: Lent | None = None,
        given: Arguments | None = None,
    ) -> None:
        """`libraries`: of arrays there and of those of the result here; each its own when empty. `session`, `loan`: of
        one that was sent already. `given`: the arguments, where they were encoded."""
        if given is None:
            backends = (stay.backend if loan is None else loan.backend,)
            given = Arguments(args, kwargs, backends, libraries[0], options.device)
        label = f"{stay.label}.{name}" if name else stay.label
        super().__init__(owner, given, args, kwargs, options, label, wrap, session=session)
        self._loan = loan
        self._how, self._name = how, name
        self._stay: Stay | None = stay
        self._library = libraries[1]

    def _frame(self, given: Arguments) -> Frame:
        if self._how == frames.SET:
            given.note_kept("an object may keep what it is given")
        assert self._loan is not None
        return given.frame(frames.USE, self._loan.reference.place, self._how, self._name, stays=self._stays)

    def _asked(self) -> tuple[Sequence[Asked], str]:
        assert self.given is not None
        own = Asked(_KINDS[self._how], self._name, self._stays, self.given)
        maker = None if self._stay is None else self._stay.maker
        if maker is None:
            return [own], 'what made its object is not kept; on_death="rebuild" keeps it'
        owner, args, kwargs = maker
        if owner is not self.owner:
            return [own], "its object was made by a method of its class"
        try:
            made = Arguments(args, kwargs, owner._places.backends, device=owner._options.device)
        except InvalidArgument as exc:  # an object among them is closed by now
            return [own], f"what made its object cannot cross any more: {exc.message}"
        return [Asked(CALL, "", frames.ALL, made), own], ""

    def _request(self) -> Request:
        assert self._stay is not None
        assert self.given is not None
        loan = self._loan = self._stay.lend()
        if loan.backend not in self.given.backends:  # constructed again in another worker
            its = ((loan.backend,), self.given.library, self.options.device)
            self.given = Arguments(self.args, self.kwargs, *its)
        return super()._request()

    def _backends(self, given: Arguments) -> Sequence[str]:
        assert self._stay is not None
        return (self._stay.backend,)

    def _note(self, served_by: str, value: Any = None) -> None:
        super()._note(served_by, value)
        self._stay = None  # the report of a call keeps no object alive
