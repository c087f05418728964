"""Reading which cgroup counts the memory of a process, what it has counted, and what the limit is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from layerzero.ipc import oom

PID = 7
Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A /proc with process PID in `cgroups`, and a file system of cgroups for each of `mounts`: type, root, options."""

    def make(cgroups: str, *mounts: tuple[str, str, str]) -> Path:
        for number, (kind, root, options) in enumerate(mounts):
            line = f"{number} 1 0:{number} {root} {tmp_path / kind} rw,nosuid shared:4 - {kind} {kind} {options}\n"
            (tmp_path / "self").mkdir(exist_ok=True)
            with (tmp_path / "self" / "mountinfo").open("a") as file:
                file.write(line)
        (tmp_path / str(PID)).mkdir()
        (tmp_path / str(PID) / "cgroup").write_text(cgroups)
        return tmp_path

    return make


def fill(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


def found(proc: Path) -> oom.Cgroup:
    cgroup = oom.cgroup_of(PID, proc)
    assert cgroup is not None
    return cgroup


def test_version_2_has_a_limit_of_its_own_or_of_one_above(tree: Tree) -> None:
    """As systemd lays them out: a slice may have the lower limit."""
    proc = tree("0::/a.slice/b.scope\n", ("tmpfs", "/", "rw"), ("cgroup2", "/", "rw,nsdelegate"))
    top = proc / "cgroup2"
    fill(top / "a.slice", memory_max=100 << 20)
    (top / "a.slice" / "b.scope").mkdir()
    cgroup = found(proc)
    assert (cgroup.path, cgroup.folder, cgroup.version) == ("/a.slice/b.scope", top / "a.slice/b.scope", 2)
    fill(cgroup.folder, memory_max="max")
    (cgroup.folder / "memory.events.local").write_text("low 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    assert (cgroup.kills(), cgroup.limit()) == (2, (100 << 20, "/a.slice"))
    fill(cgroup.folder, memory_max=50 << 20)
    assert cgroup.limit() == (50 << 20, "/a.slice/b.scope")


def test_version_1_counts_memory_where_both_are_mounted(tree: Tree) -> None:
    """As in containers of an engine on such a system: the mount shows the container's own cgroup, by its full path."""
    cgroups = "8:pids:/docker/1\n4:memory:/docker/1\n0::/docker/1\n"
    proc = tree(cgroups, ("cgroup2", "/docker/1", "rw"), ("cgroup", "/docker/1", "rw,memory"))
    cgroup = found(proc)
    assert (cgroup.path, cgroup.folder, cgroup.version) == ("/docker/1", proc / "cgroup", 1)
    fill(cgroup.folder, memory_limit_in_bytes=0x7FFFFFFFFFFFF000, memory_oom_control="under_oom 0\noom_kill 5")
    assert (cgroup.kills(), cgroup.limit()) == (5, None)


@pytest.mark.parametrize("root", ["/docker/other", "/docker/1/2", "/dock"])
def test_a_cgroup_that_no_mount_shows_is_none(tree: Tree, root: str) -> None:
    """Another's counter would tell of another's deaths."""
    assert oom.cgroup_of(PID, tree("0::/docker/1\n", ("cgroup2", root, "rw"))) is None


def test_a_process_that_has_gone_has_none(tmp_path: Path) -> None:
    """It may end before anybody looks."""
    assert oom.cgroup_of(PID, tmp_path) is None


def test_each_counted_kill_explains_one_death(tree: Tree) -> None:
    """Workers share a cgroup: what killed one did not kill the next."""
    proc = tree("0::/\n", ("cgroup2", "/", "rw"))
    counter = proc / "cgroup2" / "memory.events.local"

    def count(kills: int) -> None:
        counter.parent.mkdir(exist_ok=True)
        counter.write_text(f"oom_kill {kills}\n")

    count(3)
    kills = oom.OomKills(proc)
    one, two, three = (kills.watch(PID) for _ in range(3))
    assert one.explain() == ""
    count(5)
    assert [watch.explain() for watch in (one, two, three)] == ["cgroup /, without a limit"] * 2 + [""]
    later = kills.watch(PID)
    assert later.explain() == ""
    counter.unlink()
    assert (kills.watch(PID).explain(), later.explain()) == ("", "")
