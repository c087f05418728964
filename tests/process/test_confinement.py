"""What a library can do to the processes beside it, from a worker or a probe: real ones, with a hostile provider."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process.harness import BACKENDS, Site, wait_until

import layerzero as lz
from layerzero.ipc import confinement

needs_landlock = pytest.mark.skipif(not confinement.version(), reason="this kernel has no Landlock")
ATTACK = """
import ctypes, json, os, signal, sys

def _tried(path, flags=os.O_RDONLY):
    try:
        os.close(os.open(path, flags))
        return "done"
    except OSError as exc:
        return exc.errno

def _attack(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    done = {"memory": _tried(f"/proc/{pid}/mem", os.O_RDWR)}
    done["descriptor by its name"] = _tried(f"/proc/{pid}/fd/0")
    done["descriptor"] = -libc.syscall(438, pidfd, 0, 0) * ctypes.get_errno()  # pidfd_getfd
    if os.environ["LZ_TRACES"]:
        done["trace"] = -libc.ptrace(0x4206, pid, None, None) * ctypes.get_errno()  # PTRACE_SEIZE
    try:
        os.kill(pid, 0)
        done["signal"] = "done"
    except OSError as exc:
        done["signal"] = exc.errno
    folder = os.environ["LZ_FOLDER"]
    os.makedirs(f"{folder}/a", exist_ok=True)
    open(f"{folder}/b", "w").close()
    os.rename(f"{folder}/b", f"{folder}/a/b")  # compilers' caches do this
    child = os.fork()
    if not child:
        signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return done

_done = [_attack(pid) for pid in (os.getppid(), int(os.environ["LZ_VICTIM"]))]
_name = "worker" if "layerzero.workers.loop" in sys.modules else "probe"
with open(os.environ["LZ_FOLDER"] + f"/{_name}.{os.getpid()}", "w") as file:
    json.dump(_done, file)
os.rename(file.name, os.environ["LZ_FOLDER"] + f"/{_name}")
"""


def attacked(site: Site, folder: Path, **environ: str) -> dict[str, list[dict[str, object]]]:
    """What a provider could do to its parent and to this process, from a worker and from a probe."""
    provider = (BACKENDS / "toy.py").read_text() + ATTACK
    own = {"LZ_FOLDER": str(folder), "LZ_VICTIM": str(os.getpid()), "LZ_TRACES": "" if environ else "1"}
    site.add_backend("hostile", provider=provider, env={**own, **environ})
    with site.connect():
        x = np.ones(8, np.float32)
        np.testing.assert_allclose(lz.silu(x, backend="hostile"), x / (1 + np.exp(-x)), rtol=1e-6)
    return {name: json.loads(wait_until((folder / name).read_text)) for name in ("worker", "probe")}


@needs_landlock
def test_a_library_reaches_no_other_process(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """It once could read and change the memory of every process of its user, and take their descriptors."""
    for who, victims in attacked(new_site(), tmp_path).items():
        for done in victims:
            scoped = confinement.version() >= confinement.WITH_SCOPES
            assert done.pop("signal") == (1 if scoped else "done"), who
            assert set(done.values()) <= {1, 13}, (who, done)  # EPERM, EACCES


def test_a_backend_may_be_left_unconfined(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """A debugger in a worker needs it; the manifest says so."""
    for victims in attacked(new_site(), tmp_path, **{confinement.VARIABLE: "0"}).values():
        assert [done["signal"] for done in victims] == ["done", "done"]


def test_a_value_that_is_none_is_said(new_site: Callable[..., Site]) -> None:
    """Neither taken for on nor for off."""
    site = new_site()
    site.add_backend("odd", env={confinement.VARIABLE: "maybe"})
    with site.connect():
        with pytest.raises(lz.LayerZeroError) as failure:
            lz.silu(np.ones(8, np.float32), backend="odd")
        assert "allowed: 0 or 1" in f"{failure.value} {lz.status()}"
