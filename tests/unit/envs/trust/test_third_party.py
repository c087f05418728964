"""Backends from outside are found without importing them, and count when their very sources are allowed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import outside
from typer.testing import CliRunner

from layerzero.client.cli import env
from layerzero.envs.__main__ import app
from layerzero.envs.cli.additions import Site
from layerzero.envs.manifest import EnvManifest, Problem
from layerzero.envs.transfer.gc import collect
from layerzero.envs.trust import allowed, third_party
from layerzero.envs.trust.allowed import Allowed
from layerzero.envs.trust.bundle import read_folder
from layerzero.ipc.errors import ConfigError

Found = tuple[dict[str, EnvManifest], list[Problem]]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that this interpreter looks into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def discover(tmp_path: Path) -> Callable[..., Found]:
    def ask(**said: str) -> Found:
        values = {name: Allowed(value, str(tmp_path / "backends" / "allowed.json")) for name, value in said.items()}
        backends, store = tmp_path / "backends", tmp_path / "store"
        return third_party.discover((), backends=backends, store=store, allowed=values)

    return ask


def hash_of(folder: Path) -> str:
    return read_folder(folder, "theirs", "").sha256


def test_installed_backend_is_refused_until_its_sources_are_allowed(site: Path, discover: Callable[..., Found]) -> None:
    """What pip brings must not run because it is there. Nothing is imported: the package raises when it is."""
    folder = outside.install(site, "theirs")
    source = discover()[0]["theirs"].source
    assert source is not None
    assert source.refusal == (
        f"kernel_sources does not list backend 'theirs' of lz_theirs 1.0, installed in {folder} ({hash_of(folder)}), "
        "so it is neither built nor run"
    )
    assert (source.repair, source.is_changed) == ("lz env add theirs", False)
    assert discover(theirs=hash_of(folder))[0]["theirs"].is_allowed
    assert "lz_theirs" not in sys.modules


def test_refused_backend_can_be_neither_built_nor_run(site: Path, discover: Callable[..., Found]) -> None:
    """Whoever forgets to ask is stopped where the builder and the worker's start must pass."""
    outside.install(site, "theirs")
    refused = discover()[0]["theirs"]
    with pytest.raises(ConfigError, match="repair: lz env add theirs"):
        refused.requirements("cpu")
    with pytest.raises(ConfigError, match="repair: lz env add theirs"):
        _ = refused.provider_target


def test_changed_sources_are_refused_with_both_hashes(site: Path, discover: Callable[..., Found]) -> None:
    """An upgrade of the package is code that nobody has looked at."""
    folder = outside.install(site, "theirs")
    before = hash_of(folder)
    (folder / "provider.py").write_text("import os\n")
    source = discover(theirs=before)[0]["theirs"].source
    assert source is not None
    assert source.is_changed
    for fact in (before, hash_of(folder), "have changed", "kernel_sources allows"):
        assert fact in source.refusal
    assert source.repair == "lz env add theirs"


def test_policy_may_refuse_by_name(site: Path, discover: Callable[..., Found]) -> None:
    """An operator forbids what a user has added."""
    outside.install(site, "theirs")
    source = discover(theirs="refuse")[0]["theirs"].source
    assert source is not None
    assert "kernel_sources refuses backend 'theirs'" in source.refusal


def test_backend_runs_from_a_copy_in_the_store(site: Path, tmp_path: Path, discover: Callable[..., Found]) -> None:
    """What was hashed is what is run, whatever happens to the package meanwhile."""
    folder = outside.install(site, "theirs")
    manifest = discover(theirs=hash_of(folder))[0]["theirs"]
    assert Path(manifest.provider_target).is_relative_to(tmp_path / "store" / "backends")
    assert manifest.lock_path("cpu").read_text() == outside.LOCK


@pytest.mark.parametrize(
    ("arrange", "says"),
    [
        (lambda site: outside.install(site, "torch"), "name 'torch' is taken by"),
        (lambda site: outside.install(site, "theirs", value="lz_theirs:load"), "must be a package"),
        (lambda site: outside.install(site, "theirs", value="lz_gone"), "package 'lz_gone' is not there"),
        (lambda site: outside.install(site, "theirs", manifest="nonsense"), "cannot be read as TOML"),
        (
            lambda site: [outside.install(site, "theirs"), outside.install(site, "theirs", package="lz_other")],
            "is declared by both",
        ),
    ],
)
def test_what_cannot_be_used_is_a_problem_and_harms_no_other(
    site: Path, discover: Callable[..., Found], arrange: Callable[[Path], object], says: str
) -> None:
    """One broken package must not take the broker down, and must not be passed over in silence."""
    arrange(site)
    found, problems = discover()
    assert [says in problem.message for problem in problems] == [True]
    assert "theirs" not in found
    assert found["torch"].source is None


def test_inner_package_is_found_without_importing_the_outer_one(site: Path, discover: Callable[..., Found]) -> None:
    """importlib's own search would import it."""
    folder = outside.install(site, "theirs", value="lz_theirs.inner")
    outside.write(folder / "inner", "theirs")
    assert "theirs" in discover()[0]
    assert "lz_theirs" not in sys.modules


def test_what_was_added_is_kept_and_counts_before_what_is_installed(
    site: Path, tmp_path: Path, discover: Callable[..., Found]
) -> None:
    """Of two with one name the choice is told."""
    outside.install(site, "theirs")
    other = read_folder(outside.write(tmp_path / "own", "theirs", provider="OWN = 1\n"), "theirs", "own")
    assert allowed.allow(tmp_path / "backends", other, keep=True) == ""
    found, problems = discover(**allowed.read_record(tmp_path / "backends"))
    assert found["theirs"].is_allowed
    assert found["theirs"].source is not None
    assert found["theirs"].source.sha256 == other.sha256
    assert ["what was added counts" in problem.message for problem in problems] == [True]
    assert allowed.forget(tmp_path / "backends", "theirs")
    assert allowed.read_record(tmp_path / "backends") == {}
    assert discover()[1] == []


def test_record_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """An empty list in its place would be written over it by the next add."""
    tmp_path.joinpath("allowed.json").write_text('{"kernel_sources": {"theirs": "yes"}}')
    with pytest.raises(ConfigError, match="is no list of allowed backends"):
        allowed.read_record(tmp_path)


def test_collecting_keeps_the_copies_in_use_and_removes_others(
    site: Path, tmp_path: Path, discover: Callable[..., Found]
) -> None:
    """Each change of a package leaves a copy behind."""
    folder = outside.install(site, "theirs")
    old = discover()[0]["theirs"].path.parent
    (folder / "provider.py").write_text("NEW = 1\n")
    new = discover()[0]["theirs"].path.parent
    collect(tmp_path / "store", (new,))
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("name", ["../precious", "{absolute}", ".", ""])
def test_only_a_name_can_be_removed(tmp_path: Path, name: str) -> None:
    """Whoever added a folder by its path may remove it by its path: the folder itself must survive that."""
    backends, precious = tmp_path / "backends", tmp_path / "precious"
    backends.mkdir()
    precious.mkdir()
    with pytest.raises(ConfigError, match="is no name of a backend"):
        allowed.forget(backends, name.format(absolute=precious))
    assert (precious.is_dir(), backends.is_dir()) == (True, True)


def test_collecting_wants_what_is_allowed_and_keeps_what_cannot_be_judged(site: Path, tmp_path: Path) -> None:
    """What was removed needs no environment, installed or not; a slip in a file is no reason to build again."""
    outside.install(site, "mine")
    outside.install(site, "theirs")
    outside.install(site, "broken", manifest="[")
    said = {"mine": Allowed(hash_of_mine(site), "a test")}
    found = Site(tmp_path / "backends", tmp_path / "store", (), said, "").wanted()
    assert ([path.name.partition("-")[0] for path in found[0]], found[1]) == (["mine"], {"broken"})
    unread = Site(tmp_path / "backends", tmp_path / "store", (), {}, "the policy cannot be read").wanted()
    assert len(unread[0]) == 2


def hash_of_mine(site: Path) -> str:
    return read_folder(site / "lz_mine", "mine", "").sha256


def test_export_and_import_know_backends_from_outside(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all other commands do: what is not allowed is refused with the command that allows it, and is not unknown."""
    folder = outside.install(site, "theirs")
    monkeypatch.setenv("LAYERZERO_BACKENDS_DIR", str(tmp_path / "backends"))
    words = ["export", "theirs", str(tmp_path / "x.tar.gz"), "--store", str(tmp_path / "store")]
    words += ["--wheelhouse", str(site)]
    refused = CliRunner().invoke(app, words, obj=env.site)
    assert (refused.exit_code, "repair: lz env add theirs" in refused.stderr) == (1, True)
    allowed.allow(tmp_path / "backends", read_folder(folder, "theirs", ""), keep=False)
    without_wheels = CliRunner().invoke(app, words, obj=env.site)
    assert (without_wheels.exit_code, "has no msgpack" in without_wheels.stderr) == (1, True)
    assert [path.name.partition("-")[0] for path in env.site(tmp_path / "store", ()).usable()] == ["theirs"]
