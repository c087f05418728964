"""Warnings of functions in environments of their own: raised here again, for this program's filters to decide about."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from layerzero.ipc.errors import ProtocolError

MAX_NAME, MAX_BASES = 200, 16  # of a category
MAX_CATEGORIES = 256  # that are made here
MAX_FILES, MAX_SEEN = 256, 4096  # files that warnings are about, and warnings of one, that Python is to know as shown
_OURS = f"{Path(__file__).parents[1]}/"  # files of which no warning is
_made: dict[tuple[str, ...], type[Warning]] = {}
_seen: dict[str, dict[Any, Any]] = {}


class Warned(NamedTuple):
    """A warning of a worker. `category`: its class and those that it is derived from, `module.name` of each; `file`,
    `line`, `module`: of the code that it is about. Without a file that is the call here, or the `line`-th caller from
    there."""

    category: tuple[str, ...]
    text: str
    file: str
    line: int
    module: str

    @classmethod
    def from_tree(cls, tree: list[Any]) -> Warned:
        """Of what a worker has said. Raises ProtocolError."""
        match tree:
            case [list(names), str(text), str(file), int(line), str(module)] if 0 < len(names) <= MAX_BASES:
                if all(type(name) is str and len(name) <= MAX_NAME for name in names):
                    return cls(tuple(names), text, file, line, module)
        raise ProtocolError(f"{tree!r:.100} is no warning")

    def issue(self, label: str) -> None:
        """Warn, by the rules of this program: with an `error` filter it raises. `label`: the function and its
        environment, which stand behind the text, so that filters by message match as ever."""
        one = _made_of(self.category, f"{self.text} [{label}]")
        if not self.file:
            _warn_of(one, _caller(self.line))
            return
        shown = _seen.setdefault(self.file, {})
        if len(_seen) > MAX_FILES or len(shown) > MAX_SEEN:
            _seen.clear()
        module = self.module or self.file.removesuffix(".py") or "<unknown>"  # as Python has it; None would be silent
        warnings.warn_explicit(one, type(one), self.file, self.line, module, shown)


def _caller(number: int) -> FrameType:
    """The code that has called ours, or the code that is so many callers further out."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    while frame.f_back is not None and number > 0:
        frame, number = frame.f_back, number - 1
    return frame


def _warn_of(one: Warning, frame: FrameType) -> None:
    """As warnings.warn does with a stacklevel that leads to this frame."""
    names = frame.f_globals
    shown = names.setdefault("__warningregistry__", {})
    module = names.get("__name__") or "<string>"
    warnings.warn_explicit(one, type(one), frame.f_code.co_filename, frame.f_lineno, module, shown)


def _made_of(names: tuple[str, ...], text: str) -> Warning:
    """Of the class with this name where this process has it, else of one that is called so, derived from the nearest
    base that it has. Nothing is imported for it."""
    known = [one for one in map(_known, names) if one is not None] or [Warning]
    module, _, name = names[0].rpartition(".")
    if _known(names[0]) is None and name.isidentifier():
        if names not in _made and len(_made) < MAX_CATEGORIES:
            _made[names] = type(name, (known[0],), {"__module__": module})
        known.insert(0, _made.get(names, known[0]))
    for category in known:
        try:
            return category(text)
        except TypeError:  # it is constructed from something else
            continue
    return Warning(text)


def _known(name: str) -> type[Warning] | None:
    module, _, name = name.rpartition(".")
    found = getattr(sys.modules.get(module), "__dict__", {}).get(name)
    return found if isinstance(found, type) and issubclass(found, Warning) else None
