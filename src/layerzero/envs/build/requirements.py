"""Which requirements (PEP 508) do not hold among distributions that are installed somewhere, with all that they lead
to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from layerzero.envs.build.base import Distribution


def unmet(
    requirements: Sequence[str],
    find: Callable[[str], Distribution | None],
    markers: Callable[[str], Mapping[str, str]],
    *,
    is_deep: bool,
) -> list[tuple[str, str]]:
    """(requirement, why it does not hold), none twice; nothing where all hold. `find`: what is installed by a canonical
    name. `markers`: the environment in which markers are read, of an extra. `is_deep`: with what distributions require
    themselves, too, and not of the extras that are named alone: builds of vendors name requirements that they replace.
    """
    told: dict[tuple[str, str], None] = {}
    seen: set[tuple[str, str]] = set()
    queue = deque((Requirement(text), "") for text in requirements)
    while queue:
        requirement, whose = queue.popleft()
        if requirement.marker is not None and not whose and not requirement.marker.evaluate(dict(markers(""))):
            continue
        name = canonicalize_name(requirement.name)
        found = find(name)
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        asked = f"{requirement.name}{extras}{requirement.specifier}"
        if found is None:
            told[asked, f"{whose} needs it, and it is not installed" if whose else "it is not installed"] = None
            continue
        if not _is_within(requirement, found.version):
            here = f"{name} {found.version} is installed"
            told[asked, f"{whose} needs it, and {here}" if whose else here] = None
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                children = _children(found, markers, extra, is_deep=is_deep)
                queue.extend((child, f"{name} {found.version}") for child in children)
    return list(told)


def _is_within(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return not requirement.specifier


def _children(
    found: Distribution, markers: Callable[[str], Mapping[str, str]], extra: str, *, is_deep: bool
) -> Iterator[Requirement]:
    plain, asked = dict(markers("")), dict(markers(extra))
    for text in found.requires:
        with suppress(InvalidRequirement):  # of a build from before PEP 508
            child = Requirement(text)
            is_always = child.marker is None or child.marker.evaluate(plain)
            if (is_always and is_deep) or (not is_always and child.marker is not None and child.marker.evaluate(asked)):
                yield child
