"""Ids: an environment is named by everything that decides what is installed, and by nothing else."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from layerzero.envs.build import build, interpreters
from layerzero.envs.build.build import ensure, hold, plan
from layerzero.envs.build.env import Env
from layerzero.envs.manifest import EnvManifest, discover, load
from layerzero.ipc.errors import ConfigError, EnvError

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
MANIFEST = f"""\
summary = "s"
provider = "torch_cpu"
descriptor = "torch"
python = "{MINOR}"

[variants.cpu]
requirements = ["numpy>=2"]

[variants.cu12]
requirements = ["numpy>=2"]
"""
LOCK = "numpy==2.1\npyzmq==27.0\nmsgpack==1.2\n"


def sample(folder: Path, manifest: str = MANIFEST, lock: str = LOCK, name: str = "sample") -> EnvManifest:
    (folder / f"{name}.toml").write_text(manifest)
    for variant in ("cpu", "cu12"):
        (folder / f"{name}.{variant}.txt").write_text(lock)
    return load(folder / f"{name}.toml")


def test_same_inputs_give_the_same_id(tmp_path: Path) -> None:
    """Otherwise every start would build again."""
    assert plan(sample(tmp_path), store=tmp_path).id == plan(sample(tmp_path), store=tmp_path / "other").id


@pytest.mark.parametrize("change", ["lock", "variant", "name", "platform", "python version", "os", "builder"])
def test_each_input_changes_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """An environment that is reused although its making changed would run other code than its record says."""
    before = plan(sample(tmp_path), store=tmp_path).id
    manifest = sample(tmp_path)
    host = interpreters.host()
    match change:
        case "lock":
            manifest = sample(tmp_path, lock=LOCK.replace("2.1", "2.2"))
        case "name":
            manifest = sample(tmp_path, name="sample2")
        case "platform":
            manifest = sample(tmp_path, MANIFEST.replace("python =", 'platform = "manylinux_2_35"\npython ='))
        case "python version":
            monkeypatch.setattr(interpreters, "host", lambda: replace(host, version=f"{MINOR}.99"))
        case "os":
            monkeypatch.setattr(interpreters, "host", lambda: replace(host, platform="linux-aarch64"))
        case "builder":
            monkeypatch.setattr(build, "BUILDER", build.BUILDER + 1)
    assert plan(manifest, variant="cu12" if change == "variant" else "cpu", store=tmp_path).id != before


def test_worker_variables_do_not_change_the_id(tmp_path: Path) -> None:
    """They apply when a worker starts; building hundreds of megabytes again for one would be waste."""
    changed = plan(sample(tmp_path, MANIFEST + '[env]\nA = "1"\n'), store=tmp_path)
    assert changed.id == plan(sample(tmp_path), store=tmp_path).id
    assert changed.environ["A"] == "1"


def test_stale_lock_is_refused(tmp_path: Path) -> None:
    """A manifest that was edited without locking again must not install what it no longer asks for."""
    with pytest.raises(EnvError) as caught:
        plan(sample(tmp_path, MANIFEST.replace("numpy>=2", "numpy>=3")), store=tmp_path)
    assert "numpy>=3" in caught.value.message
    assert caught.value.facts["repair"] == f"lz env lock sample --variant cpu --manifests {tmp_path}"


def test_missing_lock_and_variant_are_refused_by_name(tmp_path: Path) -> None:
    """Both are what a user meets who asks for a build that nobody prepared."""
    manifest = sample(tmp_path)
    with pytest.raises(ConfigError, match=r"no variant 'cu13'; allowed: cpu, cu12"):
        plan(manifest, variant="cu13", store=tmp_path)
    manifest.lock_path("cpu").unlink()
    with pytest.raises(EnvError, match="lz env lock sample --variant cpu") as caught:
        plan(manifest, store=tmp_path)
    assert caught.value.facts["cause"] == f"{manifest.lock_path('cpu')} does not exist"


def test_python_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    """The user has to install it; the message must say how."""
    manifest = sample(tmp_path, MANIFEST.replace(f'"{MINOR}"', '"3.99"'))
    with pytest.raises(EnvError) as caught:
        plan(manifest, store=tmp_path)
    assert caught.value.facts == {
        "env": "sample",
        "cause": f"Python 3.99 not found; here are: {', '.join(interpreters.available())}",
        "repair": "uv python install 3.99",
    }


def test_host_environment_needs_no_build_and_can_be_held(tmp_path: Path) -> None:
    """The null backend must work on a machine without uv, pip and network."""
    env: Env = ensure("null", store=tmp_path)
    assert (env.python, env.on_host, env.is_built) == (Path(sys.executable), True, True)
    assert not list(tmp_path.glob("envs/null*"))
    hold(env).close()


def test_variables_of_a_manifest_may_lie_in_the_store(tmp_path: Path) -> None:
    """Caches that libraries keep belong where `lz env` looks after them."""
    env = plan(discover()[0]["zentorch"], store=tmp_path)
    folder = Path(env.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path / "caches" / f"zentorch-{env.id}")
    assert folder.name == "torchinductor"
