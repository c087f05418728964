"""An environment for all nodes: a file of `lz env export`, carried by Ray, and imported as `lz env import` does."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero.client.connection import start
from layerzero.cluster import ray_link
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.transport.plain import pack_body, unpack_body

CHUNK_BYTES = 16 << 20
MAX_WORDS = 4000  # of what an import has said


class Received:
    """Files that are coming to this node, by the SHA-256 that each is to have."""

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}

    def take(self, sha256: str, offset: int, data: bytes, is_last: bool, runtime_dir: Path) -> str:
        """A piece of a file, in order; with the last one the environment is built and probed. What the import said.
        Raises EnvError."""
        if offset == 0:
            handle, name = tempfile.mkstemp(prefix="lz-env-", suffix=".tar.gz")
            os.close(handle)
            self._drop(sha256)
            self._files[sha256] = Path(name)
        path = self._files.get(sha256)
        if path is None or path.stat().st_size != offset:
            raise InvalidArgument("send the file from its start: this piece does not follow the one before")
        with path.open("ab") as file:
            file.write(data)
        if not is_last:
            return ""
        try:
            return _imported(path, sha256, runtime_dir)
        finally:
            self._drop(sha256)

    def _drop(self, sha256: str) -> None:
        path = self._files.pop(sha256, None)
        if path is not None:
            path.unlink(missing_ok=True)


def _imported(path: Path, sha256: str, runtime_dir: Path) -> str:
    command = [sys.executable, "-P", "-m", "layerzero", "env", "import", str(path), "--sha256", sha256]
    own = start.environment(LAYERZERO_RUNTIME_DIR=str(runtime_dir), NO_COLOR="1", COLUMNS="120")
    ran = subprocess.run(command, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    said = f"{ran.stdout}\n{ran.stderr}".strip()[-MAX_WORDS:]
    if ran.returncode:
        raise EnvError(f"the import failed:\n{said}", env=path.name, cause=said, repair="lz env import, on that node")
    return said


@dataclass(frozen=True)
class Outcome:
    """Of one node. `problem`: why it does not have the environment now."""

    node: str
    said: str = ""
    problem: str = ""


def share(address: str, file: Path) -> list[Outcome]:
    """Hand a file of `lz env export` to all nodes that have an agent. Raises EnvError for what cannot be read."""
    try:
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        size = file.stat().st_size
    except OSError as exc:
        raise EnvError(f"{file}: {exc.strerror}; make it with lz env export NAME {file}") from exc
    ray = ray_link.attach(address)
    agents = {one.id: ray_link.agent_of(ray, one.id) for one in ray_link.nodes_of(ray) if one.is_alive}
    found = {node: agent for node, agent in agents.items() if agent is not None}
    if not found:
        raise NotConnected("no node has an agent", repair="lz cluster up")
    outcomes: dict[str, Outcome] = {}
    for offset, data in _pieces(file):
        is_last = offset + len(data) >= size
        head, piece = pack_body([sha256, offset, is_last]), ray.put(data)  # each node has it from the next one
        waiting = {
            node: agent.receive.options(concurrency_group=ray_link.QUESTIONS).remote(head, piece)
            for node, agent in found.items()
            if node not in outcomes
        }
        for node, reference in waiting.items():
            outcome = _outcome(ray, node, reference)
            if is_last or outcome.problem:
                outcomes[node] = outcome
    return list(outcomes.values())


def _pieces(file: Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as opened:
        while data := opened.read(CHUNK_BYTES):
            yield opened.tell() - len(data), data


def _outcome(ray: Any, node: str, reference: Any) -> Outcome:
    try:
        return Outcome(node, said=ray_link.answer_of(ray, reference, None))
    except LayerZeroError as exc:
        return Outcome(node, problem=exc.message)


def receive(files: Received, head: bytes, data: bytes, runtime_dir: Path) -> bytes:
    """The agent's half: the answer to a piece."""
    try:
        sha256, offset, is_last = unpack_body(head)
        return pack_body({"value": files.take(sha256, offset, data, is_last, runtime_dir)})
    except LayerZeroError as exc:
        return pack_body({"error": exc.to_wire()})
