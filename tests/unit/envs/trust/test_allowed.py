"""The record of backends that `lz env add` has allowed: what it says stays, and what is no record is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import outside

from layerzero.envs.cli import additions
from layerzero.envs.trust import allowed
from layerzero.envs.trust.bundle import Bundle, read_folder
from layerzero.ipc.errors import ConfigError

HASH = f"sha256:{'0' * 64}"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return read_folder(outside.write(tmp_path / "source", "theirs"), "theirs", "a test")


def write(backends: Path, text: str) -> None:
    backends.mkdir(exist_ok=True)
    allowed.record_path(backends).write_text(text)


def test_allowing_anew_tells_what_was_allowed_before(tmp_path: Path, bundle: Bundle) -> None:
    """Whoever adds an upgrade sees what it takes the place of."""
    assert allowed.allow(tmp_path, bundle, keep=False) == ""
    changed = Bundle("theirs", {**bundle.files, "provider.py": b"NEW = 1\n"}, "a test")
    assert allowed.allow(tmp_path, changed, keep=False) == bundle.sha256
    assert allowed.read_record(tmp_path) == {"theirs": changed.sha256}


def test_a_copy_that_the_record_lacks_is_removed(tmp_path: Path) -> None:
    """Of an `add` that ended between the two; nobody would have it otherwise."""
    left = tmp_path / "theirs"
    left.mkdir()
    with pytest.raises(ConfigError, match=r"^name what can be forgotten: 'theirs'"):
        additions.remove("theirs", additions.Site(tmp_path, tmp_path / "store", (), {}, ""))
    assert not left.exists()


def test_what_others_were_allowed_stays(tmp_path: Path, bundle: Bundle) -> None:
    """One file is for all of them."""
    write(tmp_path, json.dumps({"kernel_sources": {"other": HASH, "refused": "refuse"}}))
    allowed.allow(tmp_path, bundle, keep=False)
    assert allowed.read_record(tmp_path) == {"other": HASH, "refused": "refuse", "theirs": bundle.sha256}
    assert allowed.forget(tmp_path, "theirs")
    assert allowed.read_record(tmp_path) == {"other": HASH, "refused": "refuse"}


def test_sources_that_were_kept_go_with_what_takes_their_place(tmp_path: Path, bundle: Bundle) -> None:
    """They would count before what is installed."""
    allowed.allow(tmp_path / "backends", bundle, keep=True)
    kept = allowed.kept(tmp_path / "backends")
    assert {name: read_folder(folder, name, "").sha256 for name, folder in kept.items()} == {"theirs": bundle.sha256}
    allowed.allow(tmp_path / "backends", bundle, keep=False)
    assert allowed.kept(tmp_path / "backends") == {}


def test_what_is_not_there_can_be_forgotten_and_is_told(tmp_path: Path) -> None:
    """A second `lz env remove` finds nothing, and breaks nothing."""
    assert allowed.forget(tmp_path, "theirs") is False
    assert allowed.read_record(tmp_path) == {}


def test_what_is_no_name_is_refused_with_the_record_that_it_is_not_in(tmp_path: Path) -> None:
    """The user sees which of several folders was looked into."""
    with pytest.raises(ConfigError, match=r"allowed\.json: '\.\./x' is no name of a backend") as refused:
        allowed.forget(tmp_path, "../x")
    assert refused.value.message.startswith(str(allowed.record_path(tmp_path)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kernel_sources": {"theirs": "sha256:12"}}', "a value that is not of the form"),
        ('{"kernel_sources": {"theirs": 7}}', "a value that is not of the form"),
        ('{"kernel_sources": ["theirs"]}', ""),
        ('{"sources": {}}', "kernel_sources"),
        ("[1]", ""),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        (json.dumps({"kernel_sources": {"theirs": HASH}, "more": "x" * (1 << 20)}), "Unterminated"),
    ],
    ids=["short hash", "no text", "a list", "another key", "no object", "cut short", "deep", "large"],
)
def test_what_is_no_record_is_refused_with_its_path_and_the_repair(tmp_path: Path, text: str, says: str) -> None:
    """An empty record in its place would be written over it."""
    write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"allowed.json: is no list of allowed backends: .*{says}.*lz env add again"):
        allowed.read_record(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, bundle: Bundle) -> None:
    """With what the system says, and no traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/backends: Not a directory"):
        allowed.allow(tmp_path / "file" / "backends", bundle, keep=False)
