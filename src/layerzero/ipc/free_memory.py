"""What this process can still get of the CPU's memory: the machine's estimate, and what its control groups leave.

Shared memory has no limit of its own: who reserves more than there is wakes the kernel's OOM killer, which ends any
process it likes. So memory is asked for here before it is reserved. `root` is there for tests: a folder that stands for
the file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc.errors import ConfigError, OutOfMemory

ROOT = Path("/")
MARGIN = "LAYERZERO_MEMORY_MARGIN_MIB"
MAX_MARGIN_BYTES = 256 << 20
_MARGIN_SHARE = 16  # a small container keeps less free: this part of its limit
# What a group gives back before the kernel kills in it: page cache, which shared memory is no part of, and slabs.
_RECLAIMABLE = frozenset(
    ("active_file", "inactive_file", "slab_reclaimable", "total_active_file", "total_inactive_file")
)
_UNLIMITED = 1 << 60  # version 1 writes a number for no limit


@dataclass(frozen=True)
class Bound:
    """One thing that limits this process's memory: the machine, or a control group. `unused_bytes`: at least so much is
    available; with the group's `stat` file, what it can give back counts, too."""

    name: str
    total_bytes: int
    unused_bytes: int
    stat: Path | None = None

    @property
    def available_bytes(self) -> int:
        """What is free or can be freed by the kernel without swapping."""
        if self.stat is None:
            return self.unused_bytes
        names = _pairs(self.stat)
        totals = any(name.startswith("total_") for name in names)  # version 1: with the groups below
        reclaimable = sum(names[n] for n in _RECLAIMABLE & names.keys() if n.startswith("total_") == totals)
        return max(min(self.unused_bytes + reclaimable, self.total_bytes), 0)


def bounds(root: Path = ROOT) -> Iterator[Bound]:
    """The machine and each control group that limits memory. Nothing where nobody tells."""
    meminfo = _pairs(root / "proc/meminfo")
    if "MemTotal" in meminfo and "MemAvailable" in meminfo:  # always in kB
        yield Bound("the machine", 1024 * meminfo["MemTotal"], 1024 * meminfo["MemAvailable"])
    for folder in groups(root, "memory"):
        for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(ValueError):  # absent, or "max"
                total = int(read(folder / limit))
                if total < _UNLIMITED:
                    yield Bound(
                        f"control group {folder}", total, total - int(read(folder / use)), folder / "memory.stat"
                    )


def available_bytes(root: Path = ROOT) -> int | None:
    """What the tightest bound leaves; None where nobody tells."""
    return min((bound.available_bytes for bound in bounds(root)), default=None)


def check(nbytes: int, root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> None:
    """May `nbytes` be reserved, and a margin stay free? Two processes may ask at the same time: the margin is for that,
    too. Raises OutOfMemory, ConfigError."""
    margin_bytes = _margin_bytes(environ)
    for bound in bounds(root):
        margin = min(MAX_MARGIN_BYTES, bound.total_bytes // _MARGIN_SHARE) if margin_bytes is None else margin_bytes
        if nbytes <= bound.unused_bytes - margin:
            continue
        available = bound.available_bytes
        if nbytes > available - margin:
            raise OutOfMemory(
                f"free memory, or ask for less: {in_words(nbytes)} of shared memory are asked for, and {bound.name} "
                f"has {in_words(available)} available, of which {in_words(margin)} stay free ({MARGIN})",
                nbytes=nbytes,
                available_bytes=available,
                margin_bytes=margin,
                limited_by=bound.name,
            )


def in_words(nbytes: int) -> str:
    """For people: 4 TiB, 21.3 GiB, 256 MiB, 512 bytes."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes:,} bytes"


def groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that bind this process, inner first. Version 2 has one tree, version 1 one for
    each controller. In a container the outer part of the path may not be visible; what is, counts."""
    mount = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_dir():
                yield folder
            if folder == top:
                break


def read(path: Path) -> str:
    """The text of a file of the kernel's; empty where it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _pairs(path: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each on a line: `MemTotal:  8 kB`, `active_file 4096`."""
    words = (line.split() for line in read(path).splitlines())
    return {found[0].rstrip(":"): int(found[1]) for found in words if len(found) > 1 and found[1].isdecimal()}


def _margin_bytes(environ: Mapping[str, str]) -> int | None:
    given = environ.get(MARGIN, "")
    if given and not given.isdecimal():
        raise ConfigError(f"{MARGIN} is {given!r:.40}; allowed: MiB that stay free, such as 512; 0 for none")
    return int(given) << 20 if given else None
