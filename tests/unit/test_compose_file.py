"""The compose files and the locks of their images, as data. tests/containers runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from layerzero.envs.build.lock import Lock
from layerzero.envs.manifest import discover

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
CLUSTER = yaml.safe_load((ROOT / "docker-compose.cluster.yml").read_text())
NODES = ("one", "two")
LOCKS = ROOT / "containers" / "locks"


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name: str) -> None:
    """One that was added without the shared settings would run as others do, only with more rights."""
    service = SERVICES[name]
    assert service["network_mode"] == "none"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "pid", "ipc", "ports", "cap_add", "devices", "userns_mode"}
    folders = [volume.split(":")[1] for volume in service["volumes"]]
    assert set(folders) <= {"/run/layerzero", "/var/lib/layerzero", "/var/cache/layerzero"}


@pytest.mark.parametrize("name", [name for name in SERVICES if "ENVIRONMENT" in SERVICES[name]["build"]["args"]])
def test_image_of_a_worker_has_a_locked_environment_whose_health_is_asked(name: str) -> None:
    """A check of another backend, or of the broker alone, would call a useless container healthy."""
    arguments = SERVICES[name]["build"]["args"]
    manifest = discover()[0][arguments["ENVIRONMENT"]]
    assert manifest.lock_path(arguments.get("VARIANT", "cpu")).is_file()
    assert SERVICES[name]["healthcheck"]["test"][-2:] == ["--backend", arguments["ENVIRONMENT"]]


def test_only_the_sockets_are_shared() -> None:
    """Every other volume is of one container."""
    users: dict[str, int] = {}
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            users[source] = users.get(source, 0) + 1
    assert {source for source, n in users.items() if n > 1} == {"sockets", "sockets-gpu"}
    assert users.keys() == FILE["volumes"].keys()


def test_lock_of_layerzero_satisfies_the_project() -> None:
    """The images install by this lock alone and resolve nothing."""
    path = ROOT / "containers" / "locks" / "layerzero.txt"
    pins = Lock(path, path.read_text()).pins
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    unmet = [r for r in map(Requirement, wanted) if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))]
    assert unmet == []


@pytest.mark.parametrize("name", CLUSTER["services"])
def test_nodes_have_a_network_and_workers_have_none(name: str) -> None:
    """What Ray needs is all that a node has and the others lack."""
    service = CLUSTER["services"][name]
    assert service.get("network_mode") == (None if name in NODES else "none")
    assert service["secrets"] == (["layerzero", "ray"] if name in NODES else ["layerzero"])
    shared = ("read_only", "cap_drop", "security_opt", "tmpfs", "restart")
    assert [service[key] for key in shared] == [SERVICES["broker"][key] for key in shared]
    assert not service.keys() & {"privileged", "pid", "ipc", "ports", "cap_add", "devices", "userns_mode", "networks"}
    assert CLUSTER["networks"] == {"default": {"internal": True}}


def test_nodes_share_nothing_with_each_other() -> None:
    """A worker has the volume of one node."""
    of = {name: {one.partition(":")[0] for one in CLUSTER["services"][name]["volumes"]} for name in CLUSTER["services"]}
    assert not of["one"] & of["two"]
    assert of["mlx"] < of["one"]
    assert of["onnxruntime"] < of["two"]


def test_lock_of_ray_completes_that_of_layerzero() -> None:
    """Both are installed in one environment, nothing twice, and with the Ray that the tests of clusters run."""
    ours, rays = (
        Lock(LOCKS / f"{name}.txt", (LOCKS / f"{name}.txt").read_text()).pins for name in ("layerzero", "ray")
    )
    assert not ours.keys() & rays.keys()
    tested = ROOT / "tests" / "clusters" / "ray.cpu.txt"
    assert rays.items() <= Lock(tested, tested.read_text()).pins.items()
