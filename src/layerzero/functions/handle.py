"""lz.Handle: a result that stays in its environment. And calls of what is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.functions.calling import Arguments, Inside
from layerzero.functions.calls import Call, Options, Owner, Wrap
from layerzero.functions.held import Hold, Lent, Stay
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame


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
    ) -> None:
        given = Arguments(args, kwargs, owner._env.backend)
        label = f"{stay.label}.{name}" if name else stay.label
        super().__init__(owner, given, args, kwargs, options, label, wrap)
        self._how, self._name = how, name
        self._stay: Stay | None = stay

    def _frame(self, given: Arguments) -> Frame:
        if self._how == frames.SET:
            given.note_kept("an object may keep what it is given")
        assert self._loan is not None
        return given.frame(frames.USE, self._loan.reference.place, self._how, self._name, stays=self._stays)

    def _request(self) -> Any:
        assert self._stay is not None
        self._loan = self._stay.lend()
        return super()._request()

    def _note(self, served_by: str) -> None:
        super()._note(served_by)
        self._stay = None  # the report of a call keeps no object alive


class Handle(Inside):
    """A result that stays in its environment's worker: what a function or a method returns with `keep=True`. It is an
    argument of functions and methods of that environment, which get the result itself.

    It is released by `close()`, when it is collected, and when the program ends; it is lost when its worker ends. It
    belongs to its process: it cannot be copied or pickled.
    """

    __slots__ = ("__weakref__", "_owner", "_stay", "_type")

    def __init__(self, owner: Owner, hold: Hold) -> None:
        self._owner, self._type = owner, hold.reference.type
        self._stay = Stay(f"{owner._label}'s {self._type}", owner._env)
        self._stay.take(hold)

    @property
    def type(self) -> str:
        """The name of the result's type there, such as "torch.Tensor"."""
        return self._type

    def fetch(self) -> Any:
        """The result itself, as the function would have returned it. Raises InvalidArgument where it cannot cross, and
        as a call does."""
        options = replace(_plain, timeout_s=self._timeout_s)
        return Use(self._stay, self._owner, frames.ITSELF, "", (), {}, options).finish()

    def close(self) -> None:
        """Let go of the result in the worker; calls that it was given to have it until they end. A second time does
        nothing."""
        self._stay.close(self._timeout_s)

    @property
    def _timeout_s(self) -> float | None:
        return self._owner._options.timeout_s

    def _lz_lend(self, backend: str) -> Lent:
        return self._stay.lend_to(backend)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be copied or pickled: its result is in another process")

    def __repr__(self) -> str:
        return f"<lz.Handle of a {self._type} in {self._owner._env.backend}{', closed' * self._stay.is_closed}>"


_plain = Options(idempotent=True)  # nothing runs
