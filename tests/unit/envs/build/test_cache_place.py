"""What compiled code is for, as the name of a folder."""

from __future__ import annotations

import json
from pathlib import Path

from layerzero.envs.build.build import plan
from layerzero.envs.build.cache_place import gpus, place_of, processor, toolkit
from layerzero.envs.manifest import EnvManifest, load

MANIFEST = """
summary = "test"
provider = "p.py"
descriptor = "d.json"
interpreter = "host"
[env]
TRITON_CACHE_DIR = "{cache}/triton"
MORE = "%s"
"""


def manifest(folder: Path, more: str = "1", provider: str = "") -> EnvManifest:
    (folder / "d.json").write_text("{}")
    (folder / "p.py").write_text(provider)
    (folder / "one.toml").write_text(MANIFEST % more)
    return load(folder / "one.toml")


def test_variables_provider_and_hardware_name_the_folder(tmp_path: Path) -> None:
    place = place_of(manifest(tmp_path), "cpu")
    assert place.startswith(f"{processor()}-cpu-")
    assert place == place_of(manifest(tmp_path), "cpu")
    others = {
        place_of(manifest(tmp_path, more="2"), "cpu"),
        place_of(manifest(tmp_path, provider="x = 1"), "cpu"),
        place_of(manifest(tmp_path), "cu13"),
    }
    assert len(others - {place}) == 3


def test_the_environment_tells_its_processes_and_one_without_caches_has_none(tmp_path: Path) -> None:
    one = manifest(tmp_path)
    env = plan(one, store=tmp_path)
    assert env.environ["LAYERZERO_CACHE_FOLDER"] == str(env.cache)
    assert env.environ["TRITON_CACHE_DIR"] == f"{env.cache}/triton"
    assert env.cache.parent == tmp_path / "caches" / f"one-{env.id}"
    bare = plan(one.model_copy(update={"env": {}}), store=tmp_path)
    assert bare.place == ""
    assert "LAYERZERO_CACHE_FOLDER" not in bare.environ


def test_a_machine_without_a_driver_has_a_name_too() -> None:
    assert gpus("libnothing-of-this-name.so") == "no_gpu-no_driver"


def test_nvcc_is_named_by_its_version_or_by_what_it_is(tmp_path: Path) -> None:
    assert toolkit("cu13", str(tmp_path)) == "cu13"
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert toolkit("cu13", f"{nvcc.parent}:") == "cu13.nvcc.a8076d3d"
    (tmp_path / "cuda/version.json").write_text(json.dumps({"cuda_nvcc": {"version": "13.0.88"}}))
    assert toolkit("cu13", str(nvcc.parent)) == "cu13.nvcc13.0"
