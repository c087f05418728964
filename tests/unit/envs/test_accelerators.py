"""Cards of AMD, Intel and Habana are found as Linux shows them, and only where a process may use them. The trees are
made here, after the kernel's documentation: none of these cards was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.capabilities.device import DeviceSpec
from layerzero.envs.accelerators import amd_gpus, detect, gaudi_cards, intel_gpus, lacks

KFD = "sys/class/kfd/kfd/topology/nodes"
CPU_NODE = "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\nvendor_id 0\nunique_id 0\n"
MI300 = (
    "cpu_cores_count 0\nsimd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\nvendor_id 4098\ndevice_id 29857\n"
    "unique_id 12345678901234567\ndrm_render_minor 128\n"
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def plug(root: Path, node: str, address: str, files: dict[str, str]) -> None:
    """A node of /sys whose `device` is a link to the card's folder, as the kernel has it."""
    card = root / "sys/devices" / address
    write(card, files)
    (root / node).mkdir(parents=True)
    (root / node / "device").symlink_to(card)


def amd(root: Path) -> Path:
    files = {
        "dev/kfd": "",
        f"{KFD}/0/properties": CPU_NODE,
        f"{KFD}/1/properties": MI300,
        f"{KFD}/1/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\n",
        f"{KFD}/1/mem_banks/1/properties": "heap_type 0\nsize_in_bytes 4096\n",
        "opt/rocm/.info/version": "6.4.1-83\n",
    }
    return write(root, files)


def test_amd_gpu_is_told_from_the_cpu_beside_it(tmp_path: Path) -> None:
    """Both are nodes of one topology, and only one of them has an architecture to compile for."""
    assert list(amd_gpus(amd(tmp_path))) == [
        DeviceSpec(
            device_type="rocm",
            device_name="AMD GPU gfx942",
            device_vendor="amd",
            device_uuid="GPU-002bdc545d6b4b87",
            architecture="gfx942",
            roc_version="6.4.1-83",
            cores=304,
            memory_bytes=206141652992,
        )
    ]


@pytest.mark.parametrize(
    ("version", "gfx"),
    [(90010, "gfx90a"), (90006, "gfx906"), (100300, "gfx1030"), (110501, "gfx1151")],
)
def test_architecture_is_named_as_compilers_name_it(tmp_path: Path, version: int, gfx: str) -> None:
    """Decimal in the topology, and hexadecimal but for the major part in the name."""
    write(tmp_path, {"dev/kfd": "", f"{KFD}/1/properties": f"gfx_target_version {version}\n"})
    (found,) = amd_gpus(tmp_path)
    assert (found.architecture, found.device_uuid, found.cores) == (gfx, "kfd-1", 1)


def test_amd_gpu_that_a_container_may_not_use_is_none(tmp_path: Path) -> None:
    """/sys of a container shows the cards of the machine; the kernel refuses their properties, or there is no
    /dev/kfd."""
    amd(tmp_path)
    (tmp_path / f"{KFD}/1/properties").write_text("")
    assert list(amd_gpus(tmp_path)) == []
    (tmp_path / "a").mkdir()
    amd(tmp_path / "a")
    (tmp_path / "a/dev/kfd").unlink()
    assert list(amd_gpus(tmp_path / "a")) == []


def test_intel_gpu_is_a_render_node_of_intels(tmp_path: Path) -> None:
    """Others have render nodes, too, and a node that is not in /dev cannot be opened."""
    driver = tmp_path / "sys/bus/pci/drivers/xe"
    driver.mkdir(parents=True)
    plug(tmp_path, "sys/class/drm/renderD129", "0000:03:00.0", {"vendor": "0x8086\n", "device": "0xe20b\n"})
    (tmp_path / "sys/devices/0000:03:00.0/driver").symlink_to(driver)
    plug(tmp_path, "sys/class/drm/renderD128", "0000:65:00.0", {"vendor": "0x1002\n", "device": "0x74a1\n"})
    plug(tmp_path, "sys/class/drm/renderD130", "0000:00:02.0", {"vendor": "0x8086\n", "device": "0x7d55\n"})
    write(tmp_path, {"sys/class/drm/version": "", "dev/dri/renderD128": "", "dev/dri/renderD129": ""})
    assert list(intel_gpus(tmp_path)) == [
        DeviceSpec(
            device_type="xpu",
            device_name="Intel GPU 0xe20b",
            device_vendor="intel",
            device_uuid="pci-0000:03:00.0",
            driver_version="xe",
        )
    ]


def test_gaudi_is_told_from_the_other_accelerators(tmp_path: Path) -> None:
    """NPUs of Intel and AMD are in the same folder, and so is Goya, which no PyTorch has."""
    habana = {"vendor": "0x1da3\n", "driver_ver": "1.23.0-695\n"}
    plug(tmp_path, "sys/class/accel/accel0", "0000:00:0b.0", {"vendor": "0x8086\n"})
    plug(tmp_path, "sys/class/accel/accel1", "0000:19:00.0", {**habana, "device_type": "GAUDI2\n"})
    plug(tmp_path, "sys/class/accel/accel2", "0000:1a:00.0", {**habana, "device_type": "GOYA\n"})
    plug(tmp_path, "sys/class/accel/accel10", "0000:33:00.0", habana)
    write(tmp_path, {f"dev/accel/accel{n}": "" for n in (0, 1, 2, 10)})
    found = list(gaudi_cards(tmp_path))
    assert [(one.device_name, one.device_uuid) for one in found] == [
        ("Habana GAUDI2", "pci-0000:19:00.0"),
        ("Habana Gaudi", "pci-0000:33:00.0"),
    ]
    assert {(one.device_type, one.device_vendor, one.driver_version) for one in found} == {
        ("hpu", "habana", "1.23.0-695")
    }


def test_a_machine_without_them_says_what_was_looked_at(tmp_path: Path) -> None:
    """Who has a card and is told that there is none must see where to look."""
    assert detect(tmp_path) == ()
    assert lacks("xpu", ()) == "needs an Intel GPU, and this machine has none (no render node of Intel's in /dev/dri)"
    assert "needs an AMD GPU" in lacks("rocm", ())
    assert "needs a Gaudi HPU" in lacks("hpu", detect(amd(tmp_path)))
    assert lacks("rocm", detect(tmp_path)) == ""
    assert lacks("cpu", ()) == lacks("cuda", ()) == ""
