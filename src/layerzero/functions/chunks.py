"""Calls that cross as one: a chunk of the items of a map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from layerzero.client.capsules.of_function import MANY
from layerzero.functions.calling import Arguments
from layerzero.functions.calls import Call, Owner
from layerzero.functions.capsules import Asked
from layerzero.functions.options import Options
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Frame

MAX_SIZE = 65_536
Results: TypeAlias = "tuple[list[Any], LayerZeroError | None]"


class ChunkCall(Call):
    """One message for a call with each tuple of arguments. Its result: those of the calls, up to the first that failed,
    and the error of that. It has the time of so many calls."""

    def __init__(self, owner: Owner, items: Sequence[tuple[Any, ...]], options: Options) -> None:
        """Raises InvalidArgument."""
        given = Arguments(items, {}, owner._places.backends)
        if given.on_gpu is not None:
            raise InvalidArgument(f"{owner._label}.map: leave chunksize out: arrays on a GPU cross call by call")
        super().__init__(owner, given, items, {}, options, f"{owner._label} ({len(items)} calls as one)")

    def _frame(self, given: Arguments) -> Frame:
        return given.frame(frames.MANY, self.owner._places.tree(given.backends))

    def _asked(self) -> tuple[Sequence[Asked], str]:
        assert self.given is not None
        return [Asked(MANY, "", frames.NOTHING, self.given)], ""

    def _timeout_s(self) -> float:
        one_s = self.options.timeout_s
        return len(self.args) * (self._session.link.welcome.timeout_s if one_s is None else one_s)

    def _value_of(self, fallback: Callable[..., Any]) -> Results:
        return [fallback(*args) for args in self.args], None


def demand_size(size: object, label: str, options: Options, *, is_plain: bool) -> int:
    """How many items cross as one. `is_plain`: neither a generator nor a coroutine function. Raises
    InvalidArgument."""
    if type(size) is not int or not 1 <= size <= MAX_SIZE:
        raise InvalidArgument(f"{label}.map: chunksize is {size!r:.40}; allowed: 1 to {MAX_SIZE:,}")
    if size > 1 and (not is_plain or options.keep or options.shapes is not None or options.shadow):
        text = "allowed: 1 for generators and coroutine functions, and with keep, shapes or shadow"
        raise InvalidArgument(f"{label}.map: chunksize is {size}; {text}")
    return size
