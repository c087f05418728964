"""A container engine for a test: the one that runs, or a private one, started here and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.process.harness import processes, wait_until

CHOICE = "LAYERZERO_TEST_ENGINE"
START_TIMEOUT_S = 60.0
# It asks for more open files than root may have where that is bounded, and what watched a command in a container stays
# for five minutes.
PODMAN_SETTINGS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
exit_command_delay = 5
"""
CAPTURED: Mapping[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


class NoEngine(Exception):
    """Says why there is none."""


@dataclass(frozen=True)
class Engine:
    """`environ` is for docker and compose; `compose` starts their command line. `is_ours`: nobody else uses it."""

    docker: str
    compose: tuple[str, ...]
    environ: Mapping[str, str]
    is_ours: bool

    def __call__(self, *argv: str | Path, **options: Any) -> str:
        """Run docker and return what it printed. Raises RuntimeError with all of it when it fails."""
        return run((self.docker, *argv), self.environ, **options)


def run(argv: tuple[str | Path, ...], environ: Mapping[str, str], **options: Any) -> str:
    answer = subprocess.run(argv, **{**CAPTURED, **options}, env=environ, text=True, check=False)
    if answer.returncode != 0:
        raise RuntimeError(
            f"{' '.join(map(str, argv))} ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}"
        )
    return str(answer.stdout)


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Of podman if LAYERZERO_TEST_ENGINE says so. Raises NoEngine."""
    if os.environ.get(CHOICE) == "podman":
        with _podman() as found:
            yield found
        return
    docker = _docker()
    with contextlib.ExitStack() as stack:
        # The path's first docker is what compose starts to build.
        environ = {**os.environ, "PATH": f"{Path(docker).parent}:{os.environ['PATH']}", "DOCKER_BUILDKIT": "1"}
        environ["COMPOSE_DOCKER_CLI_BUILD"] = "1"
        compose = _compose(docker, environ)
        is_ours = not _answers(docker, environ)
        if is_ours:
            environ["DOCKER_HOST"] = stack.enter_context(_daemon(docker))
        yield Engine(docker, compose, environ, is_ours)


def _docker() -> str:
    """The first client on the path that can build: since version 23 that needs a plugin."""
    clients = [path for folder in os.get_exec_path() if (path := shutil.which("docker", path=folder))]
    for client in dict.fromkeys(clients):
        version = run((client, "--version"), os.environ).partition("version ")[2]
        if int(version.partition(".")[0]) < 23 or _succeeds(client, "buildx", "version"):
            return client
    missing = "docker's buildx plugin is missing" if clients else "docker is not installed"
    raise NoEngine(f"{missing} (on Debian: apt-get install docker.io docker-compose)")


def _compose(docker: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    if _succeeds(docker, "compose", "version"):
        return docker, "compose"
    if found := shutil.which("docker-compose", path=environ["PATH"]):
        return (found,)
    raise NoEngine("docker compose is not installed (on Debian: apt-get install docker-compose)")


def _succeeds(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def _answers(docker: str, environ: Mapping[str, str]) -> bool:
    asked = subprocess.run([docker, "info", "-f", "{{.ServerVersion}}"], env=environ, capture_output=True, check=False)
    return asked.returncode == 0 and bool(asked.stdout.strip())


@contextlib.contextmanager
def _daemon(docker: str) -> Iterator[str]:
    """A daemon that touches no network but those it is asked to make, and keeps all it has in a folder of its own.
    Yields its address."""
    dockerd = shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if dockerd is None or os.getuid() != 0:
        reason = "dockerd is not installed" if dockerd is None else "starting one needs root"
        raise NoEngine(f"no container engine answers, and {reason}")
    with _folder() as folder:
        address = f"unix://{folder}/docker.sock"
        command = (
            *(dockerd, "--host", address, "--pidfile", folder / "pid"),
            *("--data-root", folder / "data", "--exec-root", folder / "exec"),
            *("--bridge=none", "--iptables=false", "--ip6tables=false"),
        )
        with _serving(command, folder, docker, {**os.environ, "DOCKER_HOST": address}):
            yield address


@contextlib.contextmanager
def _podman() -> Iterator[Engine]:
    """A private service of podman, which docker's client and compose use as if it were docker's. It builds by itself,
    so there is no BuildKit."""
    podman, docker = shutil.which("podman"), shutil.which("docker")
    if podman is None or docker is None or os.getuid() != 0:
        reason = "podman or docker's client is not installed" if os.getuid() == 0 else "it needs root"
        raise NoEngine(
            f"podman cannot be tested: {reason} (on Debian: apt-get install podman docker.io docker-compose)"
        )
    with _folder() as folder:
        address, settings = f"unix://{folder}/podman.sock", folder / "containers.conf"
        settings.write_text(PODMAN_SETTINGS)
        environ = {**os.environ, "CONTAINERS_CONF": str(settings), "DISABLE_HC_SYSTEMD": "true"}
        environ |= {"DOCKER_HOST": address, "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}
        compose = _compose(docker, environ)
        command = [podman, "--cgroup-manager", "cgroupfs"]
        for option in ("root", "runroot", "tmpdir"):
            command += [f"--{option}", str(folder / option)]
        serve = (*command, "system", "service", "--time", "0", address)
        with _serving(serve, folder, docker, environ):
            with _health_checks(command, environ):
                yield Engine(docker, compose, environ, is_ours=True)
            wait_until(lambda: len(processes(folder)) == 1)  # the service itself


@contextlib.contextmanager
def _health_checks(podman: list[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Run those of containers that start, as podman has timers of systemd do, which may not run here."""
    ended = threading.Event()

    def ask(*argv: str) -> str:
        """Containers may go meanwhile."""
        return subprocess.run([*podman, *argv], **CAPTURED, env=environ, text=True, check=False).stdout

    def check() -> None:
        while not ended.wait(1.0):
            for container in ask("ps", "-q", "--filter", "health=starting", "--filter", "status=running").split():
                ask("healthcheck", "run", container)

    thread = threading.Thread(target=check)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For all that an engine writes, and mounts."""
    folder = Path(tempfile.mkdtemp(prefix="lz-engine-"))
    try:
        yield folder
    finally:
        _unmount(folder)
        subprocess.run(["rm", "-rf", folder], check=True)  # tens of thousands of files


@contextlib.contextmanager
def _serving(command: tuple[str | Path, ...], folder: Path, docker: str, environ: Mapping[str, str]) -> Iterator[None]:
    """While it runs and answers. Raises NoEngine."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: process.poll() is not None or _answers(docker, environ), START_TIMEOUT_S)
        if not _answers(docker, environ):
            lines = (folder / "log").read_text(errors="replace").splitlines()
            name = Path(command[0]).name
            raise NoEngine(f"{name} does not start here: {lines[-1] if lines else 'it says nothing'}")
        yield
    finally:
        process.terminate()
        process.wait(60)


def _unmount(folder: Path) -> None:
    """What an engine leaves mounted."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in reversed([place for place in mounted if place.startswith(f"{folder}/")]):
        subprocess.run(["umount", place], check=True)
