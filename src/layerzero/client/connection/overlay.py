"""What this process asks of selection beyond the broker's policy. client/facade/policy.py has the calls that set it.

Variables, lz.lock and lz.configure hold for the whole process; lz.prefer and lz.avoid in one thread or asyncio task.
An overlay travels with each route and is part of its key.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec

Layer = Mapping[str, Any]
"""{"origin": who asks, "values": keys of a policy and their values}"""


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """Layers of policy, later ones on top. `text` is equal for equal overlays."""

    layers: tuple[Layer, ...]
    text: str

    @classmethod
    def of(cls, *layers: Layer) -> Overlay:
        """A copy of the layers. Raises InvalidArgument for values that are not plain."""
        try:
            text = json.dumps(layers, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidArgument(
                f"{layers[-1]['origin']}: {exc}; allowed: text, finite numbers, booleans, lists and maps of them"
            ) from exc
        return cls(tuple(json.loads(text)), text)

    def to_wire(self) -> dict[str, Any]:
        return {"layers": list(self.layers)}


@dataclass(frozen=True)
class _Process:
    """What holds for all threads."""

    environment: tuple[Layer, ...] = ()
    locks: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    overlay: Overlay | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        layers = list(self.environment)
        if self.locks:
            layers.append({"origin": "lz.lock", "values": {"locks": dict(self.locks)}})
        if self.settings:
            layers.append({"origin": "lz.configure", "values": dict(self.settings)})
        object.__setattr__(self, "overlay", Overlay.of(*layers) if layers else None)


class Scope:
    """A wish that holds in this thread or task from now until its `with` block ends, or `end()`.

    Entering it again makes it hold again.
    """

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.__enter__()

    def __repr__(self) -> str:
        state = "" if self in _scopes.get() else ", not in force here"
        return f"<lz.Scope of {self.overlay.text}{state}>"

    def __enter__(self) -> Scope:
        active = _scopes.get()
        if self not in active:
            _scopes.set((*active, self))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Let it hold no longer in this thread or task."""
        _scopes.set(tuple(scope for scope in _scopes.get() if scope is not self))


baked: ContextVar[Callable[[Any, tuple[TensorSpec | None, ...], str], Overlay | None] | None] = ContextVar(
    "layerzero_baked", default=None
)
"""What is asked for in this context, by request, specs of its arguments and UUID of its GPU, instead of `current()`:
client/tools/compile.py sets it."""
_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("layerzero_policy", default=())
_process = _Process()
_lock = threading.Lock()  # held for the time of an assignment only


def current() -> Overlay | None:
    """What is asked for here and now; None when nothing is."""
    scopes = _scopes.get()
    return _joined(_process.overlay, scopes) if scopes else _process.overlay


@functools.lru_cache(maxsize=256)
def _joined(base: Overlay | None, scopes: tuple[Scope, ...]) -> Overlay:
    layers = () if base is None else base.layers
    return Overlay.of(*layers, *(layer for scope in scopes for layer in scope.overlay.layers))


@functools.lru_cache(maxsize=4096)
def on_top(base: Overlay | None, more: Overlay) -> Overlay:
    """Both, the layers of `more` last."""
    return more if base is None else Overlay.of(*base.layers, *more.layers)


@functools.lru_cache(maxsize=1024)
def only(kernel_id: str) -> Overlay:
    """No kernel but this one may serve a call; for a call that is pinned to its backend, too."""
    return Overlay.of({"origin": "a call that is measured", "values": {"rules": [{"allow": [kernel_id]}]}})


def change(update: Callable[[_Process], _Process]) -> None:
    """Replace what holds for all threads; other threads see all of it or nothing."""
    global _process
    with _lock:
        _process = update(_process)


def process() -> _Process:
    """What holds for all threads. It is another object after each change: while it is the one that it was before a call
    was looked at, `current` has said the same in that call's thread all the time."""
    return _process


def set_environment(layers: Sequence[Layer]) -> None:
    """The layers of this process's variables (ipc/vocabulary/policy.py)."""
    if tuple(layers) != _process.environment:
        change(lambda old: _Process(tuple(layers), old.locks, old.settings))
