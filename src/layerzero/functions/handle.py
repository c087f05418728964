"""lz.Handle: a result that stays in its environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from layerzero.client.gpu.lent import GpuArguments, like_of
from layerzero.functions.calling import Inside
from layerzero.functions.calls import Owner, Wrap
from layerzero.functions.futures import FunctionFuture
from layerzero.functions.held import Hold, Lent, Stay
from layerzero.functions.options import Options, options_of
from layerzero.functions.streams import Stream, iterate
from layerzero.functions.use import Use
from layerzero.ipc.errors import InvalidArgument, RemoteError
from layerzero.ipc.functions import frames


class Handle(Inside):
    """A result that stays in its environment's worker: what a function or a method returns with `keep=True`. It is an
    argument of functions and methods of that environment, which get the result itself.

    It is released by `close()`, when it is collected, and when the program ends; it is lost when its worker ends. It
    belongs to its process: it cannot be copied or pickled.
    """

    __slots__ = ("__weakref__", "_device", "_owner", "_stay", "_type")

    def __init__(self, owner: Owner, hold: Hold, device: str | None = None) -> None:
        """`device`: as of the call whose result it is."""
        self._owner, self._type, self._device = owner, hold.reference.type, device
        self._stay = Stay(f"{owner._label}'s {self._type}", owner._env)
        self._stay.take(hold)

    @property
    def type(self) -> str:
        """The name of the result's type there, such as "torch.Tensor"."""
        return self._type

    def fetch(self) -> Any:
        """The result itself, as the function would have returned it. Raises InvalidArgument where it cannot cross, and
        as a call does."""
        return Use(self._stay, self._owner, frames.ITSELF, "", (), {}, self._plainly).finish()

    def value(self, name: str) -> Any:
        """A public attribute of the result, as it is there. Raises AttributeError, and as `fetch` does."""
        try:
            return Use(self._stay, self._owner, frames.GET, name, (), {}, self._plainly).finish()
        except RemoteError as exc:
            if exc.facts.get("type") == "AttributeError":
                raise AttributeError(str(exc.facts["message"]), name=name) from exc
            raise

    def __getattr__(self, name: str) -> HandleMethod:
        """A public method of the result; whether there is one, its call says."""
        if name.startswith("_"):
            raise AttributeError(f"{self!r} shows no {name}: names with an underscore stay in its environment")
        options = replace(self._owner._options, keep=False, fallback=None, shadow=0.0, device=self._device)
        return HandleMethod(self, name, options)

    def __iter__(self) -> Stream:
        """The items of what can be iterated over there, one by one. Raises as a call does."""
        return iterate(self._stay, self._owner, self._device)

    def close(self) -> None:
        """Let go of the result in the worker; calls that it was given to have it until they end. A second time does
        nothing."""
        self._stay.close(self._timeout_s)

    @property
    def _plainly(self) -> Options:
        """Of what runs nothing."""
        return Options(self._timeout_s, idempotent=True, device=self._device)

    @property
    def _timeout_s(self) -> float | None:
        return self._owner._options.timeout_s

    def _lz_lend(self, backends: Sequence[str]) -> Lent:
        return self._stay.lend_to(backends)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be copied or pickled: its result is in another process")

    def __repr__(self) -> str:
        return f"<lz.Handle of a {self._type} in {self._stay.backend}{', closed' * self._stay.is_closed}>"


class HandleMethod:
    """A method of what a handle stands for: called as ever, or with `submit`."""

    def __init__(self, handle: Handle, name: str, options: Options) -> None:
        self._handle, self._name, self._options = handle, name, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the environment. Raises as a call of a function does."""
        return self._start(args, kwargs).finish()

    def submit(self, *args: Any, **kwargs: Any) -> FunctionFuture:
        """Send a call and return at once. Arguments must not change before it is done."""
        call = self._start(args, kwargs)
        call.send()
        return FunctionFuture(call)

    def options(self, **changes: Any) -> HandleMethod:
        """The same method with other options: timeout_s, idempotent, keep, device. Raises InvalidArgument."""
        options = options_of(replace, self._options, **changes)
        if options.fallback is not None:
            raise InvalidArgument("lz.isolated: fallback is for functions; what a handle stands for is there alone")
        return HandleMethod(self._handle, self._name, options)

    def _start(self, args: Any, kwargs: Any) -> Use:
        handle = self._handle
        wrap = wrap_of(self._options, self._name, is_stream=False)
        return Use(handle._stay, handle._owner, frames.METHOD, self._name, args, kwargs, self._options, wrap)

    def __repr__(self) -> str:
        return f"<method {self._name} of {self._handle!r}>"


def wrap_of(options: Options, label: str, *, is_stream: bool, given: GpuArguments | None = None) -> Wrap | None:
    """What a call gives of a result that stays there; None where none does. `given`: its arrays on a GPU."""
    if options.keep:
        return lambda owner, hold: Handle(owner, hold, options.device)
    if not is_stream:
        return None
    like = like_of(given)
    return lambda owner, hold: Stream(owner, hold, options, label, like)
