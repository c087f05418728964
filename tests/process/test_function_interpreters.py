"""Functions in an interpreter of the user's, a venv: used as it is, through a real broker; what is wrong with one, and
what becomes of one that changes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.envs.wheels import make_wheel, pack, unpack
from tests.process import forks
from tests.process.harness import ROOT, Site, is_running, wait_until

import layerzero as lz
from layerzero.envs.build.installers import find_uv
from layerzero.envs.build.overlay import site_packages

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
needs_uv = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")


@pytest.fixture(scope="module")
def worker_wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What every worker needs, as wheels."""
    return [pack(tmp_path_factory.mktemp("packed"), name) for name in ("pyzmq", "msgpack")]


def make(folder: Path, *wheels: Path) -> Path:
    """A venv with `heavy` 2.0, an editable project and these wheels; its interpreter."""
    venv.create(folder, symlinks=True)
    site = site_packages(folder, MINOR)
    for wheel in (make_wheel(folder.with_name("made"), "heavy", "2.0", requires=["absent"]), *wheels):
        unpack(wheel, site)
    edited = folder.with_name("edited")
    edited.mkdir(exist_ok=True)
    (edited / "own_code.py").write_text("VERSION = 'edited'\n")
    (site / "nested.pth").write_text(f"{edited}\n")
    return folder / "bin" / "python"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of it, with size and time."""
    found = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (info.st_size, info.st_mtime_ns) for name, info in found.items()}


def replace_heavy(python: Path, version: str) -> None:
    """As pip does for another version."""
    site = site_packages(python.parent.parent, MINOR)
    [info] = site.glob("heavy-*.dist-info")
    shutil.rmtree(info)
    unpack(make_wheel(site.parents[3] / "made", "heavy", version), site)


@contextlib.contextmanager
def functions_of(monkeypatch: pytest.MonkeyPatch, interpreter: Path) -> Iterator[ModuleType]:
    monkeypatch.setenv("LZ_TEST_INTERPRETER", str(interpreter))
    name = "tests.process.existing_functions"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    forks.start_server()
    one = Site(tmp_path / "store", restart_budget=100, backoff_s=0.01)
    with one.environment():
        yield one
        lz.disconnect()
    one.stop()


def command(site: Site, *argv: str) -> subprocess.CompletedProcess[str]:
    lz_command = Path(sys.executable).parent / "lz"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "500"}
    return subprocess.run([lz_command, *argv], env=environ, capture_output=True, text=True, check=False)


def test_a_venv_is_used_as_it_is_until_it_changes(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker_wheels: list[Path]
) -> None:
    """Nothing is written there; another version in it is seen, told, and taken after a look."""
    python = make(tmp_path / "own", *worker_wheels)
    before = listing(tmp_path / "own")
    with functions_of(monkeypatch, tmp_path / "own") as fn:
        backend = fn.MINE.backend
        site.start().connect()
        with pytest.raises(lz.EnvError, match=rf"^run: lz env build {backend}\nenvironment mine is not built") as no:
            fn.found()
        assert str(python) in no.value.message
        assert fn.found.explain().command == f"lz env build {backend}"
        built = command(site, "env", "build", backend)
        assert built.returncode == 0, built.stderr
        tag = f"{sys.implementation.cache_tag}.pyc"
        assert [*(tmp_path / "store" / "stage").glob(f"*/layerzero/workers/__pycache__/loop.{tag}")]  # by `build`
        said = fn.found()
        assert (said["executable"], said["prefix"]) == (str(python), str(tmp_path / "own"))
        assert (said["heavy"], said["edited"]) == ("2.0", "edited")
        assert said["zmq"].startswith(str(site_packages(tmp_path / "own", MINOR)))
        assert listing(tmp_path / "own") == before
        explained = fn.found.explain()
        assert str(python) in explained.interpreter
        assert f"interpreter: {python} (Python {MINOR}" in str(explained)
        first = site.backend(backend)
        assert first["interpreter"] == str(python)
        rows = command(site, "env", "list").stdout.splitlines()
        assert any(backend in row and "existing" in row and str(tmp_path / "own") in row for row in rows)
        assert f"{python}, as it is; probed" in command(site, "doctor").stdout

        replace_heavy(python, "3.0")
        assert "heavy 2.0 is now 3.0" in fn.found.explain().state
        told = command(site, "env", "list").stdout
        assert "outdated" in told
        assert "heavy 2.0 is now 3.0" in told
        assert fn.found() == said  # a worker that runs has what it has imported
        os.kill(said["pid"], signal.SIGKILL)
        wait_until(lambda: site.backend(backend)["unavailable"] and site.backend(backend)["state"] == "disabled")
        with pytest.raises(lz.EnvError) as changed:
            fn.found()
        assert changed.value.message.startswith(f"run: lz env build {backend}\n")
        assert "heavy 2.0 is now 3.0" in changed.value.message
        assert command(site, "env", "build", backend).returncode == 0
        third = fn.found()
        assert third["heavy"] == "3.0"
        assert site.backend(backend)["env"] != first["env"]  # what measured times and certificates are kept by
        assert len(list((tmp_path / "store" / "probes").glob(f"{backend}-*.json"))) == 1

        replace_heavy(python, "4.0")
        (tmp_path / "own" / "conda-meta").mkdir()  # as conda leaves, whose packages may be no distributions
        (tmp_path / "own" / "conda-meta" / "gdal-3.9-h1_0.json").write_text("{}")
        assert "conda:gdal 3.9-h1_0 was added, heavy 3.0 is now 4.0" in fn.found.explain().state
        fn.MINE.build(quiet=True)  # as build="now" does; a session that begins then has a new worker
        lz.disconnect()
        site.connect()
        wait_until(lambda: fn.found()["heavy"] == "4.0")
        assert (third["conda"], fn.found()["conda"]) == (None, str(tmp_path / "own"))
        assert not is_running(third["pid"])
        freed = command(site, "env", "gc")
        assert freed.returncode == 0
        assert not (tmp_path / "store" / "envs" / f"{backend}-{first['env']}").exists()


def test_one_that_is_gone_keeps_no_other_from_being_built(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker_wheels: list[Path]
) -> None:
    """Its folder was removed since it was declared: told by name, with what to do."""
    make(tmp_path / "own", *worker_wheels)
    gone = lz.env("gone", from_interpreter=make(tmp_path / "gone", *worker_wheels))
    with functions_of(monkeypatch, tmp_path / "own") as fn:
        gone.build(quiet=True)
        shutil.rmtree(tmp_path / "gone")
        assert not fn.MINE.is_built
        assert "not built" in str(fn.MINE.unready())  # which declares it
        answer = command(site, "env", "build", gone.backend, fn.MINE.backend)
        assert answer.returncode == 1
        assert fn.MINE.is_built
        assert f"{tmp_path / 'gone' / 'bin' / 'python'} does not exist" in answer.stdout
        assert f"lz env remove {gone.backend}" in answer.stdout
        assert "unavailable" in command(site, "env", "list").stdout
        assert command(site, "env", "remove", gone.backend).returncode == 0
        assert gone.backend not in command(site, "env", "list").stdout


@needs_uv
def test_what_workers_need_and_it_lacks_lies_beside_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, worker_wheels: list[Path]
) -> None:
    """A venv with msgpack and no pyzmq, an index with all: pyzmq alone comes from it, into the store."""
    pyzmq, msgpack = worker_wheels
    make(tmp_path / "own", msgpack)
    before = listing(tmp_path / "own")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS"):
        monkeypatch.setenv(name, str(pyzmq.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with functions_of(monkeypatch, tmp_path / "own") as fn:
        fn.MINE.build(quiet=True)
        assert listing(tmp_path / "own") == before
        [prefix] = (tmp_path / "store" / "envs").glob("mine.*")
        assert [path.name for path in prefix.glob("lib/python*/site-packages/*.dist-info")] == [
            f"{pyzmq.name.rpartition('-cp')[0].partition('-cp')[0]}.dist-info"
        ]
        site.start().connect()
        assert fn.found()["zmq"].startswith(str(prefix))
        with pytest.raises(lz.InvalidArgument, match="add numpy to its requires, or install it into the interpreter"):
            fn.total(np.ones(3))


def refused(path: Path, *, requires: list[str] | None = None) -> lz.EnvError:
    with pytest.raises(lz.EnvError) as no:
        lz.env("wrong", from_interpreter=path, requires=requires or []).build(quiet=True)
    return no.value


def test_what_is_no_usable_python_is_refused(site: Site, tmp_path: Path) -> None:
    """Each with what to do in its first line."""
    assert "does not exist" in refused(tmp_path / "nothing").message
    (tmp_path / "folder").mkdir()
    assert "is a folder without bin/python" in refused(tmp_path / "folder").message
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho hello\n")
    assert f"run: chmod u+x {program}" in refused(program).message.partition("\n")[0]
    program.chmod(0o755)
    assert "is no Python interpreter" in refused(program).message
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\0\xb7\0" + bytes(100))  # of an ARM machine
    assert "is no program for this machine" in refused(program).message
    program.write_text("#!/bin/sh\nexit 3\n")
    assert "ended with 3" in refused(program).message
    answer = (
        '{"python": ["/x/python", "CPython", "3.8.1", "linux-x86_64"], "prefix": "/usr", "site": [], "abi": "cp38",'
        ' "dists": {}, "seen": []}'
    )
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    assert "needs CPython 3.10 or newer" in refused(program).message
    program.write_text(f"#!/bin/sh\necho '{answer}'\n".replace("3.8.1", "3.12.1").replace("linux-x86", "linux-riscv"))
    assert "is of another platform, linux-riscv_64" in refused(program).message
    with pytest.raises(lz.InvalidArgument, match="python and from_interpreter are both named"):
        lz.env("wrong", from_interpreter=program, python="3.11")
    for value in ("", 3, "a\0b"):
        with pytest.raises(lz.InvalidArgument, match="from_interpreter is"):
            lz.env("wrong", from_interpreter=value)  # type: ignore[arg-type]


def test_what_others_may_write_to_is_refused(site: Site, tmp_path: Path) -> None:
    """The file, its folder, a folder of packages, and where they lie: nobody else may say what is executed."""
    python = make(tmp_path / "own")
    site_folder = site_packages(tmp_path / "own", MINOR)
    for folder in (python.parent, site_folder, tmp_path / "own", tmp_path / "edited"):
        for mode in (0o777, 0o1777):
            folder.chmod(mode)
            error = refused(tmp_path / "own")
            assert error.message.startswith(f"run: chmod o-w {folder}\n")
            assert error.facts["repair"] == f"chmod o-w {folder}"
        folder.chmod(0o755)
    tmp_path.chmod(0o777)
    assert refused(tmp_path / "own").message.startswith(f"run: chmod o-w {tmp_path}\n")
    tmp_path.chmod(0o1777)  # as /tmp: what lies there only its owner replaces
    assert lz.env("right", from_interpreter=python).found()
    if os.geteuid() == 0:
        os.chown(site_folder, 12345, -1)
        assert "belongs to user 12345" in refused(tmp_path / "own").message


def test_requirements_that_do_not_hold_there_name_the_command(site: Site, tmp_path: Path) -> None:
    """Of what is required itself; what distributions lack for themselves is theirs."""
    python = make(tmp_path / "own")
    error = refused(tmp_path / "own", requires=["heavy<2", "light", "absent; python_version < '3'"])
    first, _, rest = error.message.partition("\n")
    assert first == f"run: uv pip install --python {python} 'heavy<2' light, or name another interpreter"
    assert "heavy<2: heavy 2.0 is installed; light: it is not installed" in rest
    right = lz.env("right", from_interpreter=python, requires=["heavy==2.*"])
    assert right.found().startswith(f"{python} (Python {MINOR}")
