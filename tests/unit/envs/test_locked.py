"""Lock files of programs: what holds, what is drift, and what is refused. Nothing is resolved or built here."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.envs import functions, locked
from layerzero.envs.build.progress import Quiet
from layerzero.envs.declared import Declared
from layerzero.envs.locked import LockFile

HASH = f"    --hash=sha256:{'0' * 64}"
PINS = f"msgpack==1.2.4 \\\n{HASH} \\\n{HASH}\nnumpy==1.26.4 \\\n{HASH}\npyzmq==27.3.0 \\\n{HASH}\n"
HEAD = "# np, cpu: Python 3.11, x86_64, manylinux_2_28 or newer.\n"
REQUIRES = ["numpy<2"]


def lock_text(*, head: str = HEAD, requires: str = '["numpy<2"]', pins: str = PINS) -> str:
    return f"{head}# Do not edit.\n# Requires: {requires}\n{pins}"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    monkeypatch.setenv("LAYERZERO_STORE", str(tmp_path / "store"))
    path = tmp_path / "np.lock.txt"
    path.write_text(lock_text())
    return path


def declared(path: Path, requires: list[str] | None = None, python: str = "3.11") -> Declared:
    return Declared.of("np", REQUIRES if requires is None else requires, python, lock=path)


def test_what_is_declared_has_the_lock_of_the_file(path: Path, tmp_path: Path) -> None:
    """A copy in the store, which is what is built: an edit of the file is another environment."""
    one = declared(path)
    locked.demand(one)
    manifest = functions.declare(one, tmp_path)
    assert manifest.lock_path("cpu").read_text() == path.read_text()
    functions.lock_where_missing(manifest, Quiet())
    assert functions.declared_by(manifest) == one
    path.write_text(lock_text(pins=PINS.replace("1.26.4", "1.26.3")))
    assert declared(path).backend != one.backend
    manifest.lock_path("cpu").unlink()
    with pytest.raises(lz.EnvError, match=rf"^run: lz env build {declared(path).backend}\n"):
        functions.lock_where_missing(manifest, Quiet())


def test_name_is_the_same_wherever_the_file_lies(path: Path, tmp_path: Path) -> None:
    """Policies name environments, and projects lie elsewhere on every machine."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "other.txt").write_text(path.read_text())
    assert declared(other / "other.txt").backend == declared(path).backend
    assert Declared.of("np", REQUIRES, "3.11").backend != declared(path).backend


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "it has no lock: .*np.lock.txt does not exist"),
        (lock_text(requires='["numpy<3"]'), "of other requirements: numpy<2 is asked for"),
        (lock_text(requires='["numpy<2", "scipy"]'), "of other requirements: scipy is not asked for any more"),
        (lock_text(head=HEAD.replace("3.11", "3.12")), r'for Python 3.12, not 3.11; with python="3.12" it holds'),
        (lock_text(pins=PINS.replace("1.26.4", "2.1.0")), r"was edited: it does not have numpy<2"),
        (lock_text(pins=PINS.replace("numpy", "numpyx")), r"was edited: it does not have numpy<2"),
        (lock_text(head="# numpy\n"), "is no lock of lz env lock"),
        (lock_text(requires="[numpy]"), "'# Requires:' is no list"),
        (PINS, "is no lock of lz env lock"),
        ("", "is no lock of lz env lock"),
        (lock_text(pins="--index-url https://example.org\n" + PINS), ":4: '--index-url .* is out of place"),
        (lock_text(pins=f"{PINS}-e . \n"), "'-e .' is out of place"),
        (lock_text(pins=f"{PINS}numpy==1.26.4\n"), "'numpy==1.26.4' is out of place"),
        (lock_text(pins=f"{PINS}a==1 --config-settings=x=y \\\n{HASH}\n"), "is out of place"),
        (lock_text(pins=f"{PINS}a @ https://example.org/a.whl \\\n{HASH}\n"), "is out of place"),
        (lock_text(pins=f"{PINS}{HASH}\n"), "is out of place"),
        (lock_text(pins=f"{PINS}a==1 \\\nb==1 \\\n{HASH}\n"), "is out of place"),
        (lock_text(pins=PINS + "a==1 \\\n"), "ends in the middle of a package"),
    ],
)
def test_first_line_of_an_error_is_the_command(path: Path, tmp_path: Path, text: str | None, said: str) -> None:
    """Whatever has drifted, or is no lock at all; an installer would take options from it."""
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    one = lz.env("np", requires=REQUIRES, python="3.11", lock=path)
    with pytest.raises(lz.EnvError) as refused:
        one.build(quiet=True)
    for error in (one.unready(), refused.value):
        assert error is not None
        first, _, rest = error.message.partition("\n")
        assert first == f"run: lz env lock {one.backend}"
        assert re.search(said, rest)
    manifest = functions.declare(declared(path), tmp_path / "store")
    assert functions.full_name("np", tmp_path / "store") == one.backend
    with pytest.raises(lz.EnvError, match=r"^run: lz env lock"):
        functions.lock_where_missing(manifest, Quiet())


@pytest.mark.parametrize(
    ("machine", "libc", "first"),
    [
        ("aarch64", "2.31", "build it on a machine with x86_64"),
        ("x86_64", "2.17", "build it on a system with glibc 2.28 or newer"),
    ],
)
def test_lock_for_another_platform_says_where_to_build(
    path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, libc: str, first: str
) -> None:
    """To lock again would not help."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", libc))
    with pytest.raises(lz.EnvError) as error:
        locked.demand(declared(path))
    assert error.value.message.partition("\n")[0] == first


def test_markers_and_extras_are_read(path: Path) -> None:
    pins = f"{PINS}uvicorn[standard]==0.30.1 ; python_version < '3.12' \\\n{HASH}\n"
    found = LockFile.parse(path, lock_text(pins=pins))
    assert found.lock.pins["uvicorn"] == "0.30.1"
    assert (found.python, found.machine, found.glibc, found.requires) == ("3.11", "x86_64", 28, ("numpy<2",))


def test_what_no_lock_is_for_is_said_at_once(path: Path, tmp_path: Path) -> None:
    with pytest.raises(lz.InvalidArgument, match="lock and from_interpreter are both named"):
        lz.env("np", from_interpreter=tmp_path, lock=path)
    for wrong in ("", 3, "a\nb"):
        with pytest.raises(lz.InvalidArgument, match="the path of a file that lz env lock writes"):
            lz.env("np", lock=wrong)  # type: ignore[arg-type]
    with pytest.raises(lz.ConfigError, match="cannot be read"):
        lz.env("np", lock=tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(lz.ConfigError, match="cannot be read"):
        lz.env("np", lock=path)


def test_environments_from_files_take_one_too(path: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy<2\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "np"\ndependencies = ["numpy<2"]\n')
    (tmp_path / "np.py").write_text('# /// script\n# dependencies = ["numpy<2"]\n# ///\n')
    found = [
        lz.env.from_requirements(tmp_path / "requirements.txt", "np", python="3.11", lock=path),
        lz.env.from_pyproject(tmp_path, python="3.11", lock=path),
        lz.env.from_script(tmp_path / "np.py", python="3.11", lock=path),
    ]
    assert {one.backend for one in found} == {declared(path).backend}
    assert {one.lock for one in found} == {str(path)}
    assert found[0].options(workers=2).backend == found[0].backend
