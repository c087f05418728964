"""What an environment gets without a network: from the interpreter below, else the best wheel; conflicts are told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.envs.wheels import make_wheel

from layerzero.envs.build import interpreters
from layerzero.envs.build.base import Base, Distribution
from layerzero.envs.build.lock import Lock
from layerzero.envs.build.resolution import Resolution, resolve
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.ipc.errors import EnvError

ABI = f"cp{sys.version_info.major}{sys.version_info.minor}"


def base(**dists: tuple[str, list[str]]) -> Base:
    """An interpreter like ours that has these: name -> (version, requirements)."""
    found = {name.replace("_", "-"): Distribution(version, tuple(needs)) for name, (version, needs) in dists.items()}
    return Base(interpreters.host(), Path("/base"), (), ABI, found, ())


def resolved(folder: Path, requirements: list[str], below: Base, lock: str = "") -> Resolution:
    folder.mkdir(exist_ok=True)
    found = Lock(folder / "lock.txt", lock) if lock else None
    return resolve("sample", requirements, below, Wheelhouse(folder), lock=found, without=["unused"])


def test_base_goes_before_a_newer_wheel(tmp_path: Path) -> None:
    """An overlay exists to use what is there: a second torch would cost gigabytes and split the libraries below it."""
    make_wheel(tmp_path, "heavy", "3.0")
    found = resolved(tmp_path, ["heavy>=2"], base(heavy=("2.0+cu130", ["part"]), part=("1.0", [])))
    assert (found.taken, found.wheels) == ({"heavy": "2.0+cu130", "part": "1.0"}, {})


def test_what_the_base_lacks_for_itself_is_not_asked_for(tmp_path: Path) -> None:
    """Builds of vendors name requirements that they replace; the base works as it is, or does not."""
    below = base(heavy=("2.0", ["absent", "part>=9", "tool; extra == 'dev'"]), part=("1.0", []), tool=("1", []))
    assert resolved(tmp_path, ["heavy"], below).taken == {"heavy": "2.0", "part": "1.0"}


def test_extra_of_what_the_base_has_is_satisfied_too(tmp_path: Path) -> None:
    """`jax[cuda13]` over a plain jax lacks its plugin."""
    make_wheel(tmp_path, "plugin", "1.0", requires=["leaf"])
    make_wheel(tmp_path, "leaf", "1.0")
    below = base(heavy=("2.0", ["absent", "plugin==1.*; extra == 'gpu'"]))
    found = resolved(tmp_path, ["heavy[gpu]"], below)
    assert (found.taken, found.versions) == ({"heavy": "2.0"}, {"leaf": "1.0", "plugin": "1.0"})


def test_release_goes_before_prerelease_and_specific_tag_before_any(tmp_path: Path) -> None:
    """As pip and uv choose; a prerelease that is the only one is taken, since somebody carried it here."""
    make_wheel(tmp_path, "one", "1.0")
    make_wheel(tmp_path, "one", "2.0b1")
    make_wheel(tmp_path, "two", "1.0b36")
    make_wheel(tmp_path, "three", "1.0")
    native = make_wheel(tmp_path, "three", "1.0", tag=f"{ABI}-{ABI}-linux_{interpreters.host().platform[6:]}")
    found = resolved(tmp_path, ["one", "two", "three"], base())
    assert found.versions == {"one": "1.0", "two": "1.0b36", "three": "1.0"}
    assert found.wheels["three"].path == native


def test_locked_version_goes_before_a_newer_one(tmp_path: Path) -> None:
    """It is the one that was tested."""
    locked = make_wheel(tmp_path, "one", "1.0")
    make_wheel(tmp_path, "one", "1.1")
    digest = Wheelhouse(tmp_path).wheels("one")[0].sha256
    found = resolved(tmp_path, ["one"], base(), f"one==1.0 \\\n    --hash=sha256:{digest}\n")
    assert (found.wheels["one"].path, list(found.unlocked)) == (locked, [])
    assert found.text == f"one==1.0 --hash=sha256:{digest}\n"


def test_later_requirement_narrows_an_earlier_choice(tmp_path: Path) -> None:
    """The order in which requirements are met must not matter, and what only a dropped choice wanted does not stay."""
    make_wheel(tmp_path, "one", "2.0", requires=["only-of-two"])
    make_wheel(tmp_path, "one", "1.0")
    make_wheel(tmp_path, "other", "1.0", requires=["one<2"])
    for order in (["one", "other"], ["other", "one"]):
        assert resolved(tmp_path, order, base()).versions == {"one": "1.0", "other": "1.0"}


def test_conflict_names_everyone_who_wants_something(tmp_path: Path) -> None:
    """Which of two wheels to replace is for the user to say."""
    make_wheel(tmp_path, "one", "2.0")
    make_wheel(tmp_path, "other", "1.0", requires=["one<2"])
    with pytest.raises(EnvError) as caught:
        resolved(tmp_path, ["one>=2", "other"], base(one=("1.5", [])))
    assert caught.value.facts["cause"] == (
        f"one>=2 (wanted by sample), one<2 (wanted by other 1.0) is missing: {interpreters.host().path} has one 1.5; "
        f"{tmp_path} has one-2.0-py3-none-any.whl"
    )


def test_marker_of_another_platform_and_what_the_manifest_excludes_are_left_out(tmp_path: Path) -> None:
    """Wheels name what they need on Windows, on an old Python, or for a compiler of a gigabyte that is never called."""
    needs = ["Unused>=1", "absent; sys_platform == 'win32'", "absent; python_version < '3.9'"]
    make_wheel(tmp_path, "one", "1.0", requires=needs)
    assert resolved(tmp_path, ["one"], base()).versions == {"one": "1.0"}


def test_file_that_is_no_wheel_is_named(tmp_path: Path) -> None:
    """A download that broke off, or a source archive."""
    (tmp_path / "one-1.0.tar.gz").write_text("")
    (tmp_path / "two-1.0-py3-none-any.whl").write_text("cut short")
    with pytest.raises(EnvError, match=r"has one-1.0.tar.gz \(is no wheel of one\)"):
        resolved(tmp_path, ["one"], base())
    with pytest.raises(EnvError, match=r"two-1.0-py3-none-any.whl is no readable wheel"):
        resolved(tmp_path, ["two"], base())
