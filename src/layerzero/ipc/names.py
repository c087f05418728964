"""What to say of a name that nobody has."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable

MAX_CHARACTERS = 80  # of a name that are repeated in a message; it may come from another process
MAX_LISTED = 24  # known names beside a suggestion; without one all are listed
_BUILT = ("backend", "environment")  # what has versions
_RELEASE = re.compile(r"\d+(\.\d+)*")


def unknown_name(kind: str, name: object, known: Iterable[str], *, verb: str = "is called") -> str:
    """The message for a name of this kind that is not among the known ones: "no backend is called 'trch'; did you mean
    'torch'? Known: mlx, torch". For a release of a known one (torch@2.4) it begins with what builds that."""
    names, shown = tuple(known), str(name)[:MAX_CHARACTERS]
    base, _, release = shown.partition("@")
    first, hint = "", ""
    if kind in _BUILT and base in names and _RELEASE.fullmatch(release):
        others = [one for one in names if one.startswith(f"{base}@")]
        first = f"build it first: lz env build {shown}{', or take ' * bool(others)}{', '.join(others)}; "
    else:
        hint = nearest(name, names)
    listed = "" if (first or hint) and len(names) > MAX_LISTED else f" Known: {', '.join(names) or 'none'}"
    return f"{first}no {kind} {verb} {name!r:.{MAX_CHARACTERS}}{hint or '.'}{listed}"


def nearest(name: object, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" when a known name is close, else nothing."""
    return _nearest(str(name)[:MAX_CHARACTERS].lower(), tuple(known))


@functools.lru_cache(maxsize=64)  # the search costs as much as the rest of a refusal, and refusals repeat
def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
