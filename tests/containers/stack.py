"""A compose stack of a test's own: its images, key, project, and a look into it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine, run
from tests.process.harness import ROOT, wait_until

CONTEXT = ("containers", "examples", "src")
FILES = ("docker-compose.yml", "docker-compose.cluster.yml", ".dockerignore", "pyproject.toml", "README.md", "LICENSE")
WORKERS = {"torch": "torch", "mlx": "mlx", "onnxruntime": "onnxruntime", "tokenizers": "tokenizers-0.23"}
CPU = ("--profile", "cpu")
WHEELS = ("torch.cpu", "mlx.cpu", "onnxruntime.cpu", "tokenizers-0.23.cpu", "ray")
LOAD = Path(__file__).with_name("load.py")
CLUSTER = ("-f", "docker-compose.cluster.yml")
HEALTHY_S = 180.0


class Stack:
    """`options`: of every compose command, by which the stack's files and profiles are chosen."""

    def __init__(self, engine: Engine, folder: Path, options: tuple[str, ...] = CPU) -> None:
        self.engine, self.folder, self.options = engine, folder, options
        self.project = f"lz-test-{secrets.token_hex(4)}"
        self.environ = {
            **engine.environ,
            "COMPOSE_PROJECT_NAME": self.project,
            "LAYERZERO_IMAGES": self.project,
            "LAYERZERO_BASE": os.environ.get("LAYERZERO_BASE", f"{self.project}/base"),
            "LAYERZERO_SECRET": str(folder / "secret"),
            "LAYERZERO_UID": "1000",
            "LAYERZERO_BUILD_NETWORK": "none",
        }

    def build(self) -> None:
        """All images of the cpu profile, from a copy of the checkout and wheels that were fetched before."""
        for name in CONTEXT:
            shutil.copytree(
                ROOT / name, self.folder / name, symlinks=True, ignore=shutil.ignore_patterns("wheelhouse", "secret")
            )
        for name in FILES:
            shutil.copy(ROOT / name, self.folder)
        pip = {**os.environ, "PYTHON": sys.executable, "WHEELHOUSE": str(self.folder / "containers/wheelhouse")}
        run(("sh", self.folder / "containers/wheelhouse.sh", *WHEELS), pip)
        run(("sh", self.folder / "containers/secret.sh", self.folder / "secret"), self.environ)
        if "LAYERZERO_BASE" not in os.environ:
            base = [sys.executable, str(Path(__file__).with_name("base.py"))]
            with subprocess.Popen(base, stdout=subprocess.PIPE) as tar:
                self.engine("import", "-", self.environ["LAYERZERO_BASE"], stdin=tar.stdout)
        self.compose("build")

    def compose(self, *argv: str) -> str:
        return run((*self.engine.compose, *self.options, *argv), self.environ, cwd=self.folder)

    def containers(self, service: str = "") -> list[str]:
        """Ids, those that have ended included."""
        wanted = [f"label=com.docker.compose.project={self.project}"]
        wanted += [f"label=com.docker.compose.service={service}"] if service else []
        return self.engine("ps", "-aq", *(word for label in wanted for word in ("--filter", label))).split()

    def container(self, service: str) -> str:
        (found,) = self.containers(service)
        return found

    def inspect(self, container: str) -> dict[str, Any]:
        (facts,) = json.loads(self.engine("inspect", container))
        return dict(facts)

    def logs(self, container: str) -> str:
        return self.engine("logs", container, stderr=subprocess.STDOUT)

    def health(self, container: str) -> str:
        return str(self.inspect(container)["State"].get("Health", {}).get("Status"))

    def wait_healthy(self, *services: str) -> None:
        for service in services or ("broker", *WORKERS):
            for container in self.containers(service):
                wait_until(lambda found=container: self.health(found) == "healthy", HEALTHY_S)  # type: ignore[misc]

    def status(self) -> dict[str, Any]:
        """What the broker says of its backends, by name."""
        answer = json.loads(self.engine("exec", self.container("broker"), "lz", "status", "--json"))
        return {backend["name"]: backend for backend in answer["backends"]}

    @contextlib.contextmanager
    def load(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Run load.py in a container of the application. Yields what reads its next line."""
        name = f"{self.project}-load"
        self.compose("run", "-d", "--no-deps", "--name", name, "application", "sleep", "3600")
        try:
            with self.running(name, LOAD) as read:
                yield read
        finally:
            self.engine("rm", "-f", name)

    @contextlib.contextmanager
    def running(self, container: str, script: Path, *words: str) -> Iterator[Callable[[], dict[str, Any]]]:
        """Run a script in a container until `with` ends, which closes its stdin. Yields what reads its next line."""
        argv = [self.engine.docker, "exec", "-i", container, "python", "-u", "-c", script.read_text(), *words]
        errors = self.folder / f"{script.stem}.err"
        with errors.open("w") as err:
            process = subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None

        def read() -> dict[str, Any]:
            while True:
                line = process.stdout.readline()  # type: ignore[union-attr]
                assert line, f"it has ended: {errors.read_text()}"
                if line.startswith("{"):  # Ray says on a program's stdout what became of nodes
                    return dict(json.loads(line))

        with process:
            try:
                yield read
            finally:
                process.stdin.close()
                process.stdout.read()

    def tear_down(self) -> None:
        images = [] if os.environ.get("LAYERZERO_KEEP_IMAGES") else ["--rmi", "all"]
        self.compose("down", "--volumes", "--remove-orphans", *images)
        if images and "LAYERZERO_BASE" not in os.environ:
            self.engine("rmi", "-f", self.environ["LAYERZERO_BASE"])

    def end(self) -> None:
        """Containers, volumes and networks; images stay."""
        self.compose("down", "--volumes", "--remove-orphans")

    def left(self) -> dict[str, str]:
        """What there is of this stack."""
        label = f"label=com.docker.compose.project={self.project}"
        return {
            "containers": self.engine("ps", "-aq", "--filter", label),
            "volumes": self.engine("volume", "ls", "-q", "--filter", label),
            "networks": self.engine("network", "ls", "-q", "--filter", label),
            "images": self.engine("images", "-q", "--filter", f"reference={self.project}/*"),
        }


@contextlib.contextmanager
def stack(engine: Engine) -> Iterator[Stack]:
    """Built, not started. Afterwards nothing is left of it, but for its images with LAYERZERO_KEEP_IMAGES set."""
    with tempfile.TemporaryDirectory(prefix="lz-stack-") as folder:
        made = Stack(engine, Path(folder))
        try:
            made.build()
            yield made
        finally:
            made.tear_down()


@contextlib.contextmanager
def nodes_of(built: Stack) -> Iterator[Stack]:
    """docker-compose.cluster.yml with the images of a stack that was built, and one for nodes. Not started. Afterwards
    all is gone but the stack's images."""
    made = Stack(built.engine, built.folder, CLUSTER)
    token = built.folder / "ray-token"
    made.environ |= {"LAYERZERO_BASE": built.environ["LAYERZERO_BASE"], "LAYERZERO_RAY_TOKEN": str(token)}
    made.environ["LAYERZERO_IMAGES"] = built.project
    run(("sh", built.folder / "containers/secret.sh", token), made.environ)
    made.compose("build", "one")
    try:
        yield made
    finally:
        made.end()
        if not os.environ.get("LAYERZERO_KEEP_IMAGES"):
            made.engine("rmi", f"{built.project}/node")


def why_no_network(engine: Engine) -> str:
    """What this engine says when it is to make an internal network; empty where it does."""
    name = f"lz-test-{secrets.token_hex(4)}"
    try:
        engine("network", "create", "--internal", name)
    except RuntimeError as exc:
        return str(exc)
    engine("network", "rm", name)
    return ""
