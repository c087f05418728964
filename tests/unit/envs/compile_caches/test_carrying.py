"""Compilers' caches carried: whole, signed, between equal locks and equal machines, and within their folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerzero.envs import signing
from layerzero.envs.build.build import plan, resolve
from layerzero.envs.build.env import Env
from layerzero.envs.compile_caches import carrying
from layerzero.envs.compile_caches.carrying import export, open_all, shared, take
from layerzero.envs.probe.caches import compiled, note_compiled
from layerzero.envs.probe.probe import probe_key
from layerzero.ipc.compile_caches import folder as folders
from layerzero.ipc.compile_caches import manifest
from layerzero.ipc.compile_caches.exported import shipped
from layerzero.ipc.errors import ConfigError
from layerzero.workers import compile_cache

PLACE = "sm_90-driver580-cu13-1a2b3c4d"
UNIT = ("null.null", "row=1")
GROUP = "triton/ABC/__grp__k.json"


def env_in(store: Path, **changes: str) -> Env:
    return replace(plan(resolve("null"), store=store), place=PLACE, **changes)  # type: ignore[arg-type]


def fill(env: Env) -> None:
    """As Triton does it (FileCacheManager of triton/runtime/cache.py): a group names its files by absolute paths."""
    folder = env.cache / "triton/ABC"
    folder.mkdir(parents=True)
    (folder / "k.cubin").write_bytes(b"\x7fELF")
    (env.cache / GROUP).write_text(json.dumps({"child_paths": {"k.cubin": str(folder / "k.cubin")}}))
    folders.make(env.cache)
    folders.seal(env.cache)
    note_compiled(env, probe_key(env, resolve("null")), [UNIT])


class Way:
    """From one store to another by a folder, signed by `ci`."""

    def __init__(self, top: Path) -> None:
        self.folder, self.keys = top / "caches-of-ci", top / "keys"
        self.here, self.there = env_in(top / "here"), env_in(top / "there")
        signing.make(top / "ci.key")
        self.key = signing.read_private(top / "ci.key")
        signing.trust(self.keys, "ci", top / "ci.key.pub")
        fill(self.here)
        assert export(self.here, resolve("null"), self.folder, self.key) is not None
        self.cache = self.folder / f"null-{self.here.id}" / PLACE

    def take(self, env: Env | None = None, *, allows_unsigned: bool = False) -> int:
        (opened,) = open_all(self.folder, self.keys, allows_unsigned=allows_unsigned)
        return take(opened, env or self.there, resolve("null"))

    def change(self, change: Callable[[Any], object]) -> None:
        """The manifest, which is signed again: who signs may be mistaken, too."""
        path = self.cache / "manifest.json"
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
        (self.cache / "manifest.sig").write_bytes(signing.sign(self.key, path.read_bytes()))

    @property
    def blobs(self) -> dict[str, Path]:
        """By the paths of the files."""
        files = json.loads((self.cache / "manifest.json").read_text())["files"]
        return {path: self.cache / "files" / sha256 for path, _, sha256 in files}


@pytest.fixture
def way(tmp_path: Path) -> Way:
    return Way(tmp_path)


def test_a_cache_arrives_as_it_left_and_triton_finds_its_files(way: Way) -> None:
    assert way.take() == 2
    moved = way.there.cache / "triton/ABC/k.cubin"
    assert moved.read_bytes() == b"\x7fELF"
    assert json.loads((way.there.cache / GROUP).read_text()) == {"child_paths": {"k.cubin": str(moved)}}
    assert folders.look(way.there.cache).unfit == []
    assert list(compiled(way.there, probe_key(way.there, resolve("null")))) == [UNIT]
    assert way.take() == 0  # what is here stays


def test_what_is_noted_is_added_to_what_is_noted_here(way: Way) -> None:
    """It once was not, and a kernel that had come was handed to a compiler."""
    key = probe_key(way.there, resolve("null"))
    note_compiled(way.there, key, [("null.null", "row=7")])
    way.take()
    assert list(compiled(way.there, key)) == [("null.null", "row=7"), UNIT]


def corrupt(way: Way) -> None:
    blob = way.blobs["triton/ABC/k.cubin"]
    blob.write_bytes(b"\x7fELG")


def lose(way: Way) -> None:
    way.blobs["triton/ABC/k.cubin"].unlink()


def link(way: Way) -> None:
    blob = way.blobs["triton/ABC/k.cubin"]
    blob.rename(blob.with_name("moved"))
    blob.symlink_to("moved")


def edit(way: Way) -> None:
    path = way.cache / "manifest.json"
    path.write_text(path.read_text().replace("k.cubin", "q.cubin"))


def leave(path: str) -> Callable[[Way], None]:
    return lambda way: way.change(lambda value: value["files"][0].__setitem__(0, path))


def lead_out(at: str) -> Callable[[Way], None]:
    def harm(way: Way) -> None:
        data = json.dumps({"child_paths": {"k.cubin": at}}).encode()
        name = manifest.hashlib.sha256(data).hexdigest()
        (way.cache / "files" / name).write_bytes(data)
        way.change(lambda value: value["files"].__setitem__(0, [GROUP, len(data), name]))

    return harm


def both(way: Way) -> None:
    def nest(value: Any) -> None:
        value["files"][1][0] = f"{value['files'][0][0]}/more"

    way.change(nest)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (corrupt, "its bytes are not those of the manifest"),
        (lose, "No such file"),
        (link, "is a symbolic link"),
        (edit, "signed by nobody known, or was changed since"),
        (leave("../../evil.so"), "no path inside of a cache"),
        (leave("/etc/cron.d/evil"), "no path inside of a cache"),
        (leave("triton//x"), "no path inside of a cache"),
        (leave(".lz/manifest.json"), "no path inside of a cache"),
        (leave("a\nb"), "no path inside of a cache"),
        (lead_out("/usr/lib/evil.cubin"), "is not inside of the cache"),
        (lead_out("{cache}/../../evil.cubin"), "is not inside of the cache"),
        (both, "is a file and a folder"),
        (lambda way: way.change(lambda value: value.update(kind="other")), "is none of"),
        (lambda way: way.change(lambda value: value["files"].append(value["files"][0])), "listed twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_refuses_all_of_it(way: Way, harm: Callable[[Way], None], why: str) -> None:
    harm(way)
    with pytest.raises(ConfigError, match=why):
        way.take()
    assert not way.there.cache.exists()  # an empty one would be listed


def test_what_the_manifest_does_not_name_is_not_taken(way: Way) -> None:
    (way.cache / "files" / ("0" * 64)).write_bytes(b"more")
    (way.cache / "evil.so").write_bytes(b"more")
    assert way.take() == 2
    assert sorted(path for path, _ in manifest.walk(way.there.cache)) == [GROUP, "triton/ABC/k.cubin"]


def test_a_foreign_key_or_none_is_not_enough(way: Way, tmp_path: Path) -> None:
    signing.distrust(way.keys, "ci")
    with pytest.raises(ConfigError, match="trusted: none"):
        way.take()
    (way.cache / "manifest.sig").unlink()
    with pytest.raises(ConfigError, match="has no signature"):
        way.take()
    assert way.take(allows_unsigned=True) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id": "0" * 16}, "another lock: environment"),
        ({"lock_hash": "f" * 64}, "another lock: environment"),
        ({"place": PLACE.replace("sm_90", "sm_80")}, "it is for sm_90-driver580"),
    ],
)
def test_another_lock_or_another_machine_is_refused(way: Way, changes: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        way.take(replace(way.there, **changes))  # type: ignore[arg-type]


def test_what_is_in_use_or_damaged_is_neither_exported_nor_overwritten(way: Way) -> None:
    user = folders.User.enter(way.there.cache, keeps=True, say=print)
    with pytest.raises(ConfigError, match="lz down"):
        way.take()
    user.leave()
    (way.here.cache / "triton/ABC/k.cubin").write_bytes(b"\x7fELG")
    file = way.here.cache / "triton/ABC/k.cubin"
    entry = (manifest.read(way.here.cache) or {})["triton/ABC/k.cubin"]
    manifest.os.utime(file, ns=(entry.time_ns, entry.time_ns))
    with pytest.raises(ConfigError, match="lz cache verify"):
        export(way.here, resolve("null"), way.folder, way.key)


def test_what_another_process_has_made_meanwhile_stays(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look whether there is a cache and the lock on it, where what comes is refused then."""

    def make(folder: Path) -> None:
        monkeypatch.undo()
        fill(way.there)

    (opened,) = open_all(way.folder, way.keys, allows_unsigned=False)
    shutil.rmtree(way.cache / "files")
    monkeypatch.setattr(carrying.folders, "make", make)
    with pytest.raises(ConfigError, match="was taken over"):
        take(opened, way.there, resolve("null"))
    assert (way.there.cache / GROUP).exists()


def test_a_fleets_folder_is_looked_up_where_nothing_is_here(way: Way, tmp_path: Path) -> None:
    opened = shared(way.folder, way.there, way.keys)
    assert opened is not None
    assert opened.signer == "ci"
    way.take()
    assert shared(way.folder, way.there, way.keys) is None
    assert shared(tmp_path / "nothing", way.there, way.keys) is None
    elsewhere = env_in(tmp_path / "elsewhere")
    shutil.rmtree(way.keys)
    with pytest.raises(ConfigError, match="trusted: none"):
        shared(way.folder, elsewhere, way.keys)


def test_an_image_ships_caches_that_its_worker_begins_with(
    way: Way, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the agent of a joined worker tells its children (workers/agent.py)."""
    lines = shipped(way.folder, "null", way.here.id)
    assert lines == [f"{manifest.sha256_of(way.cache / 'manifest.json')}:{way.cache}"]
    assert shipped(way.folder, "null", "0" * 16) == []
    target = tmp_path / "cache"
    compile_cache.enter(str(target), {compile_cache.SHARED_VARIABLE: "\n".join(lines)}).leave()
    assert "took over 2 files" in capfd.readouterr().err
    assert folders.look(target).sealed == 2
    group = json.loads((target / GROUP).read_text())["child_paths"]
    assert group == {"k.cubin": str(target / "triton/ABC/k.cubin")}
    edit(way)
    other = tmp_path / "other"
    compile_cache.enter(str(other), {compile_cache.SHARED_VARIABLE: lines[0]}).leave()
    assert "another one than was checked" in capfd.readouterr().err
    assert list(manifest.walk(other)) == []


def test_the_form_has_bounds() -> None:
    about = dict.fromkeys(carrying.form.ABOUT, "x")
    value = {"kind": carrying.form.KIND, "schema": 1, "about": about, "compiled": {"key": "", "units": []}, "files": []}
    assert carrying.form.Exported.unpack(json.dumps(value).encode()).files == []
    for wrong in (
        {**value, "about": {**about, "more": "x"}},
        {**value, "about": {**about, "name": "x" * 301}},
        {**value, "files": [["a", -1, "0" * 64]]},
        {**value, "files": [["a", 1, "0" * 63]]},
        {**value, "files": [["a", 1]]},
        {**value, "files": 7},
        [],
    ):
        with pytest.raises(carrying.Wrong):
            carrying.form.Exported.unpack(json.dumps(wrong).encode())
