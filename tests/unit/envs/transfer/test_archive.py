"""Archives of environments: what we write we read, and nothing else."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerzero.envs.transfer import archive
from layerzero.envs.transfer.archive import INDEX, read, write
from layerzero.envs.transfer.gc import collect
from layerzero.envs.transfer.transfer import import_
from layerzero.ipc.errors import EnvError

ABOUT = {
    "name": "sample",
    "variant": "cpu",
    "python": "3.11.7",
    "platform": "linux-x86_64",
    "env_id": "0123456789abcdef",
    "made_by": "a test",
}
FILES: dict[str, Path | bytes] = {"manifest/sample.toml": b"summary\n", "wheels/leaf-1.0-py3-none-any.whl": b"w" * 3000}
BOMB = 64 << 20


def entry(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def listed(content: dict[str, bytes], /, **changes: Any) -> bytes:
    """An index of these files."""
    rows = [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in content.items()
    ]
    return json.dumps({"schema": 1, **ABOUT, "files": rows, **changes}).encode()


def pack(
    path: Path, *entries: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT, end: bytes = b""
) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as packed:
        with tarfile.open(mode="w|", fileobj=packed, format=form) as tar:
            for info, data in entries:
                tar.addfile(info, io.BytesIO(data))
        packed.write(end)
    return path


def refused(path: Path) -> str:
    """Why it is refused. Nothing outside the folder may come of it."""
    into = path.parent / "into"
    into.mkdir()
    before = {file for file in path.parent.rglob("*") if not file.is_relative_to(into)}
    with pytest.raises(EnvError) as caught:
        read(path, into)
    assert {file for file in path.parent.rglob("*") if not file.is_relative_to(into)} == before
    assert not any(file.is_symlink() for file in into.rglob("*"))
    assert str(path) in caught.value.facts["cause"]
    return str(caught.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """And equal content is an equal file, so that its hash can be published."""
    made = write(tmp_path / "a.tar.gz", ABOUT, FILES)
    write(tmp_path / "b.tar.gz", ABOUT, FILES)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    into = tmp_path / "into"
    into.mkdir()
    assert read(tmp_path / "a.tar.gz", into) == made
    assert {str(f.relative_to(into)): f.read_bytes() for f in into.rglob("*") if f.is_file()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "b.tar.gz", "into"]


def test_plain_tar_reads_it(tmp_path: Path) -> None:
    """Whoever wants to look inside needs nothing of ours."""
    write(tmp_path / "a.tar.gz", ABOUT, FILES)
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        assert tar.getnames() == [INDEX, *sorted(FILES)]


@pytest.mark.parametrize(
    "path",
    ["../evil", "/etc/evil", "wheels/../../evil", "wheels/a/b", "wheels/", "elsewhere/a", "wheels/.hidden",
     "wheels/a\nb", "wheels/" + "a" * 120, "manifest/a\0b", "wheels/ä.whl"],
)  # fmt: skip
def test_paths_that_an_export_does_not_have_are_refused(tmp_path: Path, path: str) -> None:
    """In the index, and in the tar's own headers."""
    assert "files.0.path" in refused(pack(tmp_path / "a.gz", entry(INDEX, listed({path: b""}))))
    shutil.rmtree(tmp_path / "into")
    good = {"wheels/a.whl": b""}
    header = entry(path.replace("\0", ""), b"")
    text = refused(pack(tmp_path / "b.gz", entry(INDEX, listed(good)), header, form=tarfile.GNU_FORMAT))
    assert any(word in text for word in ("is no path of an export", "only plain files", "is next in the index"))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "a symbolic link"),
        ({"type": tarfile.LNKTYPE, "linkname": INDEX}, "a hard link"),
        ({"type": tarfile.DIRTYPE}, "a folder"),
        ({"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}, "of type b'3'"),
        ({"type": tarfile.FIFOTYPE}, "of type b'6'"),
        ({"type": tarfile.XHDTYPE}, "an extended header"),
        ({"type": tarfile.GNUTYPE_LONGNAME}, "of type b'L'"),
        ({"type": tarfile.GNUTYPE_SPARSE}, "of type b'S'"),
    ],
)
def test_only_plain_files_are_unpacked(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    """A link or device is a way out of the folder."""
    made = pack(tmp_path / "a.gz", entry(INDEX, listed({"wheels/a.whl": b""})), entry("wheels/a.whl", **fields))
    assert word in refused(made)


def row(path: str, size: object) -> dict[str, object]:
    return {"path": path, "size": size, "sha256": "0" * 64}


INDEXES: dict[str, tuple[Callable[[], bytes], str]] = {
    "no JSON": (lambda: b"{", "Expecting"),
    "deep": (lambda: b"[" * 100_000, INDEX),
    "another schema": (lambda: listed({}, schema=2), "schema"),
    "unknown key": (lambda: listed({}, extra=1), "extra"),
    "a name that leads away": (lambda: listed({}, name="../x"), "name"),
    "another variant": (lambda: listed({}, variant="tpu"), "variant"),
    "text for a number": (lambda: listed({}, files=[row("wheels/a", "1")]), "size"),
    "a negative size": (lambda: listed({}, files=[row("wheels/a", -1)]), "size"),
    "more than a disk": (
        lambda: listed({}, files=[row(f"wheels/{n}", (8 << 30) - 1) for n in range(4000)]),
        "are free in",
    ),
    "a huge manifest": (lambda: listed({}, files=[row("lock/a", 1 << 30)]), "are allowed"),
    "one file twice": (lambda: listed({}, files=[row("lock/a", 0), row("lock/A", 0)]), "twice"),
    "too many files": (lambda: listed({f"wheels/{n}": b"" for n in range(4097)}), "files"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_index_is_checked_before_anything_is_unpacked(tmp_path: Path, case: str) -> None:
    """It is all that says what may come."""
    index, word = INDEXES[case]
    assert word in refused(pack(tmp_path / "a.gz", entry(INDEX, index()), entry("wheels/a", b"x")))
    assert list((tmp_path / "into").iterdir()) == []


def test_content_that_differs_from_the_index_is_refused(tmp_path: Path) -> None:
    """One bit, another size, another order, something more, something less."""
    files = {"lock/a": b"abc", "wheels/b": b"def"}
    index = entry(INDEX, listed(files))
    a, b = (entry(path, data) for path, data in files.items())
    cases = {
        "SHA-256": [index, a, entry("wheels/b", b"deg")],
        "4 bytes": [index, a, entry("wheels/b", b"def"), entry("wheels/c", b"")],
        "next in the index": [index, b, a],
        "cut short": [index, a],
        "no export of ours": [a, b, index],
    }
    for number, (word, entries) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = refused(pack(folder / "a.gz", *entries))
        assert (word if word != "4 bytes" else "more than its index lists") in said
    assert "more than its index lists" in refused(pack(tmp_path / "e.gz", index, a, b, end=b"\0" * 20_000))


@pytest.mark.parametrize("where", ["index", "file", "end", "extended header"])
def test_bombs_are_refused_without_being_unpacked(tmp_path: Path, where: str) -> None:
    """64 MiB of zeros are 64 KB of gzip; memory and disk must not grow with what an attacker writes."""
    index, zeros = entry(INDEX, listed({"wheels/a": b"a"})), b"\0" * BOMB
    entries = {
        "index": [entry(INDEX, zeros)],
        "file": [index, entry("wheels/a", zeros)],
        "end": [index, entry("wheels/a", b"a"), entry("wheels/b", zeros)],
        "extended header": [index, entry("wheels/a", zeros, type=tarfile.XHDTYPE)],
    }[where]
    refused(pack(tmp_path / "a.gz", *entries))
    assert sum(file.stat().st_size for file in (tmp_path / "into").rglob("*") if file.is_file()) <= 1


@pytest.mark.parametrize("damage", ["cut", "empty", "no gzip", "flipped", "absent"])
def test_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    """Copies over bad links are cut short."""
    path = tmp_path / "a.tar.gz"
    write(path, ABOUT, {**FILES, "wheels/b": bytes(range(256)) * 100})
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "no gzip":
            path.write_bytes(b"PK" + data)
        case "flipped":
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        case "absent":
            path.unlink()
    assert refused(path)


def test_archive_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle must not leave what looks like an export."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "_add", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a.tar.gz", ABOUT, FILES)
    assert list(tmp_path.iterdir()) == []


def test_hash_is_of_the_bytes_that_are_unpacked(tmp_path: Path) -> None:
    """Whoever can write to the folder of the archive could put another in its place after a look at the first."""
    write(tmp_path / "a.tar.gz", ABOUT, FILES)
    sha256 = archive.sha256_of(tmp_path / "a.tar.gz")
    (tmp_path / "good").mkdir()
    read(tmp_path / "a.tar.gz", tmp_path / "good", sha256.upper())
    (tmp_path / "other").mkdir()
    write(tmp_path / "a.tar.gz", ABOUT, {"wheels/leaf-1.0-py3-none-any.whl": b"other"})
    with pytest.raises(EnvError, match=f"and not {sha256}"):
        read(tmp_path / "a.tar.gz", tmp_path / "other", sha256)
    (tmp_path / "a.tar.gz").write_bytes(b"no archive at all")
    with pytest.raises(EnvError, match=f"and not {sha256}"):
        read(tmp_path / "a.tar.gz", tmp_path / "other", sha256)


def test_gc_leaves_an_import_that_is_under_way_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run from a timer."""
    write(tmp_path / "a.tar.gz", ABOUT, FILES)
    unpack = archive.read

    def read_and_collect(source: Path, into: Path, sha256: str | None) -> archive.Index:
        index = unpack(source, into, sha256)
        collected = collect(tmp_path / "store")
        assert (collected.removed, collected.in_use) == ((), (into,))
        return index

    monkeypatch.setattr(archive, "read", read_and_collect)
    with pytest.raises(EnvError, match=r"an export has manifest/sample\.toml, one lock"):
        import_(tmp_path / "a.tar.gz", store=tmp_path / "store", folders=[])
    assert [path.name for path in (tmp_path / "store" / "wheelhouses").rglob("*")] == [".locks"]
