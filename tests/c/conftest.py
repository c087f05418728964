"""liblayerzero and the C programs of these tests, compiled once for a test run, under the sanitizers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tests.process.harness import Site

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "c"
HERE = Path(__file__).parent
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O0", "-g", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
SMALL = ["-DLZI_MAX_ROUTES=64", f"-include {HERE / 'grace.h'}"]  # in place of 512 signatures, and 10 s of grace
LIBS = ["-ldl", "-lm", "-pthread"]
COMPILER = shutil.which("gcc") or shutil.which("cc")
MAKE = ["make", f"-j{os.cpu_count()}", "-C", LIBRARY]


def libzmq() -> str:
    """The one that pyzmq brings along; the system's where it brings none."""
    bundled = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libzmq*.so*"))
    return str(bundled[0]) if bundled else "libzmq.so.5"


def run(program: Path, *args: object, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program that must end well; leaks are errors."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LAYERZERO_")}
    done = subprocess.run(
        [program, *map(str, args)], input=stdin, capture_output=True, check=False, timeout=120, env=environ | variables
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-4000:] + done.stdout[-500:].decode("latin-1")
    return done


class Built:
    """Programs by name, each compiled when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def library(self) -> Path:
        """The static library."""
        return self._once("liblayerzero.a", self._make_library)

    def shared_library(self) -> Path:
        """liblayerzero.so as a user builds it, without sanitizers: for what is no C."""
        folder = self.folder / "plain"

        def make(_: Path) -> None:
            self._run([*MAKE, f"BUILD={folder}", f"CC={COMPILER}", "CFLAGS=-O0 -Werror", "all"])

        self._once("plain.so", make)
        return folder / "liblayerzero.so"

    def program(self, source: Path) -> Path:
        """A C program that is linked with it."""
        library = self.library()

        def make(target: Path) -> None:
            self._compile("-I", LIBRARY, source, library, *LIBS, "-o", target)

        return self._once(source.stem, make)

    def __getitem__(self, name: str) -> Path:
        return self.program(HERE / f"{name}.c")

    def _make_library(self, target: Path) -> None:
        flags = " ".join(["-O0", "-g", "-Werror", *SMALL, *SANITIZERS])
        self._run([*MAKE, f"BUILD={self.folder}", f"CC={COMPILER}", f"CFLAGS={flags}", target])

    def _compile(self, *args: object) -> None:
        self._run([COMPILER, *FLAGS, *SANITIZERS, *args])

    @staticmethod
    def _run(command: list[object]) -> None:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _once(self, name: str, make: object) -> Path:
        """One process of a test run makes it; the others wait."""
        target, done = self.folder / name, self.folder / f"{name}.done"
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                assert callable(make)
                make(target)
                done.touch()
        return target


@pytest.fixture(scope="package")
def broker(store: Path) -> Iterator[Site]:
    """One for the modules of this folder, which leave it intact. Its workers restart at once."""
    site = Site(store, restart_budget=100_000, backoff_s=0.01, backoff_max_s=0.01)
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if COMPILER is None or shutil.which("make") is None:
        pytest.skip("no C compiler (cc or gcc) and make here")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "c"
    return Built(folder)
