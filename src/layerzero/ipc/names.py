"""What to say of a name that nobody has."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable

MAX_CHARACTERS = 80  # of a name that are repeated in a message; it may come from another process
MAX_LISTED = 24  # known names beside a suggestion; without one all are listed


def unknown_name(kind: str, name: object, known: Iterable[str], *, verb: str = "is called") -> str:
    """The message for a name of this kind that is not among the known ones: "no backend is called 'trch'; did you mean
    'torch'? Known: mlx, torch". For a version of a known one (torch@2.4) it says what builds that."""
    names = tuple(known)
    base, at, _ = str(name)[:MAX_CHARACTERS].partition("@")
    is_version = at and base in names
    hint = f"; build it first: lz env build {str(name)[:MAX_CHARACTERS]}." if is_version else nearest(name, names)
    listed = "" if hint and len(names) > MAX_LISTED else f" Known: {', '.join(names) or 'none'}"
    return f"no {kind} {verb} {name!r:.{MAX_CHARACTERS}}{hint or '.'}{listed}"


def nearest(name: object, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" when a known name is close, else nothing."""
    return _nearest(str(name)[:MAX_CHARACTERS].lower(), tuple(known))


@functools.lru_cache(maxsize=64)  # the search costs as much as the rest of a refusal, and refusals repeat
def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
