"""Whether the kernel killed a process for lack of memory, which its exit code does not tell: the counters of cgroups.

For whoever starts workers. A cgroup counts the kills of its own processes by any OOM killer: of its own limit, of one
above it, of the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 writes a number for no limit
PROC = Path("/proc")


@dataclass(frozen=True)
class Cgroup:
    """Where the memory of a process is counted. `folder` is where `path` shows; `top`: the highest one that shows."""

    path: str
    folder: Path
    top: Path
    version: int

    def kills(self) -> int:
        """How many of its processes OOM killers have killed. Raises OSError, ValueError."""
        name = "memory.events.local" if self.version == 2 else "memory.oom_control"
        pairs = (line.split() for line in (self.folder / name).read_text().splitlines())
        return int(dict(pairs)["oom_kill"])

    def limit(self) -> tuple[int, str] | None:
        """The lowest limit in bytes of it and those above it that show, and the path of the one that has it."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        found, folder, path = [], self.folder, self.path
        while True:
            try:
                text = (folder / name).read_text().strip()
            except OSError:  # the root of version 2 has none
                text = "max"
            if text != "max" and int(text) < _UNLIMITED:
                found.append((int(text), path))
            if folder == self.top:
                return min(found, key=lambda one: one[0], default=None)
            folder, path = folder.parent, path.rpartition("/")[0] or "/"


def cgroup_of(pid: int, proc: Path = PROC) -> Cgroup | None:
    """The cgroup that counts the memory of a process which lives. None where it does not show."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        mounts = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return None
    paths = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    version = min(paths, default=0)  # where both are mounted, memory is with version 1 if that knows it
    for mount in mounts:
        # number, parent, device, root, place, options, more of them, "-", type, source, options of the file system
        before, _, after = mount.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        is_memory = kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(",")
        if is_memory and version and f"{paths[version]}/".startswith(f"{root.rstrip('/')}/"):
            below = paths[version][len(root.rstrip("/")) :].strip("/")
            return Cgroup(paths[version], Path(place, below), Path(place), version)
    return None


class OomKills:
    """Of the workers that this process starts. Each kill that a cgroup counts explains one death; one of another
    process there can be taken for that of a worker which somebody else kills by SIGKILL later in its life."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._explained: dict[Path, int] = {}

    def watch(self, pid: int) -> Watch:
        """From the start of a worker on."""
        return Watch(cgroup_of(pid, self._proc), self._explained)


class Watch:
    def __init__(self, cgroup: Cgroup | None, explained: dict[Path, int]) -> None:
        self._cgroup = cgroup
        self._explained = explained
        self._before = self._unexplained()

    def _unexplained(self) -> int:
        if self._cgroup is None:
            return 0
        try:
            return self._cgroup.kills() - self._explained.get(self._cgroup.folder, 0)
        except (OSError, ValueError, KeyError):
            return 0

    def explain(self) -> str:
        """Where the process, which died of SIGKILL, was killed for lack of memory, and the limit there; else ""."""
        if self._cgroup is None or self._unexplained() <= self._before:
            return ""
        folder = self._cgroup.folder
        self._explained[folder] = self._explained.get(folder, 0) + 1
        limit = self._cgroup.limit()
        if limit is None:
            return f"cgroup {self._cgroup.path}, without a limit"
        of = "" if limit[1] == self._cgroup.path else f" of {limit[1]}"
        return f"cgroup {self._cgroup.path}, limit {limit[0] >> 20} MiB{of}"
