"""Wheels as whoever made them pleases: what they declare is read exactly, and nothing of them is believed."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path

import pytest
from tests import outside

from layerzero.envs.trust.bundle import MAX_FILE_BYTES, MAX_WHEEL_MEMBERS, Bundle, read_folder, read_wheel
from layerzero.ipc.errors import ConfigError

ENTRY_POINTS = "x-1.dist-info/entry_points.txt"


def wheel(path: Path, *entry_points: bytes) -> Path:
    """A wheel of lz_outside with the backend theirs, and these entry points, each of a distribution of its own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in outside.files("theirs").items():
            archive.writestr(f"lz_outside/{file}", text)
        for i, text in enumerate(entry_points):
            archive.writestr(ENTRY_POINTS.replace("x-1", f"x-{i + 1}"), text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        read_wheel(path)
    return refused.value.message


def test_a_backend_of_a_wheel_says_which_wheel_it_is_from(tmp_path: Path) -> None:
    (bundle,) = read_wheel(outside.wheel(tmp_path / "x.whl", "theirs"))
    assert (bundle.name, bundle.origin) == ("theirs", "x.whl")


def test_text_around_a_declaration_may_be_of_any_encoding(tmp_path: Path) -> None:
    """What is no UTF-8 is a comment of somebody's, no reason for a traceback."""
    path = wheel(tmp_path / "x.whl", b"# \xe4\n[layerzero.backends]\ntheirs = lz_outside\n")
    assert [bundle.name for bundle in read_wheel(path)] == ["theirs"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"theirs:x = lz_outside", "{path}: 'theirs:x' is no name of a backend; allowed: "),
        (b"theirs = %(home)s", "{path}: entry point theirs: '%(home)s' must be a package, such as my_backend: "),
        (b"Theirs = lz_outside", "{path}: 'Theirs' is no name of a backend; allowed: "),
        (b"theirs = lz_elsewhere.inner", "{path}: lz_elsewhere/inner/theirs.toml is not in it"),
        (b"theirs = lz_outside\ntheirs = lz_outside", "{path}: x-1.dist-info/entry_points.txt: While reading from"),
    ],
)
def test_a_declaration_is_read_to_the_letter(tmp_path: Path, text: bytes, says: str) -> None:
    """As the interpreter reads it that it is installed for: not with other delimiters, and no values put in."""
    path = wheel(tmp_path / "x.whl", b"[layerzero.backends]\n" + text + b"\n")
    assert refusal(path).startswith(says.format(path=path))


def test_a_declaration_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path) -> None:
    path = wheel(tmp_path / "x.whl", b"theirs = lz_outside\n")
    assert refusal(path) == f"{path}: {ENTRY_POINTS}: File contains no section headers."


@pytest.mark.parametrize("count", [0, 2])
def test_a_wheel_with_no_declaration_or_several_is_refused(tmp_path: Path, count: int) -> None:
    """Which of two pip would take is not for us to guess."""
    path = wheel(tmp_path / "x.whl", *[b"[layerzero.backends]\ntheirs = lz_outside\n"] * count)
    assert "declares no backend" in refusal(path)


def test_an_error_in_a_manifest_names_wheel_and_folder(tmp_path: Path) -> None:
    path = outside.wheel(tmp_path / "x.whl", "theirs", manifest="nonsense")
    assert refusal(path).startswith(f"{path}: lz_outside: theirs.toml: cannot be read as TOML")


@pytest.mark.parametrize("spare", [0, -1])
def test_a_wheel_may_have_so_many_files_and_no_more(tmp_path: Path, spare: int) -> None:
    """A list of millions takes memory before anything is read."""
    path = outside.wheel(tmp_path / "x.whl", "theirs")
    with zipfile.ZipFile(path, "a") as archive:
        for i in range(MAX_WHEEL_MEMBERS - len(archive.infolist()) - spare):
            archive.writestr(f"{i}", b"")
    if spare < 0:
        assert refusal(path) == f"{path}: has 10001 files; allowed: 10000"
    else:
        assert [bundle.name for bundle in read_wheel(path)] == ["theirs"]


def test_files_of_just_the_size_that_is_allowed_are_read(tmp_path: Path) -> None:
    provider = "#" * MAX_FILE_BYTES
    (bundle,) = read_wheel(outside.wheel(tmp_path / "x.whl", "theirs", provider=provider))
    assert read_folder(outside.write(tmp_path / "theirs", "theirs", provider=provider), "theirs", "") == Bundle(
        "theirs", bundle.files, ""
    )


@pytest.mark.parametrize("is_wheel", [True, False])
def test_a_file_that_is_far_too_large_takes_no_memory(tmp_path: Path, is_wheel: bool) -> None:
    """A few bytes of a wheel, or of a disk, may stand for gigabytes."""
    large = 16 << 20
    if is_wheel:
        path = outside.wheel(tmp_path / "x.whl", "theirs", provider="\0" * large)
    else:
        with (outside.write(tmp_path, "theirs") / "provider.py").open("wb") as file:
            file.truncate(large)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="larger than 1,048,576 bytes"):
        read_wheel(path) if is_wheel else read_folder(tmp_path, "theirs", "")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < large // 2
