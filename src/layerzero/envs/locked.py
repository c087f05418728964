"""Lock files of programs: what `lz.env(..., lock=PATH)` holds to, and `lz env lock` writes. Each is a requirements file
with exact versions and hashes, whose head says for which requirements, Python and platform it is."""

from __future__ import annotations

import json
import platform
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from layerzero.envs.build.lock import Lock
from layerzero.envs.declared import MAX_LOCK_BYTES, Declared
from layerzero.ipc.errors import ConfigError, EnvError

_HEAD = re.compile(
    r"# (?P<name>\S+), cpu: Python (?P<python>3\.[0-9]{1,2}), (?P<machine>[a-z0-9_]+), "
    r"manylinux_2_(?P<glibc>[0-9]{1,2}) or newer\."
)
_REQUIRES = re.compile(r"# Requires: (?P<requires>\[.*\])")
_PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[A-Za-z0-9,._-]*\])?==[A-Za-z0-9.!+_-]+( *;[^\\]*)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}(?P<more> \\)?")


@dataclass(frozen=True)
class LockFile:
    """`python`: "3.11"; `glibc`: the minor version that its wheels need at most."""

    name: str
    python: str
    machine: str
    glibc: int
    requires: tuple[str, ...]
    lock: Lock

    @classmethod
    def parse(cls, path: Path, text: str) -> LockFile:
        """Raises ConfigError for what `lz env lock` has not written, or somebody has edited since: an installer reads
        it, and would take options from it."""
        lines = text.splitlines()
        head, requires = (_HEAD.match(lines[0]), None) if lines else (None, None)
        body: list[tuple[int, str]] = []
        for number, line in enumerate(lines, start=1):
            requires = requires or _REQUIRES.fullmatch(line)
            if line and not line.startswith("#"):
                body.append((number, line))
        if head is None or requires is None:
            raise ConfigError(f"{path}: it is no lock of lz env lock: its first lines do not say what it is for")
        is_open = False
        for number, line in body:
            pin, known = _PIN.fullmatch(line), _HASH.fullmatch(line)
            if (pin is None and known is None) or (pin is not None) == is_open or (known is not None) != is_open:
                text = "allowed: NAME==VERSION with hashes, as lz env lock writes them"
                raise ConfigError(f"{path}:{number}: {line.strip()!r:.80} is out of place; {text}")
            is_open = pin is not None or (known is not None and known["more"] is not None)
        if is_open:
            raise ConfigError(f"{path}: it ends in the middle of a package")
        try:
            asked = tuple(map(str, json.loads(requires["requires"])))
        except ValueError as exc:
            raise ConfigError(f"{path}: its line '# Requires:' is no list") from exc
        return cls(head["name"], head["python"], head["machine"], int(head["glibc"]), asked, Lock(path, text))

    @classmethod
    def read(cls, path: Path) -> LockFile:
        """Raises ConfigError."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_LOCK_BYTES + 1)
            if len(content) > MAX_LOCK_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_LOCK_BYTES:,} bytes, the most that a lock may have")
            return cls.parse(path, content.decode())
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path}: cannot be read: {exc}") from exc


def head(requires: tuple[str, ...], path: Path) -> str:
    """The lines below the first one of a lock of these requirements."""
    again = shlex.join(["lz", "env", "lock", path.name])
    return f"# Do not edit. Resolve again, in this folder: {again}\n# Requires: {json.dumps(requires)}\n"


def demand(declared: Declared) -> None:
    """Raises EnvError, whose first line says what to do, where the lock of a declaration is missing, or is not for what
    is declared, here."""
    if not declared.lock:
        return
    again, path = f"lz env lock {declared.backend}", declared.lock
    if declared.lock_text is None:
        raise _error(declared, again, f"it has no lock: {path} does not exist")
    try:
        found = LockFile.parse(Path(path), declared.lock_text)
    except ConfigError as exc:
        raise _error(declared, again, exc.message) from exc
    if found.python != declared.python:
        text = f"{path} is for Python {found.python}, not {declared.python}"
        raise _error(declared, again, f'{text}; with python="{found.python}" it holds as it is')
    here, libc = platform.machine(), platform.libc_ver()
    if found.machine != here:
        todo = f"build it on a machine with {found.machine}"
        raise _error(declared, todo, f"{path} is for {found.machine}, and this machine is {here}", is_command=False)
    if libc[0] == "glibc" and int(libc[1].split(".")[1]) < found.glibc:
        todo = f"build it on a system with glibc 2.{found.glibc} or newer"
        raise _error(declared, todo, f"{path} is for such systems, and this one has {libc[1]}", is_command=False)
    added, gone = _difference(declared.requires, found.requires), _difference(found.requires, declared.requires)
    if added or gone:
        what = f"{added} is asked for" if added else f"{gone} is not asked for any more"
        raise _error(declared, again, f"{path} is of other requirements: {what}")
    lacking = [one for one in declared.requires if not _is_met(one, found.lock.pins)]
    if lacking:
        raise _error(declared, again, f"{path} was edited: it does not have {', '.join(lacking)}")


def _difference(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    return ", ".join(text for text in one if text not in other)


def _is_met(text: str, pins: dict[str, str]) -> bool:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return False
    pinned = pins.get(canonicalize_name(requirement.name))
    if pinned is None:
        return requirement.marker is not None  # which may not hold for the Python that it is for
    return requirement.specifier.contains(pinned, prereleases=True)


def _error(declared: Declared, todo: str, cause: str, *, is_command: bool = True) -> EnvError:
    text = f"{'run: ' if is_command else ''}{todo}\nenvironment {declared.name}: {cause}"
    return EnvError(text, env=declared.backend, cause=cause, repair=todo)
