"""Decide without a network what an environment gets: from the interpreter below it, else from a wheelhouse.

A backtracking resolver is not needed: a wheelhouse holds few versions, and what conflicts is better told than worked
around.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from layerzero.envs.build.base import Base
from layerzero.envs.build.lock import Lock
from layerzero.envs.build.wheelhouse import Wheel, Wheelhouse
from layerzero.ipc.errors import EnvError

_PASSES = 50  # each walk of the requirements adds what the last one found out; real ones settle in three
_Wanted = dict[str, dict[str, str]]  # canonical name -> specifier -> who wants it


@dataclass(frozen=True)
class Resolution:
    taken: Mapping[str, str]  # from the interpreter below, name -> version
    wheels: Mapping[str, Wheel]
    unlocked: Sequence[str]  # wheels that no lock has, so that nothing says whether they are what their project made

    @property
    def versions(self) -> dict[str, str]:
        """Of what is installed."""
        return {name: str(wheel.version) for name, wheel in sorted(self.wheels.items())}

    @property
    def text(self) -> str:
        """The wheels as a requirements file that allows no other file."""
        lines = (
            f"{name}=={self.wheels[name].version} --hash=sha256:{self.wheels[name].sha256}\n"
            for name in sorted(self.wheels)
        )
        return "".join(lines)


def resolve(
    env: str,
    requirements: Sequence[str],
    base: Base,
    house: Wheelhouse,
    *,
    lock: Lock | None = None,
    without: Collection[str] = (),
) -> Resolution:
    """What satisfies `requirements` and all that they require: distributions of `base` as they are, else wheels.
    What is in `without` (canonical names) is left out.

    Of several wheels the one in `lock` is taken, else the newest. Raises EnvError with all that is missing and the
    command that fetches it; for a wheel that differs from the lock's; for one that hides what `base` needs.
    """
    walk = _Walk(env, base, house, lock, {})
    for _ in range(_PASSES):
        walk.run(requirements, without)
        if walk.wanted == walk.before:
            break
        walk = _Walk(env, base, house, lock, walk.wanted)
    else:
        cause = "its requirements contradict each other in a circle"
        raise EnvError(f"environment {env}: {cause}", env=env, cause=cause, repair=f"edit the manifest of {env}")
    if walk.missing:
        raise _lacking(env, base, house, {name: walk.wanted[name] for name in walk.missing}, lock)
    wheels = {name: pick for name, pick in walk.picks.items() if isinstance(pick, Wheel)}
    taken = {name: base.dists[name].version for name, pick in sorted(walk.picks.items()) if not isinstance(pick, Wheel)}
    _refuse_hiding(env, base, wheels, taken)
    unlocked = [f"{name} {wheel.version}" for name, wheel in sorted(wheels.items()) if not _is_locked(wheel, lock, env)]
    return Resolution(taken, wheels, unlocked)


def select(env: str, lock: Lock, base: Base, house: Wheelhouse) -> Resolution:
    """The wheels that `lock` lists, as `base` needs them. Raises EnvError like `resolve`."""
    wheels: dict[str, Wheel] = {}
    missing: _Wanted = {}
    for name, version in lock.pins.items():
        fitting = [w for w in house.wheels(name) if w.version == Version(version) and not w.misfit(base)]
        if fitting:
            wheels[name] = min(fitting, key=lambda wheel: wheel.rank(base))
            _is_locked(wheels[name], lock, env)
        else:
            missing[name] = {f"=={version}": lock.path.name}
    if missing:
        raise _lacking(env, base, house, missing, lock)
    return Resolution({}, wheels, ())


class _Walk:
    """One walk from the requirements to all that they lead to. `before` is what the last walk found to be wanted."""

    def __init__(self, env: str, base: Base, house: Wheelhouse, lock: Lock | None, before: _Wanted) -> None:
        self.env, self.base, self.house, self.lock, self.before = env, base, house, lock, before
        self.wanted: _Wanted = {}
        self.picks: dict[str, Wheel | None] = {}  # None: what the base has
        self.missing: set[str] = set()

    def run(self, requirements: Sequence[str], without: Collection[str]) -> None:
        seen: set[tuple[str, str]] = set()
        queue = deque((Requirement(text), self.env) for text in requirements)
        while queue:
            requirement, wanted_by = queue.popleft()
            name = canonicalize_name(requirement.name)
            if name in without:
                continue
            self.wanted.setdefault(name, {}).setdefault(str(requirement.specifier), wanted_by)
            self._pick(name)
            for extra in ("", *sorted(requirement.extras)):
                if name not in self.missing and (name, extra) not in seen:
                    seen.add((name, extra))
                    queue.extend(self._children(name, extra))

    def _pick(self, name: str) -> None:
        specifiers = {**self.before.get(name, {}), **self.wanted[name]}
        installed = self.base.dists.get(name)
        if installed and all(_is_satisfied(text, installed.version) for text in specifiers):
            self.picks[name] = None
            return
        fitting = [
            wheel
            for wheel in self.house.wheels(name)
            if all(_is_satisfied(text, str(wheel.version)) for text in specifiers) and not wheel.misfit(self.base)
        ]
        if fitting:
            self.picks[name] = max(fitting, key=self._preference)
        else:
            self.missing.add(name)

    def _preference(self, wheel: Wheel) -> tuple[bool, bool, Version, int, tuple[int, str] | tuple[()]]:
        is_pinned = self.lock is not None and self.lock.pins.get(wheel.name) == str(wheel.version)
        return (is_pinned, not wheel.version.is_prerelease, wheel.version, -wheel.rank(self.base), wheel.build)

    def _children(self, name: str, extra: str) -> list[tuple[Requirement, str]]:
        pick = self.picks[name]
        requires = pick.requires if pick else self.base.dists[name].requires
        version = pick.version if pick else self.base.dists[name].version
        found = []
        for child in map(Requirement, requires):
            if child.marker is not None and not child.marker.evaluate(self.base.markers(extra)):
                continue
            if extra and (child.marker is None or child.marker.evaluate(self.base.markers(""))):
                continue  # no part of the extra
            if pick is None and not extra:
                # What the base lacks for itself is its own affair: some builds name what they do not need.
                if canonicalize_name(child.name) in self.base.dists:
                    found.append((Requirement(child.name), f"{name} {version}"))
            else:
                found.append((child, f"{name} {version}"))
        return found


def _is_satisfied(specifier: str, version: str) -> bool:
    try:
        return Requirement(f"x{specifier}").specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # as old or hand-made distributions have
        return not specifier


def _is_locked(wheel: Wheel, lock: Lock | None, env: str) -> bool:
    """Whether the lock has this file. Raises EnvError for a file that the lock has with other bytes."""
    if lock is None or lock.pins.get(wheel.name) != str(wheel.version):
        return False
    if wheel.sha256 not in lock.hashes[wheel.name]:
        cause = (
            f"{wheel.path} is not the file that {lock.path.name} lists: its SHA-256 is {wheel.sha256}, none of the "
            f"{len(lock.hashes[wheel.name])} that are allowed for {wheel.name}=={wheel.version}; remove it and "
            "fetch it again"
        )
        raise EnvError(f"environment {env}: {cause}", env=env, cause=cause, repair=f"rm {wheel.path}")
    return True


def _refuse_hiding(env: str, base: Base, wheels: Mapping[str, Wheel], taken: Mapping[str, str]) -> None:
    """A wheel that comes before the base's own version must suit the distributions that stay the base's."""
    for owner in taken:
        for requirement in map(Requirement, base.dists[owner].requires):
            wheel = wheels.get(canonicalize_name(requirement.name))
            if wheel is None or (requirement.marker and not requirement.marker.evaluate(base.markers(""))):
                continue
            if not requirement.specifier.contains(wheel.version, prereleases=True):
                cause = (
                    f"{wheel.path.name} cannot go over {base.python.path}: {owner} {taken[owner]} there needs "
                    f"{requirement.name}{requirement.specifier}"
                )
                repair = (
                    f"use an interpreter whose {owner} works with {wheel.name} {wheel.version}, or build without one"
                )
                raise EnvError(f"environment {env}: {cause}", env=env, cause=cause, repair=repair)


def _lacking(env: str, base: Base, house: Wheelhouse, wanted: _Wanted, lock: Lock | None) -> EnvError:
    lines, fetch = [], []
    for name, specifiers in sorted(wanted.items()):
        wishes = ", ".join(f"{name}{text} (wanted by {by})" for text, by in specifiers.items())
        installed = f"{base.python.path} has {name} {base.dists[name].version}; " if name in base.dists else ""
        lines.append(f"{wishes} is missing: {installed}{house.has(name, base)}")
        pin = lock.pins.get(name) if lock else None
        if pin and all(_is_satisfied(text, pin) for text in specifiers):
            fetch.append(f"{name}=={pin}")
        else:
            fetch.append(name + ",".join(sorted(text for text in specifiers if text)))
    cause = "\n".join(lines)
    repair = house.download_command(fetch, base.python)
    text = f"environment {env} cannot be built offline:\n{cause}\nto fetch it, where there is a network, run: {repair}"
    return EnvError(text, env=env, cause=cause, repair=repair)
