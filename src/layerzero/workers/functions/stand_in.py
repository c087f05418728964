"""`layerzero` as users' modules find it in a worker: `lz.env`, `lz.isolated` and `as_torch_op` do nothing there, but
that `lift=True` has machine code watched; `lz.Handle` is a name for annotations, what `lz.module` gives cannot be
called, and nothing else is there."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, TypeVar

from layerzero.ipc.errors import ConfigError

T = TypeVar("T")
_CALLERS = ("submit", "explain", "tune", "warmup", "last_report")


class Declared:
    """An environment that is declared in a module which a worker imports."""

    def __init__(self, name: str = "", **_: Any) -> None:
        self.name = name

    def build(self, *_: Any, **__: Any) -> Declared:
        """Nothing: this is a worker of it, or of another one."""
        return self


class _Env:
    def __call__(self, name: str = "", **options: Any) -> Declared:
        return Declared(name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("from_"):
            raise AttributeError(name)
        return lambda *_, **__: Declared()


class Handle:
    """What a caller has of a result that stays here; functions get the result."""


class Elsewhere:
    """What is another environment's, for its callers."""

    def __init__(self, name: str = "", *_: Any, **__: Any) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Elsewhere:
        if name.startswith("_"):
            raise AttributeError(name)
        return Elsewhere(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self._name} of lz.module is called in a worker, where functions run; import it there")


def isolated(*_: Any, **options: Any) -> Any:
    """The function as it is: this is where it runs. Where it may be lifted, its kernels are watched."""
    if options.get("lift") is True:
        from layerzero.workers.functions import watching

        watching.begin()
    return _same


def _same(function: T) -> T:
    if isinstance(function, FunctionType):
        function.as_torch_op = lambda *_, **__: function  # type: ignore[attr-defined]  # a module's top may define ops
        function.implementation = isolated  # type: ignore[attr-defined]
        function.local = function  # type: ignore[attr-defined]  # who calls it here has it right here
        function.options = lambda **_: function  # type: ignore[attr-defined]
        function.map = lambda *items, chunksize=1: map(function, *items)  # type: ignore[attr-defined]
        for name in _CALLERS:
            setattr(function, name, _Callers(f"{function.__qualname__}.{name}"))
    elif isinstance(function, type):
        for name in ("options", "local", *_CALLERS):
            if not hasattr(function, name):  # its own goes before
                setattr(function, name, _OfClass(name))
    return function


class _OfClass:
    """What callers have of a class, and of none of its objects."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, one: Any, owner: type) -> Any:
        if one is not None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        if self._name in _CALLERS:
            return _Callers(f"{owner.__qualname__}.{self._name}")
        return owner if self._name == "local" else lambda **_: owner


class _Callers:
    """What only callers outside of a worker have of a function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        its = self._name.rpartition(".")[0]
        raise RuntimeError(f"{self._name} is for callers outside of workers; here call {its}(...): it runs right here")


def install() -> None:
    """Raises ConfigError in a process that has the real package."""
    package = sys.modules["layerzero"]
    if hasattr(package, "_HOME"):
        raise ConfigError("functions run in a worker of their environment; take their backend out of in-process policy")
    package.env, package.isolated, package.Handle = _Env(), isolated, Handle  # type: ignore[attr-defined]
    package.module = Elsewhere  # type: ignore[attr-defined]
    package.__getattr__ = _missing  # type: ignore[method-assign]


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    there = "lz.env, lz.isolated, lz.module and lz.Handle"
    raise AttributeError(f"layerzero has no {name} in a worker, where functions run; only {there} are there")
