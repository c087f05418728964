"""What the worker of a replay runs under: CUDA's own checks, which make calls slow and say where one goes wrong."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from layerzero.client.capsules.form import CUDA, Capsule
from layerzero.ipc.errors import EnvError, InvalidArgument

GDB, COREDUMP, BLOCKING, SANITIZER = TOOLS = ("gdb", "coredump", "blocking", "sanitizer")
PROGRAM = "compute-sanitizer"
MARK = "========="  # what each of its lines begins with
MAX_LINES = 40
_OPTIONS = ("--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "0")
_BESIDE = ("/usr/local/cuda/bin", "/opt/cuda/bin")  # where CUDA's toolkit is installed as a rule


def variables(tool: str, capsule: Capsule) -> dict[str, str]:
    """Of the broker of a replay under "blocking" or "sanitizer". Raises InvalidArgument for a call on the CPU, EnvError
    where the program is not installed."""
    if capsule.device != CUDA:
        raise InvalidArgument(
            f"replay it under gdb or coredump: --under {tool} looks at kernels on a GPU, and this call was on the CPU"
        )
    if tool == BLOCKING:
        return {"CUDA_LAUNCH_BLOCKING": "1"}
    command = shlex.join([sanitizer(os.environ), *_OPTIONS])
    return {"LAYERZERO_UNDER": command, "LAYERZERO_WORKER_CONFINED": "0"}  # it looks into the worker


def sanitizer(environ: Mapping[str, str]) -> str:
    """The program's path: in PATH, in CUDA_HOME or where the toolkit lies as a rule. Raises EnvError."""
    folders = [environ.get("PATH", ""), *([str(Path(environ["CUDA_HOME"]) / "bin")] if "CUDA_HOME" in environ else [])]
    found = shutil.which(PROGRAM, path=os.pathsep.join([*folders, *_BESIDE]))
    if found is None:
        raise EnvError(
            f"{PROGRAM} is not installed here",
            cause=f"neither in PATH nor in {' or '.join(_BESIDE)}",
            repair="install NVIDIA's CUDA toolkit, or its package cuda-sanitizer, and put its folder into PATH; "
            "--under blocking needs nothing",
        )
    return found


def findings(log: str) -> list[str]:
    """What the sanitizer has said in a worker's log, the first lines that say something."""
    lines = [line[len(MARK) :].strip() for line in log.splitlines() if line.startswith(MARK)]
    return [line for line in lines if line][:MAX_LINES]
