"""Brokers and commands that begin as forks of a process which has imported what they need.

A broker's imports take 0.45 s of a core, a command's 0.35, and a test run starts hundreds of each. Everything else is
as `python -m` has it: a process of its own, with its arguments, environment, folder, descriptors and their limit. Those
that import for themselves are in test_broker_process.py, wherever a program calls lz.connect(), and wherever something
else than `run` starts `lz`. LZ_TEST_FORKS=0 does without all this.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
SOFT = ROOT / "tests" / "soft_gpu" / "broker"  # a broker that has this on its path finds the GPU of threads
BROKER = ["layerzero.broker"]
MODULES = (*BROKER, "layerzero.client.cli.app")
# Beginnings of variables that an interpreter or a module reads once: where they differ, a fork is not the same.
READ_ONCE = ("PYTHON", "LANG", "LC_", "LD_", "HOME", "XDG_CACHE_HOME", "TERM", "FORCE_COLOR", "OPENBLAS")
OPTIONS = {"env", "cwd", "stdin", "stdout", "stderr", "pass_fds", "start_new_session"}
DEVNULL = subprocess.DEVNULL
TIMEOUT_S = 150
_HIGH = 300  # descriptors that were sent go there before they get their numbers


class Forked:
    """As subprocess.Popen, for as much of it as is used."""

    def __init__(self, pid: int, ended: socket.socket) -> None:
        self.pid = pid
        self._ended = ended

    def wait(self, timeout: float | None = None) -> int:
        self._ended.settimeout(timeout)
        try:
            return int(self._ended.recv(16) or -signal.SIGKILL)
        finally:
            self._ended.close()


_server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None
_environ = dict(os.environ)  # of the server


def start_server() -> None:
    """Unless it runs. To be called before open files are counted."""
    global _server
    if _server is None and os.environ.get("LZ_TEST_FORKS") != "0":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=_fit(os.environ), start_new_session=True)
        theirs.close()
        _server = ours, process
        atexit.register(_stop)


def _stop() -> None:
    assert _server is not None
    _server[0].close()
    _server[1].wait()


def _fit(environ: Mapping[str, str]) -> dict[str, str]:
    """What the server itself runs with."""
    kept = {name: value for name, value in environ.items() if not name.startswith("LAYERZERO_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def _read_once(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_ONCE) and name != "PYTHONPATH"}


def _is_same(command: Sequence[str], environ: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Whether a fork is the same as a new process."""
    words = [word for word in command[1:] if word != "-P"]
    paths = {*environ.get("PYTHONPATH", "").split(os.pathsep)} - {"", str(SOFT) if words[1:2] == BROKER else ""}
    return (
        _server is not None
        and command[0] == sys.executable
        and words[0] == "-m"
        and words[1] in MODULES
        and paths <= {str(ROOT / "src"), str(ROOT)}
        and _read_once(environ) == _read_once(_environ)
        and options.keys() <= OPTIONS
    )


def Popen(command: Sequence[str], **options: Any) -> Any:
    """subprocess.Popen, or a fork where that is the same. Standard streams have to be files."""
    environ = options.get("env") or os.environ
    start_server()
    if not _is_same(command, environ, options):
        return subprocess.Popen(command, **options)
    assert _server is not None
    with contextlib.ExitStack() as stack:
        files = [_number(options.get(name), stack, i) for i, name in enumerate(("stdin", "stdout", "stderr"))]
        numbers = [0, 1, 2, *options.get("pass_fds", ())]
        ours, theirs = socket.socketpair()
        stack.enter_context(theirs)
        given = {"command": list(command), "env": dict(environ), "cwd": options.get("cwd") or os.getcwd()}
        given |= {"numbers": numbers, "setsid": options.get("start_new_session", False)}
        given["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
        blob = os.memfd_create("command", os.MFD_CLOEXEC)
        stack.callback(os.close, blob)
        os.write(blob, json.dumps(given).encode())
        fds = [blob, theirs.fileno(), *files, *options.get("pass_fds", ())]
        socket.send_fds(_server[0], [b"start"], fds)
    return Forked(int(ours.recv(16)), ours)


def _number(file: Any, stack: contextlib.ExitStack, default: int) -> int:
    if file is None:
        return default
    if file == subprocess.DEVNULL:
        return stack.enter_context(open(os.devnull, "r+b")).fileno()
    return int(file if isinstance(file, int) else file.fileno())


def run(
    args: Sequence[str | Path], *, env: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """subprocess.run of `lz`, with its output as text."""
    command = [str(word) for word in args]
    with _temporary() as out, _temporary() as err:
        process = Popen(command, env=env, stdin=DEVNULL, stdout=out, stderr=err)
        try:
            code = process.wait(timeout_s)
        except (TimeoutError, subprocess.TimeoutExpired):
            os.kill(process.pid, signal.SIGKILL)
            raise
        texts = [Path(f"/proc/self/fd/{file.fileno()}").read_text() for file in (out, err)]
    return subprocess.CompletedProcess(command, code, *texts)


def _temporary() -> IO[bytes]:
    return os.fdopen(os.memfd_create("output", os.MFD_CLOEXEC), "r+b")


# --- the server


def _serve(fd: int) -> None:
    for name in ("layerzero.client.cli", "layerzero.broker", "layerzero.envs"):
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if found.name not in ("layerzero.client.cli.app",) and not found.name.endswith(
                ("__main__", "pytest_plugin")
            ):
                importlib.import_module(found.name)
    gc.freeze()
    gate = socket.socket(fileno=fd)
    while True:
        word, fds, _, _ = socket.recv_fds(gate, 16, 16)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those who have watched over commands
                pass
        if not word:
            return
        if os.fork() == 0:
            gate.close()
            _watch(fds)
        for one in fds:
            os.close(one)


def _watch(fds: list[int]) -> None:
    """Start the command, tell its pid, and how it ended."""
    given = json.loads(Path(f"/proc/self/fd/{fds[0]}").read_bytes())
    pid = os.fork()
    if pid == 0:
        _become(given, fds)
    told = socket.socket(fileno=fds[1])
    for one in (0, 1, 2, fds[0], *fds[2:]):
        os.close(one)
    told.send(str(pid).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        told.send(str(code).encode())
    os._exit(0)


def _become(given: Mapping[str, Any], fds: list[int]) -> None:
    code = 1
    try:
        high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _HIGH) for one in fds[2:]]
        for one in fds:
            os.close(one)
        for one, number in zip(high, given["numbers"], strict=True):
            os.dup2(one, number)
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, tuple(given["files"]))
        if given["setsid"]:
            os.setsid()
        os.chdir(given["cwd"])
        os.environ.clear()
        os.environ.update(given["env"])
        importlib.reload(sys.modules["layerzero.broker.configuration.settings"])  # its paths are XDG_CONFIG_HOME's
        at = given["command"].index("-m") + 1
        sys.orig_argv[:] = given["command"]
        sys.argv[:] = ["", *given["command"][at + 1 :]]
        if str(SOFT) in given["env"].get("PYTHONPATH", "").split(os.pathsep):
            runpy.run_path(str(SOFT / "sitecustomize.py"))
        runpy.run_module(given["command"][at], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
