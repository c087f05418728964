"""Starts provider_harness.py in the environment of a backend and talks to it over pipes.

Environments are those of LAYERZERO_STORE (or the user's), built when they are not there: needs network then.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from layerzero.envs.build.build import ensure, resolve
from layerzero.envs.build.environ import worker_environ
from layerzero.ipc.vocabulary.tensors import TensorSpec

STORE = Path(os.environ.get("LAYERZERO_STORE") or platformdirs.user_cache_path("layerzero"))
SCRIPT = Path(__file__).with_name("provider_harness.py")
LENGTH = struct.Struct("<I")
# The backends of a CPU installation; those of GPUs are there, too, and have nothing to run on.
ON_CPU = {"mlx", "null", "numba", "onnx-reference", "onnxruntime", "openblas", "torch", "zentorch"}
ON_CPU |= {"sentencepiece", "tiktoken", "tokenizers-0.13", "tokenizers-0.23"}
FILL = 0x7B  # what outputs hold before a run: a huge number, which a kernel that adds to it cannot hide


class Harness:
    """A provider_harness.py in one backend's environment."""

    def __init__(self, backend: str) -> None:
        manifest = resolve(backend)
        env = ensure(manifest, store=STORE)
        self.process = subprocess.Popen(
            [env.python, SCRIPT, manifest.provider_target],
            env=worker_environ(env.environ, os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.kernels: list[str] = self.receive()[0]["kernels"]

    def run(
        self,
        kernel_id: str,
        op: str,
        inputs: Sequence[TensorSpec | None],
        outputs: Sequence[TensorSpec],
        attrs: dict[str, Any],
        sets: Sequence[Sequence[bytes]],
        offsets: Sequence[int] = (),
        alias: Mapping[int, int] | None = None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Bind once and run on each set of input bytes. Returns the reply and each run's output bytes. `offsets`: of
        inputs and then outputs, in bytes from where memory is aligned; `alias`: inputs that are the memory of others.
        """
        request = {
            "kernel": kernel_id,
            "op": op,
            "inputs": [spec and spec.to_wire() for spec in inputs],
            "outputs": [spec.to_wire() for spec in outputs],
            "attrs": attrs,
            "sets": len(sets),
            "fill": FILL,
            "offsets": list(offsets),
            "alias": dict(alias or {}),
        }
        text = json.dumps(request).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join([LENGTH.pack(len(text)), text, *(blob for blobs in sets for blob in blobs)]))
        self.process.stdin.flush()
        return self.receive()

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        stream = self.process.stdout
        assert stream is not None
        head = stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            pytest.fail(f"the provider's process ended with {self.process.wait()}")
        message = json.loads(stream.read(LENGTH.unpack(head)[0]))
        return message, [stream.read(length) for length in message["lengths"]]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


class Harnesses:
    """One process per backend, started when first asked for."""

    def __init__(self) -> None:
        self._running: dict[str, Harness] = {}

    def __getitem__(self, backend: str) -> Harness:
        """The backend's process; a new one where the last died."""
        if backend not in self._running or self._running[backend].process.poll() is not None:
            self._running[backend] = Harness(backend)
        return self._running[backend]

    def close(self) -> None:
        for harness in self._running.values():
            harness.close()
