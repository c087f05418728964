"""How much of compilers' caches stays: what was not used for longest goes, and nothing that is in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.ipc.test_compile_caches import another, flip

from layerzero.envs.compile_caches import keeping
from layerzero.envs.compile_caches.keeping import Bounds
from layerzero.ipc.compile_caches import folder as folders


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four caches of 1,000 bytes, used one after the other."""
    for number in range(4):
        make(tmp_path, number)
    return tmp_path


def make(store: Path, number: int) -> Path:
    folder = store / "caches" / f"env{number}-0123456789abcdef" / "x86_64-cpu"
    folder.mkdir(parents=True)
    (folder / "code").write_bytes(bytes(1000))
    folders.User.enter(folder, keeps=False, say=print).leave()
    (folder / "code").write_bytes(bytes(1000))
    folders.seal(folder)
    os.utime(folder / ".lz/lock", (number + 1, number + 1))
    return folder


def names(found: list[keeping.Kept]) -> list[str]:
    return [one.name for one in found]


def test_those_used_last_come_first(store: Path) -> None:
    found = keeping.kept(store)
    assert names(found) == ["env3", "env2", "env1", "env0"]
    assert {(one.nbytes, one.env, one.place, one.is_in_use) for one in found} == {
        (1000, "0123456789abcdef", "x86_64-cpu", False)
    }


@pytest.mark.parametrize(
    ("bounds", "gone"),
    [
        (Bounds(4000, 4), []),
        (Bounds(3999, 4), ["env0"]),
        (Bounds(2500, 0), ["env0", "env1"]),
        (Bounds(0, 1), ["env0", "env1", "env2"]),
        (Bounds(1, 0), ["env0", "env1", "env2"]),  # what was used last stays, whatever it has
        (Bounds(0, 0), []),
    ],
)
def test_what_was_not_used_for_longest_goes_first(store: Path, bounds: Bounds, gone: list[str]) -> None:
    assert names(keeping.collect(store, bounds, dry_run=True)) == gone
    assert len(keeping.kept(store)) == 4
    assert names(keeping.collect(store, bounds)) == gone
    assert [one.name for one in keeping.kept(store)][::-1] == [f"env{n}" for n in range(4) if f"env{n}" not in gone]
    assert not any(store.glob("caches/*/.gone-*"))


def test_a_cache_in_use_is_left_alone_by_gc_in_another_process(store: Path) -> None:
    """gc beside a worker: its cache stays, the next one goes in its place."""
    used = store / "caches/env0-0123456789abcdef/x86_64-cpu"
    code = (
        "import sys; from pathlib import Path; from layerzero.envs.compile_caches.keeping import *\n"
        "print(*(one.name for one in collect(Path(sys.argv[1]), Bounds(0, 2))))"
    )
    with another(used) as run:
        os.utime(used / ".lz/lock", (1, 1))
        told = subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True, text=True, check=True)
        assert told.stdout == "env1 env2\n"
        run(f"assert Path({str(used / 'code')!r}).read_bytes() == bytes(1000)")
    assert names(keeping.collect(store, Bounds(0, 1))) == ["env0"]


def test_a_process_that_comes_while_gc_removes_begins_anew(store: Path) -> None:
    used = store / "caches/env0-0123456789abcdef/x86_64-cpu"
    keeping.collect(store, Bounds(0, 1))
    with another(used) as run:
        run(f"Path({str(used / 'fresh')!r}).write_text('x'); user.seal()")
    assert keeping.kept(store)[0].name == "env0"
    assert folders.look(used).sealed == 1


def test_verify_sets_aside_what_does_not_fit_also_of_what_is_in_use(store: Path) -> None:
    first, second = (store / f"caches/env{n}-0123456789abcdef/x86_64-cpu" for n in (0, 1))
    flip(first / "code")
    with another(second):
        flip(second / "code")
        found = {one.name: seen.unfit for one, seen in keeping.verify(store)}
    assert found == {"env0": ["code"], "env1": ["code"], "env2": [], "env3": []}
    assert not (first / "code").exists()
    assert {one.name: one.set_aside for one in keeping.kept(store)} == {"env0": 1, "env1": 1, "env2": 0, "env3": 0}
    assert keeping.forget_aside(store) == 2
    assert keeping.forget_aside(store) == 0
