"""How much memory may be reserved, read from folders that stand for /proc and the control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.ipc import free_memory
from layerzero.ipc.errors import ConfigError, OutOfMemory

MIB, GIB = 1 << 20, 1 << 30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB, of which 40 are available, and no control groups."""
    fill(tmp_path, "proc", meminfo=f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n")
    return tmp_path


def fill(root: Path, folder: str, **files: object) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name.replace("__", ".")).write_text(f"{text}\n")


def refused(root: Path, nbytes: int, **environ: str) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        free_memory.check(nbytes, root, environ)
    return caught.value


def test_the_machine_may_be_asked_for_all_but_a_margin(root: Path) -> None:
    """256 MiB, so that what runs beside it can go on."""
    free_memory.check(40 * GIB - 256 * MIB, root, {})
    error = refused(root, 40 * GIB - 256 * MIB + 1)
    assert error.message == (
        "free memory, or ask for less: 39.8 GiB of shared memory are asked for, and the machine has 40 GiB available, "
        "of which 256 MiB stay free (LAYERZERO_MEMORY_MARGIN_MIB)"
    )
    assert error.facts == {
        "nbytes": 40 * GIB - 256 * MIB + 1,
        "available_bytes": 40 * GIB,
        "margin_bytes": 256 * MIB,
        "limited_by": "the machine",
    }


def test_the_margin_can_be_set(root: Path) -> None:
    """In MiB; whoever has the machine alone may want none."""
    free_memory.check(40 * GIB, root, {"LAYERZERO_MEMORY_MARGIN_MIB": "0"})
    assert refused(root, 31 * GIB, LAYERZERO_MEMORY_MARGIN_MIB="10240").facts["margin_bytes"] == 10 * GIB
    with pytest.raises(ConfigError, match="LAYERZERO_MEMORY_MARGIN_MIB is '1 GB'; allowed: MiB"):
        free_memory.check(1, root, {"LAYERZERO_MEMORY_MARGIN_MIB": "1 GB"})


def test_the_control_group_counts_what_it_can_give_back(root: Path) -> None:
    """Page cache is dropped before anything is killed. Shared memory is not: the kernel has it among `shmem` and
    `file`, which are not added."""
    fill(root, "proc/self", cgroup="0::/app")
    stat = (
        f"anon 1\nfile {3 * GIB}\nshmem {2 * GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 4}\nslab_reclaimable 0"
    )
    fill(root, f"{V2}/app", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=stat)
    assert free_memory.available_bytes(root) == 3 * GIB + 3 * GIB // 4
    free_memory.check(3 * GIB, root, {})
    error = refused(root, 4 * GIB)
    assert (error.facts["available_bytes"], error.facts["limited_by"]) == (
        3 * GIB + 3 * GIB // 4,
        f"control group {root / V2 / 'app'}",
    )


def test_a_group_above_may_have_the_lower_limit(root: Path) -> None:
    """A pod's limit is above those of its containers."""
    fill(root, "proc/self", cgroup="0::/pod/app")
    fill(root, f"{V2}/pod/app", memory__max="max", memory__current=1)
    fill(root, f"{V2}/pod", memory__max=2 * GIB, memory__current=GIB, memory__stat="")
    assert free_memory.available_bytes(root) == GIB
    assert refused(root, 3 * GIB // 2).facts["limited_by"] == f"control group {root / V2 / 'pod'}"


def test_version_1_is_read_too(root: Path) -> None:
    """Its numbers for a group alone are beside those that count with all below it."""
    fill(root, "proc/self", cgroup="4:cpu,memory:/app\n0::/")
    stat = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\ntotal_shmem {5 * GIB}"
    limits = {"memory__limit_in_bytes": 8 * GIB, "memory__usage_in_bytes": 7 * GIB}
    fill(root, f"{V1}/app", **limits, memory__stat=stat)
    fill(root, V1, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=7 * GIB)
    assert free_memory.available_bytes(root) == 3 * GIB


def test_a_small_group_keeps_less_free(root: Path) -> None:
    """A container of 256 MiB could have nothing otherwise: a sixteenth of its limit."""
    fill(root, "proc/self", cgroup="0::/app")
    fill(root, f"{V2}/app", memory__max=256 * MIB, memory__current=56 * MIB, memory__stat="")
    free_memory.check(184 * MIB, root, {})
    assert refused(root, 185 * MIB).facts["margin_bytes"] == 16 * MIB


def test_a_group_above_its_limit_has_nothing(root: Path) -> None:
    """The kernel lets it be for a moment when the limit was lowered."""
    fill(root, "proc/self", cgroup="0::/app")
    fill(root, f"{V2}/app", memory__max=GIB, memory__current=2 * GIB, memory__stat="")
    assert free_memory.available_bytes(root) == 0


def test_where_nobody_tells_everything_is_tried(tmp_path: Path) -> None:
    """Reserving still fails where the kernel refuses."""
    assert free_memory.available_bytes(tmp_path) is None
    free_memory.check(1 << 60, tmp_path, {})
