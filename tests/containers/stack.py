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
FILES = ("docker-compose.yml", ".dockerignore", "pyproject.toml", "README.md", "LICENSE")
WORKERS = {"torch": "torch", "mlx": "mlx", "onnxruntime": "onnxruntime", "tokenizers": "tokenizers-0.23"}
LOAD = Path(__file__).with_name("load.py")
HEALTHY_S = 180.0


class Stack:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
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
        run(("sh", self.folder / "containers/wheelhouse.sh"), pip)
        run(("sh", self.folder / "containers/secret.sh", self.folder / "secret"), self.environ)
        if "LAYERZERO_BASE" not in os.environ:
            base = [sys.executable, str(Path(__file__).with_name("base.py"))]
            with subprocess.Popen(base, stdout=subprocess.PIPE) as tar:
                self.engine("import", "-", self.environ["LAYERZERO_BASE"], stdin=tar.stdout)
        self.compose("build")

    def compose(self, *argv: str) -> str:
        return run((*self.engine.compose, "--profile", "cpu", *argv), self.environ, cwd=self.folder)

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
        argv = [self.engine.docker, "exec", "-i", name, "python", "-u", "-c", LOAD.read_text()]
        errors = self.folder / "load.err"
        try:
            with errors.open("w") as err:
                process = subprocess.Popen(
                    argv, env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, text=True
                )
            assert process.stdout is not None

            def read() -> dict[str, Any]:
                line = process.stdout.readline()  # type: ignore[union-attr]
                assert line, f"the load has ended: {errors.read_text()}"
                return dict(json.loads(line))

            with process:
                yield read
                process.stdin.close()  # type: ignore[union-attr]
                process.stdout.read()
        finally:
            self.engine("rm", "-f", name)

    def tear_down(self) -> None:
        images = [] if os.environ.get("LAYERZERO_KEEP_IMAGES") else ["--rmi", "all"]
        self.compose("down", "--volumes", "--remove-orphans", *images)
        if images and "LAYERZERO_BASE" not in os.environ:
            self.engine("rmi", "-f", self.environ["LAYERZERO_BASE"])

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
