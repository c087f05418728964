"""Classes for tests/process/test_objects.py, in a module of their own: workers import it by its file."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layerzero as lz

PLAIN, OTHER = lz.env("plain"), lz.env("other")
_live: weakref.WeakSet[Any] = weakref.WeakSet()


@lz.isolated(PLAIN)
def live() -> int:
    """How many objects there are in the worker."""
    return len(_live)


@lz.isolated(PLAIN)
def pid() -> int:
    return os.getpid()


@lz.isolated(PLAIN)
def counts(*values: Any, **more: Any) -> list[int]:
    """Of objects, in lists and dicts, too."""
    found: list[int] = []
    for value in (*values, *more.values()):
        inner = value.values() if isinstance(value, dict) else value
        found += counts(*inner) if isinstance(value, (dict, list)) else [value.count]
    return found


@lz.isolated(PLAIN)
def opened(path: str, value: Any = None) -> int:
    """The object's count, once someone has opened the pipe."""
    with Path(path).open():
        return -1 if value is None else value.count  # type: ignore[no-any-return]


@lz.isolated(OTHER)
def elsewhere(value: Any) -> None: ...


@lz.isolated(PLAIN, keep=True)
def bag(*items: Any) -> Any:
    """What cannot cross."""
    found = {*items}
    _live.add(kept := Bag(found))
    return kept


class Bag:
    def __init__(self, items: set[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(self.items))


class _Noted:
    """That a generator is there."""


@lz.isolated(PLAIN)
def numbers(end: int, path: str = "", pipe: str = "", fails: Any = None) -> Iterator[Any]:
    """A line for each number that is made, and one when it is closed. Before the second one, the pipe is waited for."""
    here = _Noted()
    _live.add(here)
    try:
        for n in range(end):
            if n == 1 and pipe:
                with Path(pipe).open():
                    pass
            if path:
                note(path, str(n))
            if n == 1 and fails == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            if n == 1 and fails == "hang":
                signal.pause()
            if n == 1 and fails == "error":
                raise LookupError("no more bread")
            yield object() if n == 1 and fails == "item" else n
    finally:
        if path:
            note(path, "closed")
        if fails == "closing":
            raise LookupError("it does not close")
        while fails == "closing hangs":
            signal.pause()


def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@lz.isolated(PLAIN)
def long_texts(*sizes: int) -> Iterator[str]:
    for size in sizes:
        print("made", size)
        yield "x" * size


@lz.isolated(PLAIN)
def items(held: Any) -> list[Any]:
    return sorted(held.items)


@lz.isolated(PLAIN)
def same(value: Any) -> Any:
    return value


@lz.isolated(PLAIN)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Base:
    def __init__(self, start: int = 0, *, path: str = "") -> None:
        if path:
            with Path(path).open("a") as file:
                file.write(f"{start}\n")
        self.count, self._path = start, path
        _live.add(self)

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    def fail(self, text: str) -> None:
        raise LookupError(f"no {text}")

    def pid(self) -> int:
        return os.getpid()

    def dies_once(self, path: str) -> int:
        """Where the file is not there yet."""
        if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.add(10)

    def hang(self) -> None:
        while True:
            signal.pause()

    def up_to(self, end: int, step: int = 1) -> Iterator[int]:
        while self.count < end:
            self.count += step
            yield self.count

    @staticmethod
    def halves(n: int) -> Iterator[float]:
        while n:
            yield n / 2
            n //= 2

    def itself(self) -> Any:
        return self

    def adds(self, other: Any) -> int:
        """What another object counts."""
        self.count += other.count
        return self.count

    @property
    def double(self) -> int:
        return 2 * self.count

    @double.setter
    def double(self, value: int) -> None:
        self.count = value // 2

    @staticmethod
    def joined(*parts: str) -> str:
        return "-".join(parts)

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @classmethod
    def twice(cls, start: int, path: str = "") -> Any:
        """Another constructor."""
        return cls(2 * start, path=path)

    @classmethod
    def once(cls, start: int) -> Any:
        """One that has all of its arguments."""
        return cls(start)


@lz.isolated(PLAIN)
class Counter(Base):
    SIZE = 7


@lz.isolated(PLAIN, on_death="rebuild")
class Rebuilt(Base): ...


@lz.isolated(PLAIN, on_death="rebuild", idempotent=True)
class Repeated(Base): ...


@lz.isolated(PLAIN)
class Table(Base):
    """It has operators."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: str) -> int:
        return self._rows[key]

    def __setitem__(self, key: str, value: int) -> None:
        self._rows[key] = value

    def keys(self) -> Iterator[str]:
        yield from self._rows

    def __call__(self, n: int) -> int:
        return n + len(self._rows)


@lz.isolated(PLAIN)
class Row(Base):
    """It can be iterated over, by numbers."""

    def __getitem__(self, key: int) -> int:
        return range(self.count)[key]


@lz.isolated(PLAIN)
class Steps(Base):
    """Its own iterator."""

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> int:
        if self.count <= 0:
            raise StopIteration
        self.count -= 1
        return self.count


@lz.isolated(PLAIN)
class Session(Base):
    """It notes what its context manager was told."""

    def __init__(self, path: str, *, hides: bool = False) -> None:
        super().__init__()
        self.notes, self.hides = path, hides

    def __enter__(self) -> Session:
        self.count = 100
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        Path(self.notes).write_text(f"exit {kind and kind.__name__} {error}")
        return self.hides


@lz.isolated(PLAIN)
class File(Base):
    """It has a close of its own."""

    def close(self) -> None:
        Path(self._path).write_text("closed")


@lz.isolated(PLAIN)
class Broken:
    def __init__(self) -> None:
        raise ValueError("no such model")
