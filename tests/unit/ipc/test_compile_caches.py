"""A folder of compilers' caches: what is sealed is used, what does not fit is set aside, and who uses it keeps it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.process.harness import wait_until

from layerzero.ipc.compile_caches import folder as folders
from layerzero.ipc.compile_caches import manifest
from layerzero.ipc.compile_caches.folder import InUse, User

USES = """
import sys
from pathlib import Path
from layerzero.ipc.compile_caches.folder import User
user = User.enter(Path(sys.argv[1]), keeps=True, say=print)
print("in", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Said(list[str]):
    """What was said of a folder."""

    def enter(self, folder: Path, **more: bool) -> User:
        return User.enter(folder, **{"keeps": True, **more}, say=self.append)

    def check(self, folder: Path) -> None:
        """Use it for a moment."""
        self.enter(folder).leave()


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Three files, sealed, and nobody uses them."""
    folder = tmp_path / "cache"
    for path, text in {"triton/A/k.cubin": "cubin", "triton/A/k.json": "{}", "b.so": "code"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    folders.make(folder)
    assert folders.seal(folder) == 3
    return folder


@contextlib.contextmanager
def another(folder: Path) -> Iterator[Callable[[str], None]]:
    """Another process that uses the folder; gives what has it run a line."""
    with subprocess.Popen(
        [sys.executable, "-c", USES, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        stdin, stdout = process.stdin, process.stdout

        def run(line: str) -> None:
            print(line, file=stdin, flush=True)
            assert stdout.readline() == "done\n"

        yield run
        stdin.close()


def flip(file: Path) -> None:
    """One byte, as a disk does it: the file's time stays."""
    info, data = file.stat(), bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_what_is_as_it_was_sealed_is_used(cache: Path, said: Said) -> None:
    said.check(cache)
    assert said == []
    assert (cache / "b.so").read_text() == "code"
    assert folders.look(cache, is_alone=False).sealed == 3


def test_what_does_not_fit_is_set_aside_and_said(cache: Path, said: Said) -> None:
    flip(cache / "b.so")
    (cache / "new.so").write_text("from elsewhere")
    (cache / "triton/A/link").symlink_to("/etc/passwd")
    (cache / "triton/A/k.json").unlink()
    (cache / ".lz" / folders.NOTES).write_text("{}")
    said.check(cache)
    (text,) = said
    for part in ("3 files", "changed: b.so", "not sealed: new.so", "links to elsewhere: triton/A/link", "missing: "):
        assert part in text
    assert [path for path, _ in manifest.walk(cache)] == ["triton/A/k.cubin"]
    assert folders.aside_count(cache) == 3
    assert (cache / ".lz/aside/new.so").read_text() == "from elsewhere"
    assert not (cache / ".lz" / folders.NOTES).exists()  # what is gone is compiled no more
    said.clear()
    said.check(cache)
    assert said == []


@pytest.mark.parametrize(
    "text", ["", "{", '{"schema": 2, "files": {}}', '{"schema": 1, "files": {"../x": [0, "", 0]}}']
)
def test_without_a_seal_nothing_is_used(cache: Path, said: Said, text: str) -> None:
    manifest.manifest_path(cache).write_text(text)
    said.check(cache)
    assert "3 files" in said[0]
    assert not (cache / "b.so").exists()


def test_links_inside_are_sealed_by_where_they_lead(cache: Path, said: Said) -> None:
    (cache / "latest").symlink_to("b.so")
    folders.seal(cache)
    said.check(cache)
    assert said == []
    (cache / "latest").unlink()
    (cache / "latest").symlink_to("triton/A/k.json")
    assert folders.look(cache).changed == ["latest"]


def test_what_others_write_meanwhile_is_theirs_and_their_damage_is_not(cache: Path, said: Said) -> None:
    with another(cache) as run:
        run(f"Path({str(cache / 'c.so')!r}).write_text('fresh')")
        flip(cache / "b.so")
        said.check(cache)
        assert "1 files" in said[0]
        assert "changed: b.so" in said[0]
        assert (cache / "c.so").read_text() == "fresh"


def test_what_a_killed_process_had_not_sealed_is_compiled_anew(cache: Path, said: Said) -> None:
    with another(cache) as run:
        run(f"Path({str(cache / 'whole.so')!r}).write_text('whole'); user.seal()")
        run(f"Path({str(cache / 'half.so')!r}).write_text('ha')")
    said.check(cache)
    assert "not sealed: half.so" in said[0]
    assert (cache / "whole.so").exists()


def test_a_process_seals_what_it_compiles_as_it_comes(cache: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be killed at any time, and workers mostly end so."""
    monkeypatch.setattr(User, "PAUSES_S", (0.01,) * 300)
    monkeypatch.setattr(folders, "FRESH_S", 0.0)
    user = said.enter(cache)
    user.mark()
    (cache / "c.so").write_text("compiled")
    wait_until(lambda: "c.so" in (manifest.read(cache) or {}))
    user.leave()


def test_the_folder_is_held_until_its_user_ends(cache: Path) -> None:
    with another(cache):
        with pytest.raises(InUse), folders.alone(cache):
            pass
        assert folders.is_in_use(cache)
    with folders.alone(cache):
        assert (cache / "b.so").exists()


def test_nothing_is_kept_where_that_is_switched_off(cache: Path, said: Said) -> None:
    user = said.enter(cache, keeps=False)
    assert not (cache / "b.so").exists()
    (cache / "c.so").write_text("compiled")
    user.mark()
    user.seal()
    assert manifest.read(cache) is None
    assert said == []
    user.leave()
