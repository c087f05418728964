"""Why an environment of functions cannot be the caller's own: what of it does not hold in this process."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from layerzero.envs.build.base import Distribution

WIDTHS = (24, 22, 30)  # of the table's columns, with two blanks between: 80


class Conflict(NamedTuple):
    """`requirement`: what the environment asks for. `here`: what is installed in this process in its place. `needs`:
    what would have to be here, and who refuses that."""

    requirement: str
    here: str
    needs: str


class Conflicts(tuple[Conflict, ...]):
    """None where all holds here. As text: a table of 80 columns."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "no conflict: its requirements hold in this process"
        head = Conflict("requirement", "here", "it would need")
        return "\n".join(line for row in (head, *self) for line in _lines(row))

    __repr__ = __str__


def here(name: str) -> Distribution | None:
    """What is installed in this process, by a canonical name."""
    from layerzero.envs.build.base import Distribution

    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Distribution(found.version, tuple(found.requires or ()))


def markers(extra: str) -> Mapping[str, str]:
    """The environment in which this process reads markers, of an extra."""
    from packaging.markers import default_environment

    return {**{name: str(value) for name, value in default_environment().items()}, "extra": extra}


def is_this_interpreter(interpreter: str) -> bool:
    """Whether a path, of an interpreter or its folder, is of the one that runs this process."""
    named = os.path.realpath(interpreter)
    folder = named if os.path.isdir(named) else os.path.dirname(os.path.dirname(os.path.abspath(interpreter)))
    return os.path.realpath(folder) == os.path.realpath(sys.prefix)


def find(requires: Iterable[str], python: str, interpreter: str, pins: Mapping[str, str]) -> Conflicts:
    """`python`: "3.11", or empty; `interpreter`: a path, or empty; `pins`: what the environment's lock has, empty where
    there is none: then a refusal of others is only told of exact versions."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    from layerzero.envs.build.requirements import unmet

    rows, running = [], f"3.{sys.version_info[1]}"
    if interpreter and not is_this_interpreter(interpreter):
        rows.append(Conflict(interpreter, sys.executable, "that interpreter to run this program"))
    if python and python != running:
        rows.append(Conflict(f"Python {python}", f"Python {running}", f"Python {python} to run this program"))
    for asked, _ in unmet(tuple(requires), here, markers, is_deep=True):
        requirement = Requirement(asked)
        name = canonicalize_name(requirement.name)
        found, wanted = here(name), pins.get(name) or _exact(requirement)
        refusing = _refusing(name, wanted) if wanted else []
        needs = f"{name} {wanted}" if wanted else asked
        if refusing:
            needs = f"{needs}, which is refused by {'; '.join(refusing)}"
        row = Conflict(asked, f"{name} {found.version}" if found else "not installed", needs)
        if row not in rows:
            rows.append(row)
    return Conflicts(rows)


def _exact(requirement: Requirement) -> str:
    """The version of NAME==VERSION; empty for a range."""
    found = [one for one in requirement.specifier if one.operator == "=="]
    return found[0].version if len(found) == 1 and not found[0].version.endswith("*") else ""


def _refusing(name: str, version: str) -> list[str]:
    """Distributions here that do not go with a version of another one."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    told: dict[str, None] = {}
    for dist in importlib.metadata.distributions():
        for text in dist.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:  # of a build from before PEP 508
                continue
            is_it = canonicalize_name(requirement.name) == name
            if not is_it or (requirement.marker is not None and not requirement.marker.evaluate(dict(markers("")))):
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                told[f"{dist.metadata['Name']} {dist.version} ({requirement.name}{requirement.specifier})"] = None
    return list(told)


def _lines(row: Conflict) -> list[str]:
    cells = [textwrap.wrap(text, width) or [""] for text, width in zip(row, WIDTHS, strict=True)]
    height = max(map(len, cells))
    filled = [[*cell, *[""] * (height - len(cell))] for cell in cells]
    return [
        "  ".join(f"{part:{width}}" for part, width in zip(line, WIDTHS, strict=True)).rstrip()
        for line in zip(*filled, strict=True)
    ]
