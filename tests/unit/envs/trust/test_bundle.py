"""What a backend from outside consists of: the files that its manifest names, and nothing that leads elsewhere."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from tests import outside

from layerzero.envs.trust.bundle import MAX_FILE_BYTES, Bundle, read_folder, read_wheel
from layerzero.ipc.errors import ConfigError

MANIFEST = outside.files("theirs")["theirs.toml"]


def read(folder: Path) -> Bundle:
    return read_folder(folder, "theirs", "a test")


def test_folder_and_wheel_of_one_backend_are_the_same(tmp_path: Path) -> None:
    """What was reviewed in a checkout must be recognised when it is installed."""
    bundle = read(outside.write(tmp_path / "theirs", "theirs"))
    assert sorted(bundle.files) == ["ops.json", "provider.py", "theirs.cpu.txt", "theirs.toml"]
    assert [one.sha256 for one in read_wheel(outside.wheel(tmp_path / "x.whl", "theirs"))] == [bundle.sha256]


@pytest.mark.parametrize("file", ["theirs.toml", "provider.py", "ops.json", "theirs.cpu.txt"])
def test_hash_covers_every_file_that_counts(tmp_path: Path, file: str) -> None:
    """A file outside the hash could change after somebody has allowed the rest."""
    folder = outside.write(tmp_path, "theirs")
    before = read(folder).sha256
    (folder / "README.md").write_text("not part of it")
    assert read(folder).sha256 == before
    (folder / file).write_text((folder / file).read_text() + " ")
    assert read(folder).sha256 != before


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (MANIFEST.replace('"provider.py"', '"../provider.py"'), "provider is '../provider.py'; it must be a file .py"),
        (MANIFEST.replace('"provider.py"', '"/etc/x.py"'), "provider is '/etc/x.py'"),
        (MANIFEST.replace('"provider.py"', '"torch_cpu"'), "provider is 'torch_cpu'"),
        (MANIFEST.replace('"ops.json"', '"sub/ops.json"'), "descriptor is 'sub/ops.json'; it must be a file .json"),
        (MANIFEST.replace('"ops.json"', "7"), "descriptor is 7"),
        (MANIFEST.replace("variants.cpu", 'variants."../../x"'), "'../../x' is no variant"),
        (MANIFEST.replace("variants.cpu", "variants.cu13"), "theirs.cu13.txt: No such file"),
        ('interpreter = "host"\n' + MANIFEST, "interpreter is 'host'; a backend from outside has an environment"),
        ("= nonsense", "theirs.toml: cannot be read as TOML"),
    ],
)
def test_manifest_leads_to_files_beside_it_alone(tmp_path: Path, manifest: str, says: str) -> None:
    """A path that leaves the folder would run, or copy, what nobody has allowed."""
    with pytest.raises(ConfigError) as refused:
        read(outside.write(tmp_path, "theirs", manifest=manifest))
    assert says in refused.value.message


def test_missing_lock_names_the_command_that_writes_it(tmp_path: Path) -> None:
    """Without a lock the sources would be pinned and what they run on would not."""
    (outside.write(tmp_path, "theirs") / "theirs.cpu.txt").unlink()
    with pytest.raises(ConfigError, match=r"lz env lock theirs --manifests FOLDER"):
        read(tmp_path)


def test_links_and_pipes_are_refused(tmp_path: Path) -> None:
    """A link copies another's file; a pipe blocks whoever looks."""
    outside.write(tmp_path, "theirs")
    (tmp_path / "provider.py").unlink()
    (tmp_path / "provider.py").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"provider\.py: is a link"):
        read(tmp_path)
    (tmp_path / "provider.py").unlink()
    os.mkfifo(tmp_path / "provider.py")
    with pytest.raises(ConfigError, match=r"provider\.py: is no regular file"):
        read(tmp_path)


def test_large_files_are_refused(tmp_path: Path) -> None:
    """In a wheel the size that the archive states is not believed: what comes out is counted."""
    large = "#" * (MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match=r"provider\.py: larger than 1,048,576 bytes"):
        read(outside.write(tmp_path, "theirs", provider=large))
    with pytest.raises(ConfigError, match=r"lz_outside/provider\.py: larger than 1,048,576 bytes"):
        read_wheel(outside.wheel(tmp_path / "x.whl", "theirs", provider=large))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("theirs", "lz_outside:backend", "'lz_outside:backend' must be a package"),
        ("theirs", "../lz_outside", "'../lz_outside' must be a package"),
        ("theirs", "lz_elsewhere", "lz_elsewhere/theirs.toml is not in it"),
        ("../theirs", "lz_outside", "'../theirs' is no name of a backend"),
    ],
)
def test_entry_point_of_a_wheel_names_a_package_in_it(tmp_path: Path, name: str, value: str, says: str) -> None:
    """It is looked into, never imported; an attribute could be had by an import alone."""
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in outside.metadata("lz_outside", name, value).items():
            archive.writestr(file, text)
    with pytest.raises(ConfigError) as refused:
        read_wheel(path)
    assert says in refused.value.message


def test_what_is_no_wheel_or_declares_nothing_is_refused(tmp_path: Path) -> None:
    """The message says which entry point it lacks."""
    (tmp_path / "x.whl").write_text("not a zip")
    with pytest.raises(ConfigError, match="cannot be read as a wheel"):
        read_wheel(tmp_path / "x.whl")
    with zipfile.ZipFile(tmp_path / "y.whl", "w") as archive:
        archive.writestr("x-1.dist-info/entry_points.txt", "[console_scripts]\nx = x:main\n")
    with pytest.raises(ConfigError, match=r"needs an entry point of the group 'layerzero\.backends'"):
        read_wheel(tmp_path / "y.whl")


def test_staged_copy_is_mended_when_it_is_no_longer_what_was_read(tmp_path: Path) -> None:
    """It is the copy that runs."""
    bundle = read(outside.write(tmp_path / "theirs", "theirs"))
    staged = bundle.stage(tmp_path / "store")
    (staged / "provider.py").write_text("print('other')")
    assert bundle.stage(tmp_path / "store") == staged
    assert (staged / "provider.py").read_text() == outside.PROVIDER


def test_staged_copy_that_is_what_was_read_stays(tmp_path: Path) -> None:
    """A worker may be starting from it."""
    bundle = read(outside.write(tmp_path / "theirs", "theirs"))
    staged = bundle.stage(tmp_path / "store")
    before = (staged / "provider.py").stat().st_ino
    assert bundle.stage(tmp_path / "store") == staged
    (staged / "__pycache__").mkdir()
    assert bundle.stage(tmp_path / "store") == staged
    assert (staged / "provider.py").stat().st_ino == before
    assert (staged / "__pycache__").is_dir()


def test_staged_copy_has_the_name_and_the_hash(tmp_path: Path) -> None:
    """Of two versions each has its own."""
    bundle = read(outside.write(tmp_path / "theirs", "theirs"))
    digits = bundle.sha256.partition(":")[2]
    assert bundle.stage(tmp_path / "store") == tmp_path / "store" / "backends" / f"theirs-{digits[:16]}"


def test_a_bundle_replaces_what_lies_where_it_is_kept(tmp_path: Path) -> None:
    """The folders above it come with it, and nothing of what was there stays."""
    target = tmp_path / "far" / "away" / "theirs"
    bundle = read(outside.write(tmp_path / "source", "theirs"))
    bundle.replace(target)
    (target / "more.py").write_text("")
    bundle.replace(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == bundle.files


def test_hash_is_of_names_and_bytes_as_others_compute_it() -> None:
    """What was allowed stays allowed over versions of ours; no two sets of files have one text to hash."""
    text = b"layerzero backend 1\0" + b"a.py\0" + b"3\0" + b"b\n\0" + b"c.json\0" + b"0\0"
    files = {"c.json": b"", "a.py": b"b\n\0"}
    assert Bundle("theirs", files, "").sha256 == f"sha256:{hashlib.sha256(text).hexdigest()}"


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ('other_pythons = ["3.12", "3.13"]\n', {"theirs.cpu.py312.txt", "theirs.cpu.py313.txt"}),
        ('other_pythons = "3.12"\n', set()),
    ],
)
def test_locks_for_other_pythons_are_part_of_it(tmp_path: Path, line: str, more: set[str]) -> None:
    """What is not in the hash could change after somebody has allowed the rest. Other types lead nowhere."""
    folder = outside.write(tmp_path, "theirs", manifest=line + MANIFEST)
    if more:
        with pytest.raises(ConfigError, match=r"theirs\.cpu\.py312\.txt: No such file"):
            read(folder)
    for name in more:
        (folder / name).write_text(name)
    files = read(folder).files
    assert set(files) == {"ops.json", "provider.py", "theirs.cpu.txt", "theirs.toml"} | more
    assert {name: files[name] for name in more} == {name: name.encode() for name in more}


def test_variants_of_another_type_lead_to_no_file(tmp_path: Path) -> None:
    """The manifest's own check refuses them."""
    manifest = "variants = 7\n" + MANIFEST.partition("[variants.cpu]")[0]
    assert sorted(read(outside.write(tmp_path, "theirs", manifest=manifest)).files) == [
        "ops.json",
        "provider.py",
        "theirs.toml",
    ]


def test_what_is_refused_is_named_with_its_folder(tmp_path: Path) -> None:
    """There are several folders of backends."""
    with pytest.raises(ConfigError) as refused:
        read_folder(tmp_path, "../x", "")
    assert refused.value.message.startswith(f"{tmp_path}: '../x' is no name of a backend; allowed: ")
    with pytest.raises(ConfigError) as refused:
        read(outside.write(tmp_path, "theirs", manifest=MANIFEST.replace('"ops.json"', "7")))
    assert refused.value.message.startswith(f"{tmp_path}: theirs.toml: descriptor is 7; it must be a file .json")


def test_damaged_and_unusual_wheels_are_refused(tmp_path: Path) -> None:
    """With a message and no traceback; what wheels do not use may take any amount of memory to unpack."""
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        path = tmp_path / f"{kind}.whl"
        with zipfile.ZipFile(path, "w", kind) as archive:
            archive.writestr("x-1.dist-info/entry_points.txt", "[layerzero.backends]\nx = x\n")
    data = bytearray((tmp_path / f"{zipfile.ZIP_DEFLATED}.whl").read_bytes())
    start = 30 + len("x-1.dist-info/entry_points.txt")
    data[start : start + 8] = b"\xff" * 8
    (tmp_path / "damaged.whl").write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read as a wheel"):
        read_wheel(tmp_path / "damaged.whl")
    with pytest.raises(ConfigError, match="compressed as type 14; allowed: stored, deflated"):
        read_wheel(tmp_path / f"{zipfile.ZIP_LZMA}.whl")
