"""Which packages are looked into, and what is told of those that cannot be used."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests import outside

from layerzero.envs.manifest import Problem, Source
from layerzero.envs.trust import allowed, third_party
from layerzero.envs.trust.allowed import Allowed
from layerzero.envs.trust.bundle import MAX_FILE_BYTES, read_folder
from layerzero.ipc.errors import ConfigError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The last of three folders of packages that this interpreter looks into first."""
    for name in ("site", "second", "first"):
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path / name)
    return tmp_path / "site"


def declare(site: Path, dist: str, entry_points: str) -> Path:
    """A distribution without files. Returns the folder of its metadata."""
    folder = site / f"{dist}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(entry_points)
    return folder


def problems(tmp_path: Path) -> list[Problem]:
    return third_party.discover((), backends=tmp_path / "backends", store=tmp_path / "store", allowed={})[1]


def judged(tmp_path: Path, said: dict[str, Allowed]) -> Source:
    return third_party.judge_now("theirs", backends=tmp_path / "backends", store=tmp_path / "store", allowed=said)


# --- what is installed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["lz_theirs", "lz-theirs", "LZ.Theirs", "lz-_theirs"])
def test_of_distributions_with_one_name_the_first_counts(site: Path, tmp_path: Path, other: str) -> None:
    """As for Python, which takes the first package that it finds; names are equal as pip says. What comes after them is
    looked at all the same."""
    declare(tmp_path / "first", other, "[layerzero.backends]\nmine = lz_mine\n")
    outside.install(tmp_path / "second", "theirs")
    folder = outside.install(site, "yours", package="lz_mine")
    found = third_party.installed()
    assert {name: place.origin for name, place in found.items()} == {
        "mine": f"{other} 1.0, installed in {folder}",
        "yours": f"lz_mine 1.0, installed in {folder}",
    }


def test_distributions_of_no_concern_are_passed_over(site: Path, tmp_path: Path) -> None:
    """Those with other entry points, and those without any."""
    declare(tmp_path / "first", "tool", "[console_scripts]\nx = x:main\n")
    (declare(tmp_path / "second", "library", "") / "entry_points.txt").unlink()
    folder = outside.install(site, "theirs")
    assert third_party.installed() == {
        "theirs": third_party.Place("theirs", folder, f"lz_theirs 1.0, installed in {folder}")
    }


def test_metadata_that_cannot_be_read_is_told_and_declares_nothing(
    site: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever misses a backend finds the reason in the log; the others are there."""
    text = "[layerzero.backends]\nother = lz_other\n"
    folder = declare(tmp_path / "first", "large", text + "#" * MAX_FILE_BYTES)
    outside.install(site, "theirs")
    assert list(third_party.installed()) == ["theirs"]
    (record,) = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert {key: record[key] for key in ("event", "folder", "error")} == {
        "event": "metadata.unreadable",
        "folder": str(folder),
        "error": "OSError: [Errno 27] larger than 1,048,576 bytes, the most that is allowed",
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("lz_gone", "lz_theirs 1.0: entry point theirs: package 'lz_gone' is not there; install it again"),
        ("lz_theirs:load", "lz_theirs 1.0: entry point theirs: 'lz_theirs:load' must be a package, such as"),
        ("lz_module", "lz_theirs 1.0: entry point theirs: package 'lz_module' is not there; install it again"),
    ],
)
def test_an_entry_point_that_leads_nowhere_is_named_with_its_distribution(
    site: Path, tmp_path: Path, value: str, says: str
) -> None:
    """That is what can be uninstalled. There is no folder to look into."""
    outside.install(site, "theirs", value=value)
    (site / "lz_module.py").write_text("raise RuntimeError('nothing of it may be imported')\n")
    (problem,) = problems(tmp_path)
    assert (problem.name, problem.path) == ("theirs", Path())
    assert problem.message.startswith(says)
    place = third_party.installed()["theirs"]
    assert (place.name, place.origin, place.problem) == ("theirs", "lz_theirs 1.0", problem.message)


def test_a_module_that_nobody_can_tell_the_place_of_is_no_package(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something has put it there by hand; Python itself raises when it is asked for its place."""
    outside.install(site, "theirs", value="lz_bare")
    monkeypatch.setitem(sys.modules, "lz_bare", ModuleType("lz_bare"))
    assert "package 'lz_bare' is not there" in third_party.installed()["theirs"].problem


def test_a_distribution_that_lies_in_no_folder_declares_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Importers of other kinds have such: how large their metadata are nobody can tell before they are read."""

    class Nowhere(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str:
            return "[layerzero.backends]\nother = lz_other\n"

        def locate_file(self, path: str | os.PathLike[str]) -> Path:
            return Path(path)

    class Finder:
        def find_spec(self, *_: object) -> None:
            return None

        def find_distributions(self, *_: object) -> list[importlib.metadata.Distribution]:
            return [Nowhere()]

    outside.install(site, "theirs")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert list(third_party.installed()) == ["theirs"]
    assert "metadata.unreadable" not in capfd.readouterr().err


def test_a_name_that_two_distributions_declare_is_nobodys(site: Path, tmp_path: Path) -> None:
    """Which one would run must not depend on an order of folders."""
    outside.install(site, "theirs")
    outside.install(site, "theirs", package="lz_other")
    (problem,) = problems(tmp_path)
    assert (problem.name, problem.path) == ("theirs", Path())
    assert "backend 'theirs' is declared by both lz_" in problem.message
    assert "1.0; uninstall one of them" in problem.message
    place = third_party.installed()["theirs"]
    assert (place.name, place.folder) == ("theirs", Path())
    assert place.origin in ("lz_theirs 1.0", "lz_other 1.0")


# --- what is there twice, and what cannot be read -------------------------------------------------------------


def test_what_was_added_over_what_is_installed_is_told_with_both_places(site: Path, tmp_path: Path) -> None:
    """And so is whatever else cannot be used, here a manifest in a folder of the broker's own."""
    folder = outside.install(site, "theirs")
    own = read_folder(outside.write(tmp_path / "own", "theirs", provider="OWN = 1\n"), "theirs", "own")
    allowed.allow(tmp_path / "backends", own, keep=True)
    (tmp_path / "broken.toml").write_text("nonsense")
    added = tmp_path / "backends" / "theirs"
    found, told = third_party.discover(
        (tmp_path,), backends=tmp_path / "backends", store=tmp_path / "store", allowed={}
    )
    source = found["theirs"].source
    assert source is not None
    assert (source.origin, source.sha256) == (f"{added}, added there", own.sha256)
    assert [problem.name for problem in told] == ["broken", "theirs"]
    assert told[1] == Problem(
        "theirs",
        added,
        f"backend 'theirs' was added to {added} and is declared by lz_theirs 1.0, installed in {folder}; what was "
        "added counts. To use the other: lz env remove theirs, then lz env add theirs",
    )


def test_a_backend_that_cannot_be_read_is_told_with_its_folder(site: Path, tmp_path: Path) -> None:
    folder = outside.install(site, "theirs", manifest="nonsense")
    (problem,) = problems(tmp_path)
    assert (problem.name, problem.path) == ("theirs", folder)


def test_a_store_that_cannot_be_written_is_named_with_the_cause(site: Path, tmp_path: Path) -> None:
    """The backend is well; it is the disk that somebody has to look at."""
    folder = outside.install(site, "theirs")
    (tmp_path / "store").write_text("")
    (problem,) = problems(tmp_path)
    says = f"lz_theirs 1.0, installed in {folder}: cannot be copied to {tmp_path / 'store'}: Not a directory"
    assert problem == Problem("theirs", folder, says)


# --- whether it is allowed, at this moment --------------------------------------------------------------------


def test_who_is_allowed_is_told_by_the_sources_of_this_moment(site: Path, tmp_path: Path) -> None:
    """A worker is started from the copy: it is mended first."""
    folder = outside.install(site, "theirs")
    bundle = read_folder(folder, "theirs", f"lz_theirs 1.0, installed in {folder}")
    said = {"theirs": Allowed(bundle.sha256, "a policy")}
    assert judged(tmp_path, said) == Source(bundle.origin, bundle.sha256)
    (bundle.staged_path(tmp_path / "store") / "provider.py").write_text("OTHER = 1\n")
    judged(tmp_path, said)
    assert (bundle.staged_path(tmp_path / "store") / "provider.py").read_text() == outside.PROVIDER
    (folder / "provider.py").write_text("NEW = 1\n")
    assert judged(tmp_path, said).is_changed


def test_who_is_not_there_any_more_is_named_with_where_it_was_looked_for(site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        judged(tmp_path, {})
    assert refused.value.message == f"no installed package declares it, and {tmp_path / 'backends'} does not have it"


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_repair_of_changed_sources_is_in_the_file_that_allows_them(
    site: Path, tmp_path: Path, is_ours: bool
) -> None:
    """`lz env add` writes its own record, and no policy of an operator's."""
    folder = outside.install(site, "theirs")
    sha256 = read_folder(folder, "theirs", "").sha256
    origin = f"{tmp_path / 'backends' / 'allowed.json'}" if is_ours else "/etc/policy.yaml"
    before = f"sha256:{'0' * 64}"
    source = judged(tmp_path, {"theirs": Allowed(before, origin)})
    repair = "lz env add theirs" if is_ours else f"set kernel_sources.theirs to {sha256} in /etc/policy.yaml"
    assert (source.sha256, source.repair, source.is_changed) == (sha256, repair, True)
    assert source.refusal == (
        f"the sources of backend 'theirs' of {source.origin} have changed: they are {sha256}, kernel_sources allows "
        f"{before} ({origin})"
    )


def test_what_a_policy_refuses_is_repaired_there(site: Path, tmp_path: Path) -> None:
    folder = outside.install(site, "theirs")
    source = judged(tmp_path, {"theirs": Allowed("refuse", "/etc/policy.yaml")})
    assert source.origin == f"lz_theirs 1.0, installed in {folder}"
    assert source.refusal == f"kernel_sources refuses backend 'theirs' of {source.origin} (/etc/policy.yaml)"
    assert (source.repair, source.is_changed) == ("take theirs out of kernel_sources in /etc/policy.yaml", False)
