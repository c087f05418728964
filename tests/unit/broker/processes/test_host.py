"""Facts about the machine come from the machine: /proc, control groups and the GPU's driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from layerzero.broker.processes import cuda_driver, host
from layerzero.capabilities.device import DeviceSpec

INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse sse2 sse4_2 avx f16c avx2 fma avx512f avx512bw avx512vl avx512_bf16 avx512_fp16 amx_tile amx_bf16

processor\t: 1
vendor_id\t: GenuineIntel
model name\t: another
flags\t\t: fpu
"""
AMD = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7763 64-Core Processor
flags\t\t: fpu sse sse2 sse4_2 avx f16c fma avx2 sse4a
"""
ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimdhp asimddp sve i8mm bf16 crc32
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""
FACTS = {
    INTEL: (
        "intel",
        "Intel(R) Xeon(R) Platinum 8480+",
        "amx_bf16 amx_tile avx avx2 avx512_bf16 avx512_fp16 avx512bw avx512f avx512vl f16c fma sse2 sse4_2",
        True,
        True,
    ),
    AMD: ("amd", "AMD EPYC 7763 64-Core Processor", "avx avx2 f16c fma sse2 sse4_2", False, False),
    ARM: ("arm", "0xd40", "asimd asimddp asimdhp bf16 i8mm sve", True, True),
}


@pytest.mark.parametrize("text", FACTS, ids=["intel", "amd", "arm"])
def test_cpu_is_read_from_what_linux_says(text: str) -> None:
    """A kernel chosen for instructions that the CPU lacks dies of SIGILL."""
    device = host.parse_cpu(text, cores=4, memory_bytes=1 << 30)
    found = (device.device_vendor, device.device_name, " ".join(device.isa), device.supports_bf16, device.supports_fp16)
    assert found == FACTS[text]
    assert (device.device_type, device.cores, device.memory_bytes) == ("cpu", 4, 1 << 30)


def test_uuid_is_stable_and_tells_machines_apart() -> None:
    """PerfDB's rows must survive a restart and not a move."""
    one = [host.parse_cpu(text, cores=4, memory_bytes=1).device_uuid for text in (INTEL, AMD, ARM)]
    assert one == [host.parse_cpu(text, cores=4, memory_bytes=2).device_uuid for text in (INTEL, AMD, ARM)]
    assert len({*one, host.parse_cpu(INTEL, cores=8, memory_bytes=1).device_uuid}) == 4


def test_unknown_cpu_claims_nothing() -> None:
    """Where nothing is known nothing may be assumed."""
    device = host.parse_cpu("", cores=1, memory_bytes=0)
    assert (device.isa, device.device_vendor, device.supports_bf16) == ((), "", False)
    assert device.device_name == os.uname().machine


def test_this_machine_agrees_with_its_proc() -> None:
    """The samples above could be wrong in the same way as the reader."""
    device = host.detect_cpu()
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    assert device.isa
    assert set(device.isa) <= words
    assert 1 <= device.cores <= len(os.sched_getaffinity(0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < device.memory_bytes <= total
    free = host.free_memory_bytes(device)
    assert free is not None
    assert 0 < free <= device.memory_bytes


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with 8 GiB of memory, of which 4 are available."""
    files = {
        "proc/cpuinfo": INTEL,
        "proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable: 4194304 kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


GIB = 1 << 30
V2 = "sys/fs/cgroup/a/b/"
CGROUPS = {
    "none": ("", {}, 8 * GIB, 4 * GIB),
    "no limit": ("0::/a/b\n", {f"{V2}memory.max": "max\n", f"{V2}memory.current": "5\n"}, 8 * GIB, 4 * GIB),
    "limit": ("0::/a/b\n", {f"{V2}memory.max": f"{2 * GIB}", f"{V2}memory.current": f"{GIB}"}, 2 * GIB, GIB),
    "limit of the outer group": (
        "0::/a/b\n",
        {f"{V2}memory.max": "max", "sys/fs/cgroup/a/memory.max": f"{GIB}", "sys/fs/cgroup/a/memory.current": "0"},
        GIB,
        GIB,
    ),
    "above its limit": ("0::/a/b\n", {f"{V2}memory.max": "10", f"{V2}memory.current": "11"}, 10, 0),
    "version 1": (
        "4:memory:/x\n0::/\n",
        {
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{3 * GIB}",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{GIB}",
        },
        3 * GIB,
        2 * GIB,
    ),
    "version 1 without a limit": (
        "4:memory:/x\n",
        {
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1",
        },
        8 * GIB,
        4 * GIB,
    ),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_memory_is_what_the_control_group_leaves(tmp_path: Path, name: str) -> None:
    """A container is killed at its own limit, whatever the machine has."""
    groups, files, total, free = CGROUPS[name]
    root = machine(tmp_path, groups, files)
    device = host.detect_cpu(root)
    assert (device.memory_bytes, host.free_memory_bytes(device, root)) == (total, free)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b\n", {f"{V2}cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "100000 100000", f"{V2}cpu.max": "max 100000"}, 1),
        ("3:cpu,cpuacct:/x\n", {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "100000",
                                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, 1),
        ("3:cpu:/x\n", {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1",
                        "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000"}, len(os.sched_getaffinity(0))),
        ("0::/a/b\n", {f"{V2}cpu.max": "max 100000"}, len(os.sched_getaffinity(0))),
    ],
    ids=["half a core", "outer quota", "version 1", "version 1 without a quota", "no quota"],
)  # fmt: skip
def test_cores_are_what_the_control_group_leaves(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    """More threads than quota make every kernel wait for its own slices."""
    assert host.detect_cpu(machine(tmp_path, groups, files)).cores == cores


def test_machine_without_proc_is_unknown_and_works(tmp_path: Path) -> None:
    """No fact is worth a broker that does not start."""
    device = host.detect_cpu(tmp_path)
    assert (device.isa, device.memory_bytes) == ((), 0)
    assert host.free_memory_bytes(device, tmp_path) is None
    assert host.free_memory_bytes(DeviceSpec("hpu"), tmp_path) is None


def test_without_a_driver_there_are_no_gpus_and_a_reason() -> None:
    """ "No GPU" without a why sends people to the wrong repair."""
    found = cuda_driver.detect_gpus("libcuda-that-is-not-there.so.1")
    assert found.devices == ()
    assert found.reason.startswith("no NVIDIA driver: libcuda-that-is-not-there.so.1: cannot open")
    assert cuda_driver.free_memory_bytes("GPU-0", "libnvidia-ml-that-is-not-there.so.1") is None


def test_library_that_is_no_driver_is_named(tmp_path: Path) -> None:
    """A stub library (as in CUDA's container images) must not stop the broker."""
    found = cuda_driver.detect_gpus("libc.so.6")
    assert found == cuda_driver.Gpus((), "the NVIDIA driver failed: it lacks cuInit; it is too old", has_failed=True)
    assert cuda_driver.free_memory_bytes("GPU-0", "libc.so.6") is None


DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDriverGetVersion(int *v) { *v = 12040; return 0; }
int cuDeviceGetCount(int *n) { *n = COUNT; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *name, int size, int d) { strncpy(name, "Test GPU", size); return 0; }
int cuDeviceGetUuid_v2(unsigned char *u, int d) { memset(u, 16 + d, 16); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 133 ? MPS == 1 : -1;
  return a == 133 && MPS < 0 ? 1 : 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *u, void **h) { *h = (void *)1; return strncmp(u, "GPU-1010", 8) ? 6 : 0; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = 80; m[1] = 70; m[2] = 10; return h == 0; }
"""


def driver(folder: Path, *, count: int = 2, fails: int = 0, mps: int = 0) -> str:
    """A shared library that answers as a driver does. `mps`: -1 for one that is older than that question."""
    defines = f"#define COUNT {count}\n#define FAILS {fails}\n#define MPS {mps}\n"
    (folder / "driver.c").write_text(defines + DRIVER)
    target = folder / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(target), str(folder / "driver.c")], check=True)
    return str(target)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_gpus_are_what_the_driver_says(tmp_path: Path) -> None:
    """Names, versions and limits decide which kernels may run."""
    library = driver(tmp_path)
    found = cuda_driver.detect_gpus(library)
    assert found.reason == ""
    first, second = found.devices
    assert (first.device_name, first.device_vendor, first.sm_version) == ("Test GPU", "nvidia", 90)
    assert first.device_uuid == "GPU-10101010-1010-1010-1010-101010101010"
    assert second.device_uuid == "GPU-11111111-1111-1111-1111-111111111111"
    assert (first.cuda_version, first.memory_bytes, first.cores) == ("12.4", 80 << 30, 132)
    assert (first.supports_bf16, first.supports_fp8, first.supports_graphs) == (True, True, True)
    assert cuda_driver.free_memory_bytes(first.device_uuid, library) == 70
    assert cuda_driver.free_memory_bytes("GPU-of-another-machine", library) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("mps", "expected"), [(1, True), (0, False), (-1, False)])
def test_processes_that_share_a_gpu_by_mps_are_seen(tmp_path: Path, mps: int, expected: bool) -> None:
    """There a fault of one ends the others."""
    assert cuda_driver.detect_gpus(driver(tmp_path, mps=mps)).has_mps is expected


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_daemon_of_mps_is_seen_where_the_driver_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it lives: what a dead one left does not count."""
    library = driver(tmp_path, mps=-1)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    for text, expected in ((str(os.getpid()), True), ("1", True), (str(1 << 22), False), ("", False)):
        pid.write_text(text)
        assert cuda_driver.detect_gpus(library).has_mps is expected


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("count", "fails", "reason", "has_failed"),
    [
        (0, 0, "the NVIDIA driver sees no GPU", False),
        (1, 100, "the NVIDIA driver sees no GPU: cuInit returned 100", False),
        (1, 999, "the NVIDIA driver failed: cuInit returned 999", True),
    ],
)
def test_driver_without_gpus_says_so(tmp_path: Path, count: int, fails: int, reason: str, has_failed: bool) -> None:
    """Error 100 is "no device", which is no fault of a machine; a driver that fails otherwise hides its GPUs."""
    expected = cuda_driver.Gpus((), reason, has_failed=has_failed)
    assert cuda_driver.detect_gpus(driver(tmp_path, count=count, fails=fails)) == expected
