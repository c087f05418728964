"""Agents of joined workers for tests, as containers run them: from staged code, with a secret, pid 1 of their own
namespace where the system allows it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.process.harness import Site, wait_until

from layerzero.envs.build import stage


@functools.cache
def can_unshare() -> bool:
    """Whether this user may make pid namespaces."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class Agent:
    """`python -m layerzero.workers.join` for a backend of `site`, of `code`. `pid` is the agent's in our namespace."""

    def __init__(
        self,
        site: Site,
        backend: str,
        *,
        secret_file: Path | None = None,
        is_pid_1: bool = False,
        code: Path | None = None,
        **environment: str,
    ) -> None:
        self.site = site
        self.backend = backend
        self.log = site.folder / f"agent-{backend}-{len(list(site.folder.glob('agent-*')))}"
        command = [
            sys.executable,
            "-m",
            "layerzero.workers.join",
            "--backend",
            backend,
            "--directory",
            str(site.folder),
        ]
        if secret_file is not None:
            command += ["--secret-file", str(secret_file)]
        if is_pid_1:
            command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LAYERZERO_")}
        environ |= environment
        environ["PYTHONPATH"] = str(code or stage.stage(Path(site.environ["LAYERZERO_STORE"])))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
        self._outer = is_pid_1

    @property
    def pid(self) -> int:
        if not self._outer:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_until(children.read_text).split()[0])

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def children(self) -> list[int]:
        """Pids in our namespace of what it has started."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def pause(self) -> None:
        """As `docker pause`: everything in it stands still."""
        for pid in (self.pid, *self.children()):
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in (*self.children(), self.pid):
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """As `docker kill`."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """As `docker stop`; returns the exit code."""
        if self.process.poll() is None:
            for pid in (*self.children(), self.pid):
                os.kill(pid, signal.SIGCONT)
            self.signal(signal.SIGTERM)
        return self.process.wait(30)
