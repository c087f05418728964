"""uv and pip behind one Protocol: both create a venv and install a lock into it, exactly and by hash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.pip_config import read_pip_config, uv_settings
from layerzero.ipc.errors import EnvError

InstallerName = Literal["uv", "pip"]
_TAIL_LINES = 12
_WARNINGS = ("WARNING:", "warning:", "DEPRECATION:", "[notice]")
_ERRORS = ("ERROR:", "error:", "\u00d7")  # uv's own sign
_BY_HASH = ("--require-hashes", "--no-deps", "--only-binary", ":all:")


class ToolFailed(Exception):
    """uv or pip ended with an error; the message is its last lines, without passwords."""


@dataclass(frozen=True)
class Runner:
    """Runs a tool to its end. `report` gets each line it prints, but for warnings, and for errors, which come with
    ToolFailed. `lock_fd` is inherited, so that the lock of the folder is held as long as any process writes into it,
    even when we are killed."""

    cwd: Path
    lock_fd: int
    report: Callable[[str], None] = lambda line: None
    on_start: Callable[[subprocess.Popen[str]], None] = lambda process: None  # for who may want to end it early

    def __call__(self, argv: Sequence[str | Path], environ: Mapping[str, str]) -> None:
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        with subprocess.Popen(
            argv,
            cwd=self.cwd,
            env=tool_environ(os.environ, environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(self.lock_fd,),
        ) as process:
            try:
                self.on_start(process)
                assert process.stdout is not None
                is_error = False
                for line in process.stdout:
                    if text := without_passwords(line.rstrip()):
                        tail.append(text)
                        is_error = is_error or text.lstrip().startswith(_ERRORS)
                        if not is_error and not text.lstrip().startswith(_WARNINGS):
                            self.report(text)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise ToolFailed("\n".join(tail) or f"{Path(argv[0]).name} ended with {process.returncode} and no message")


class Installer(Protocol):
    @property
    def name(self) -> InstallerName: ...

    def create(self, folder: Path, python: Path, run: Runner) -> None:
        """Make `folder` (existing, empty) a venv that survives being renamed."""

    def install(
        self, folder: Path, lock: Path, run: Runner, wheelhouse: Path | None = None, afresh: Sequence[str] = ()
    ) -> None:
        """Install exactly what `lock` lists; from `wheelhouse` alone, when given. Needs no resolver. `afresh`: these
        distributions again, and not from what a cache has unpacked."""


@dataclass(frozen=True)
class Uv:
    binary: Path
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    name: InstallerName = "uv"

    def create(self, folder: Path, python: Path, run: Runner) -> None:
        flags = ("--quiet", "--no-project", "--no-python-downloads", "--relocatable")
        run([self.binary, "venv", *flags, "--python", python, folder], self.environ)

    def install(
        self, folder: Path, lock: Path, run: Runner, wheelhouse: Path | None = None, afresh: Sequence[str] = ()
    ) -> None:
        target = ("--python", folder / "bin" / "python", "-r", lock)
        again = [flag for name in afresh for flag in ("--reinstall-package", name)]
        if afresh and wheelhouse:
            again.append("--no-cache")  # uv refreshes nothing offline
        else:
            again += [flag for name in afresh for flag in ("--refresh-package", name)]
        source = ("--offline", "--no-config", *_only(wheelhouse)) if wheelhouse else self.flags
        run([self.binary, "pip", "install", "--no-progress", *_BY_HASH, *again, *source, *target], self.environ)


@dataclass(frozen=True)
class Pip:
    """The fallback. Scripts in bin/ name the folder the venv was built in and do not work; only bin/python is used.

    Our own pip runs in the new venv's interpreter, so that the venv gets no pip and no setuptools, which would come
    before those of an overlay's base; and so that Pythons without ensurepip (Debian's, when split) serve too.
    """

    name: InstallerName = "pip"

    def create(self, folder: Path, python: Path, run: Runner) -> None:
        run([python, "-m", "venv", *(("--without-pip",) if _pip_runner() else ()), folder], {})

    def install(
        self, folder: Path, lock: Path, run: Runner, wheelhouse: Path | None = None, afresh: Sequence[str] = ()
    ) -> None:
        runner = _pip_runner()
        pip = (folder / "bin" / "python", *((runner,) if runner else ("-m", "pip")))
        quiet = ("--no-input", "--no-compile", "--progress-bar", "off", "--disable-pip-version-check")
        source = ("--isolated", *_only(wheelhouse)) if wheelhouse else ()
        variables = {"PIP_CONFIG_FILE": os.devnull} if wheelhouse else {}  # it may name further places to look
        again = ("--force-reinstall",) if afresh else ()  # it unpacks each time; only fetched wheels are cached
        run([*pip, "install", *again, *quiet, *_BY_HASH, *source, "-r", lock], variables)

    def download(self, folder: Path, python: Path, lock: Path, run: Runner) -> None:
        """Fetch the wheels that `lock` lists for an interpreter."""
        runner = _pip_runner()
        pip = (python, *((runner,) if runner else ("-m", "pip")))
        quiet = ("--no-input", "--progress-bar", "off", "--disable-pip-version-check")
        run([*pip, "download", *quiet, *_BY_HASH, "--dest", folder, "-r", lock], {})


def _pip_runner() -> Path | None:
    """What `pip --python` itself starts in another interpreter: pip's code and nothing else of ours. Used directly,
    since that option starts it without our lock. None where we have no pip, or one older than 22.2."""
    spec = find_spec("pip")
    runner = Path(spec.origin).with_name("__pip-runner__.py") if spec and spec.origin else None
    return runner if runner and runner.is_file() else None


def _only(wheelhouse: Path) -> tuple[str | Path, ...]:
    return ("--no-index", "--find-links", wheelhouse)


def find_uv() -> Path | None:
    """uv beside our interpreter, in the scripts folders of its schemes, or on PATH."""
    user_scheme = sysconfig.get_preferred_scheme("user")
    folders = (Path(sys.executable).parent, sysconfig.get_path("scripts"), sysconfig.get_path("scripts", user_scheme))
    for folder in folders:
        if os.access(Path(folder, "uv"), os.X_OK):
            return Path(folder, "uv")
    found = shutil.which("uv")
    return Path(found) if found else None


def uv() -> Uv | None:
    """uv with pip's configuration translated for it, or None where it is not installed."""
    binary = find_uv()
    if binary is None:
        return None
    flags, variables = uv_settings(read_pip_config(os.environ), os.environ)
    return Uv(binary, flags, variables)


def pick(name: InstallerName | None = None) -> Installer:
    """The named installer, or uv where there is one and else pip. Raises EnvError for a uv that is not there."""
    found = None if name == "pip" else uv()
    if name == "uv" and found is None:
        raise EnvError("uv is not installed", env="", cause="no uv on PATH", repair="python -m pip install uv")
    return found or Pip()


def without_passwords(text: str) -> str:
    """Hide the user part of every URL."""
    return re.sub(r"(://)[^/@\s]+@", r"\1****@", text)
