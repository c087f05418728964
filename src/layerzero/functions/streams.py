"""Results one by one: of generators, and of what can be iterated over in an environment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layerzero.client.arrays.recognition import Array
from layerzero.client.gpu.arrays import device_name
from layerzero.client.gpu.lent import GpuArguments, GpuLoan, like_of
from layerzero.client.gpu.lent_calls import lend
from layerzero.client.session.session import Session
from layerzero.functions.calling import Arguments, ObjectLost
from layerzero.functions.calls import Call, Owner
from layerzero.functions.express import Begun, Express, Given
from layerzero.functions.held import Hold, Stay
from layerzero.functions.options import Options
from layerzero.functions.ranges import MAX_LENT
from layerzero.functions.use import Use
from layerzero.ipc.errors import BackendError, InvalidArgument, LayerZeroError, RemoteError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame, Reference
from layerzero.ipc.transport.plain import pack_tree

_root_logger = logging.getLogger()


class Stream:
    """An iterator whose items are made in an environment, one ahead of what was taken; with arrays on a GPU when they
    are taken, since the taker's stream waits for them. `async for` has them, too.

    `timeout_s` of its function or method holds for each item. It is closed there by `close()`, when it ends or raises,
    when it is collected, and when the program ends. Threads may share it.
    """

    def __init__(self, owner: Owner, hold: Hold, options: Options, label: str, like: Array | None = None) -> None:
        """`like`: an array as those on a GPU that it was begun with."""
        self._owner, self._label, self._like = owner, label, like
        self._options = replace(options, idempotent=False, fallback=None, keep=False, shadow=0.0)
        self._stay = Stay(label, owner._env)
        self._stay.take(hold)
        self._lock = threading.Lock()
        self._ahead: _Next | Begun | None = None
        may_pass = self._options.timeout_s == owner._options.timeout_s and like is None
        self._express = ItemExpress(owner, hold, self._options, label) if may_pass else None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """The next item. Raises as a call of a function does; it has ended then."""
        found = self._take()
        if not found:
            raise StopIteration
        return found[0]

    def send(self, _: Any) -> Any:
        """Raises InvalidArgument: items are made ahead, before anything could be sent to them."""
        raise InvalidArgument(f"{self._label}: a stream takes nothing; use an object of a class, and call its methods")

    def throw(self, *_: Any) -> Any:
        """Raises InvalidArgument, as `send`."""
        raise InvalidArgument(f"{self._label}: nothing is raised in a stream from here; close() it")

    asend, athrow = send, throw

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        """As `next`, in a thread."""
        found = await asyncio.to_thread(self._take)
        if not found:
            raise StopAsyncIteration
        return found[0]

    def close(self) -> None:
        """Close it there: its `finally` and `with` blocks run, after the item that it is at. A second time does
        nothing."""
        self._ahead = None
        self._stay.close(self._options.timeout_s)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> list[Any]:
        """The next item in a list; an empty one at the end."""
        with self._lock:
            if self._stay.is_closed:
                return []
            try:
                call = self._ahead or self._next()
                found = call.finish()
                if not (isinstance(found, list) and len(found) <= 1):
                    text = f"{self._label}: its worker's answer is no item: {found!r:.100}"
                    raise BackendError(text, backend=self._stay.backend)
            except BaseException as exc:
                if self._stay.is_closed and isinstance(exc, (ObjectLost, InvalidArgument)):
                    return []  # another thread has closed it meanwhile
                if isinstance(exc, ObjectLost):  # whatever its function or its class says of objects
                    where = self._owner._places.env_of(self._stay.backend).name
                    said = f"{self._label} in {where}: begin it anew: the worker that it ran in has ended, or this"
                    exc.message = f"{said} process has connected anew or was forked; no stream is made again by itself"
                    exc.args = (exc.message,)
                is_gone = isinstance(exc, (RemoteError, ObjectLost))
                (self._stay.lose if is_gone else self._stay.drop)()
                raise
            finally:
                self._ahead = None
            if not found:
                self._stay.lose()
            elif not self._stay.is_closed and self._like is None:  # its taker's stream would wait for it, too
                with contextlib.suppress(LayerZeroError):  # the next one's error, which is raised in its turn
                    self._ahead = None if self._express is None else self._express.begin(())
                    if self._ahead is None:
                        self._ahead = following = self._next()
                        following.send()
            return found

    def _next(self) -> _Next:
        lent = self._stay.lend()  # and no loan of it: it may be released while the item is made
        return _Next(self._owner, lent.backend, lent.reference, self._options, self._label, like=self._like)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be copied or pickled: its items are made in another process")

    def __repr__(self) -> str:
        closed = ", closed" if self._stay.is_closed else ""
        return f"<lz stream of {self._label} in {self._stay.backend}{closed}>"


def iterate(stay: Stay, owner: Owner, device: str | None) -> Stream:
    """Over an object that is there; `device`: of its items. Raises as a call does."""

    given = Arguments((), {}, (stay.backend,), device=device)
    like, options = like_of(given.on_gpu), replace(owner._options, fallback=None, shadow=0.0, device=device)

    def begun(_: Owner, hold: Hold) -> Stream:
        return Stream(owner, hold, options, stay.label, like)

    found: Stream = Use(stay, owner, frames.METHOD, "__iter__", (), {}, options, begun, given=given).finish()
    return found


class _Next(Call):
    def __init__(
        self,
        owner: Owner,
        backend: str,
        reference: Reference,
        options: Options,
        label: str,
        session: Session | None = None,
        like: Array | None = None,
    ) -> None:
        given = Arguments((), {}, (backend,))
        given.device = "" if like is None or options.device is None else device_name(like.device)
        super().__init__(owner, given, (), {}, options, label, session=session)
        self._reference, self._like = reference, like

    def _lent_there(self, given: Arguments) -> GpuLoan | None:
        """Memory for an item as the last one was; the present stream is what it is made in."""
        if self._like is None:
            return None
        return lend(self._session.gpus, GpuArguments(self._like), range(MAX_LENT), self._results_there())

    def _frame(self, given: Arguments) -> Frame:
        asked = [frames.NEXT, self._reference.place, _root_logger.level]
        return Frame(asked if given.loan is None else [frames.GPU, asked, given.loan.outs, False])

    def _asked(self) -> None:
        """The next item of what runs there: nothing that could be begun from here."""


class ItemExpress(Express):
    """Of the items of one stream, on the express lane. It keeps no object."""

    def __init__(self, owner: Owner, hold: Hold, options: Options, label: str) -> None:
        super().__init__(owner, range(1), label, (hold.backend,))
        self._options, self._reference = options, hold.reference
        self._device = None  # of a stream whose items are on none, whatever its class says

    def head(self) -> bytes:
        """As Express."""
        return b"\x93" + pack_tree(frames.NEXT) + pack_tree(self._reference.place)

    def arguments(self, session: Session, args: tuple[Any, ...]) -> Given:
        """As Express: there are none."""
        return _NO_TREE

    def tail(self, level: int) -> bytes:
        """As Express."""
        return pack_tree(level)

    def call(self, args: Sequence[Any], session: Session, loan: Any) -> Call:
        """As Express."""
        return _Next(self.owner, self._backends[0], self._reference, self._options, self._label, session)


_NO_TREE = Given(b"", b"", 0, 0)
