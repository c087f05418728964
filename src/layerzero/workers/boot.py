"""The first steps of a worker process: its configuration, its tie to the broker, clean file descriptors."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, cast

from layerzero.ipc import confinement
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.transport.plain import unpack_body
from layerzero.workers.provider import Provider

if TYPE_CHECKING:
    from layerzero.ipc.compile_caches.folder import User

_PR_SET_PDEATHSIG = 1
GRAPH_VARIABLE = "LAYERZERO_WORKER_GRAPH_MIB"
CACHE_VARIABLE = "LAYERZERO_CACHE_FOLDER"
GRAPH_BYTES = 256 << 20  # without it


@dataclass(frozen=True)
class BootConfig:
    """What a worker must know before it can say hello. Comes through an inherited descriptor: no secret in argv
    or in the environment."""

    control_path: str
    ticket: bytes
    provider: str  # module name, or path of a .py file
    backend: str
    parent_pid: int
    package: str
    failpoints: str
    lifts: bool = False  # machine code is watched, so that kernels can be lifted (docs/lifting.md)


def read_config(fd: int) -> BootConfig:
    """Read and close the boot descriptor."""
    with os.fdopen(fd, "rb") as file:
        return BootConfig(**unpack_body(file.read()))


def read_graph_bytes(environ: Mapping[str, str]) -> int:
    """GPU memory that CUDA graphs of this worker may take. Raises ConfigError for what is no number of MiB."""
    text = environ.get(GRAPH_VARIABLE, "")
    if not text:
        return GRAPH_BYTES
    if not text.isdecimal():
        raise ConfigError(f"{GRAPH_VARIABLE}={text!r}; allowed: a whole number of MiB, 0 for no graphs")
    return int(text) << 20


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, however it ends: the broker, or, with 0, what it started the
    worker by."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid and os.getppid() != parent_pid:  # it ended before the call above took effect
        os._exit(1)


def confine(environ: Mapping[str, str]) -> None:
    """Keep out of other processes' memory, unless the variable says otherwise; stderr says so where that cannot be.
    Before the first thread. Raises ConfigError for a value that is none."""
    try:
        if confinement.is_wanted(environ):
            confinement.confine()
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    except OSError as exc:
        print(f"layerzero: not kept from the memory of other processes: {exc.strerror}", file=sys.stderr)


def enter_cache(environ: Mapping[str, str]) -> User | None:
    """Use the compilers' caches of this environment, which are checked first; None where it has none. Raises
    ConfigError where they cannot be locked and checked: what lies there is loaded as code."""
    folder = environ.get(CACHE_VARIABLE)
    if not folder:
        return None
    from layerzero.workers import compile_cache

    try:
        return compile_cache.enter(folder, environ)
    except OSError as exc:
        text = f"make {folder} writable for user {os.getuid()}: compilers keep what they make there: {exc.strerror}"
        raise ConfigError(text) from exc


def point_stdout_at_stderr() -> None:
    """Kernels print to stdout; here that must not reach anyone who parses it. Python stacks go to stderr: of a crash,
    and when SIGUSR2 asks where a worker is stuck."""
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    signal.signal(
        signal.SIGALRM, signal.SIG_DFL
    )  # for workers/gpu/executor.py; what the broker was started with is inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def import_provider(name: str) -> Provider:
    """Import a provider module by dotted name, or from a path that ends in .py."""
    if not name.endswith(".py"):
        return cast(Provider, importlib.import_module(name))
    return cast(Provider, import_file("layerzero_provider", name))


def import_file(name: str, path: str | os.PathLike[str]) -> ModuleType:
    """Import the module in a file, or the package of an `__init__.py`, under a name of ours. Raises ConfigError."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{os.fspath(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
