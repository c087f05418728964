"""Kernels of the hub: what manifests and locks may say of them, and what comes from the hub. The hub is a module that
answers like huggingface_hub: no other can be reached."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from layerzero.envs.hub import lock as locks
from layerzero.envs.hub.placing import FOLDER, HubAccess, kernels_of
from layerzero.envs.hub.repository import Repository
from layerzero.envs.manifest import EnvManifest, load
from layerzero.envs.transfer.transfer import export
from layerzero.envs.trust.bundle import read_folder
from layerzero.ipc.errors import ConfigError, EnvError

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
MANIFEST = """\
summary = "s"
provider = "provider.py"
descriptor = "sample.json"
python = "3.11"

[hub]
repository = "some/kernels"
revision = "v1"
build = { cpu = "torch-universal" }

[variants.cpu]
requirements = ["numpy>=2"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "provider.py").touch()
    (tmp_path / "sample.json").write_text("{}")
    (tmp_path / "sample.toml").write_text(MANIFEST)
    return tmp_path


@pytest.fixture
def manifest(folder: Path) -> EnvManifest:
    return load(folder / "sample.toml")


class Hub(ModuleType):
    """Has one repository, of which v1 is COMMIT."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("huggingface_hub")
        self.files, self.asked = files, []  # type: ignore[var-annotated]

    def HfApi(self, library_name: str) -> Hub:
        return self

    def repo_info(self, repo_id: str, *, repo_type: str, revision: str) -> Any:
        self.asked.append((repo_id, repo_type, revision))
        info = ModuleType("info")
        info.sha = COMMIT  # type: ignore[attr-defined]
        return info

    def snapshot_download(
        self, repo_id: str, *, repo_type: str, revision: str, allow_patterns: list[str], local_dir: Path
    ) -> None:
        self.asked.append((repo_id, repo_type, revision))
        assert allow_patterns == ["build/torch-universal/*"]
        for path, data in self.files.items():
            target = local_dir / "build" / "torch-universal" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub({"__init__.py": b"one = 1\n", "ops/a.so": b"\x7fELF"})
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    return made


def pin(manifest: EnvManifest) -> locks.HubLock:
    found = locks.write(manifest, "cpu", Repository(), None)
    assert found is not None
    return found


def test_a_tag_is_pinned_to_its_commit_and_built_from_that(manifest: EnvManifest, hub: Hub, tmp_path: Path) -> None:
    """The tag may move; what was locked does not."""
    lock = pin(manifest)
    assert (lock.content.revision, [file.path for file in lock.content.files]) == (COMMIT, ["__init__.py", "ops/a.so"])
    hub.asked.clear()
    kernels = kernels_of(manifest, "cpu", HubAccess(allows_unsigned=True))
    assert kernels is not None
    kernels.place(tmp_path / "env")
    assert hub.asked == [("some/kernels", "kernel", COMMIT)]
    assert (tmp_path / "env" / FOLDER / "ops" / "a.so").read_bytes() == b"\x7fELF"


def test_what_the_hub_has_changed_is_refused(manifest: EnvManifest, hub: Hub, tmp_path: Path) -> None:
    """A commit that has other bytes than it had is an attack, or a broken disk."""
    pin(manifest)
    hub.files["ops/a.so"] = b"\x7fELG"
    kernels = kernels_of(manifest, "cpu", HubAccess(allows_unsigned=True))
    assert kernels is not None
    with pytest.raises(EnvError, match=r"a\.so is not the file that .* pins"):
        kernels.place(tmp_path / "env")


def test_a_hub_that_cannot_be_reached_says_what_to_do(
    manifest: EnvManifest, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub, "repo_info", fail)
    with pytest.raises(EnvError, match=r"(?s)or pass --hub-folder DIR.*no route to host"):
        pin(manifest)


def test_without_its_package_the_message_names_the_extra(
    manifest: EnvManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no dependency of LayerZero."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvError, match=re.escape("pip install 'layerzero-broker[hub]'")):
        pin(manifest)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("path", "../../../bin/python", "string_pattern|match"),
        ("path", "/etc/passwd", "match"),
        ("path", "a//b.py", "match"),
        ("sha256", "0", "match"),
        ("size", -1, "greater"),
        ("size", 3.5, "integer"),
    ],
)
def test_what_is_no_lock_is_refused(manifest: EnvManifest, hub: Hub, key: str, value: object, says: str) -> None:
    """A path may not lead out of the environment."""
    lock = pin(manifest)
    content = json.loads(lock.data)
    content["files"][0][key] = value
    lock.path.write_text(json.dumps(content))
    with pytest.raises(EnvError, match=rf"(?s)is no lock of kernels.*{says}"):
        locks.read(manifest, "cpu")


@pytest.mark.parametrize(("key", "value"), [("repository", "an/other"), ("build", "torch-cpu")])
def test_a_lock_of_something_else_is_refused(manifest: EnvManifest, hub: Hub, key: str, value: str) -> None:
    """The manifest has changed since."""
    lock = pin(manifest)
    lock.path.write_text(json.dumps({**json.loads(lock.data), key: value}))
    with pytest.raises(EnvError, match=f"is of {key} {value}"):
        locks.read(manifest, "cpu")


def test_a_new_lock_has_no_old_signature(manifest: EnvManifest, hub: Hub) -> None:
    """It would be that of other bytes."""
    path = locks.signature_path(pin(manifest).path)
    path.write_bytes(b"x" * 64)
    pin(manifest)
    assert not path.exists()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"some/kernels"', '"kernels"', ["hub.repository", "'kernels'"]),
        ('"some/kernels"', '"../x/y"', ["hub.repository"]),
        ('"v1"', '"../v1"', ["hub.revision"]),
        ('{ cpu = "torch-universal" }', '{ cpu = "../x" }', ["hub.build.cpu"]),
        (
            '{ cpu = "torch-universal" }',
            '{ cu13 = "torch-universal" }',
            ["hub.build must name", "[variants.*]"],
        ),
        ('revision = "v1"', 'revision = "v1"\nversion = 1', ["hub.version", "Known: repository, revision, build"]),
        ("[hub]", '[env]\nLAYERZERO_HUB_KERNELS = "/tmp"\n[hub]', ["env.LAYERZERO_HUB_KERNELS", "other than"]),
    ],
)
def test_mistakes_of_the_manifest_are_named(folder: Path, old: str, new: str, named: list[str]) -> None:
    path = folder / "sample.toml"
    path.write_text(MANIFEST.replace(old, new))
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert [word for word in named if word not in str(refused.value)] == []


def test_the_lock_is_part_of_what_lz_env_add_allows(folder: Path, manifest: EnvManifest, hub: Hub) -> None:
    """What was allowed is all the code that runs."""
    pin(manifest)
    (folder / "sample.cpu.txt").write_text("numpy==2.4.6\n")
    bundle = read_folder(folder, "sample", "here")
    assert "sample.cpu.hub.json" in bundle.files
    (folder / "sample.cpu.hub.json").unlink()
    with pytest.raises(ConfigError, match=r"sample\.cpu\.hub\.json"):
        read_folder(folder, "sample", "here")


def test_export_refuses_them_by_name(folder: Path, manifest: EnvManifest, hub: Hub) -> None:
    """An environment that arrives without its kernels would be found out late."""
    pin(manifest)
    (folder / "sample.cpu.txt").write_text("numpy==2.4.6\n")
    with pytest.raises(EnvError, match="has kernels of the hub"):
        export(manifest, folder / "out.tar.gz", store=folder / "store")


def test_a_build_without_a_network_does_not_ask_the_hub(manifest: EnvManifest, hub: Hub, tmp_path: Path) -> None:
    """--offline, --wheelhouse and --overlay mean it."""
    pin(manifest)
    hub.asked.clear()
    kernels = kernels_of(manifest, "cpu", HubAccess(allows_unsigned=True).offline())
    assert kernels is not None
    with pytest.raises(EnvError, match=r"pass --hub-folder DIR .* uses no network"):
        kernels.place(tmp_path / "env")
    assert hub.asked == []
