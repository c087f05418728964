"""gloo of torch in the place of its NCCL: one machine has no GPUs, and torch's calls are the same. `install` has groups
take every torch tensor for one of a GPU, each rank for one of its own."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from tests.gpu import group_calls, point_calls

import layerzero as lz
from layerzero.client.arrays import recognition
from layerzero.groups import arrays, nccl, pipeline, points

_mine = SimpleNamespace(device=0, place="")


class ByGloo(nccl.Nccl):
    """Its connections are made at once, by all ranks."""

    def why_not(self) -> str:
        return ""

    def place(self) -> str:
        return _mine.place or f"GPU {self.device}"

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    def _made(self, size: int) -> Any:
        from torch.distributed import FileStore, ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return ProcessGroupGloo(FileStore(str(self._path), size), self._rank, size, options)

    def _stream(self) -> Any:
        return None

    def _on(self, stream: Any) -> Any:
        return torch.no_grad()

    def _recorded(self) -> Any:
        return SimpleNamespace(query=lambda: True)


def install(device: int) -> None:
    """In a process that is a rank, before its first call."""
    _mine.device = device
    for module in (arrays, pipeline, points):
        module.describe = _described  # type: ignore[attr-defined]
    nccl.Nccl = ByGloo  # type: ignore[misc]
    nccl.current_device = lambda: _mine.device
    group_calls.device = lambda group: torch.device("cpu")  # type: ignore[assignment]
    point_calls.on_a_stream = _on_no_stream  # type: ignore[assignment]


def become(group: lz.Group, device: int | None = None, place: str = "") -> None:
    """A rank of GPU tensors, on the GPU of its number."""
    install(group.rank if device is None else device)
    _mine.place = place


def _described(value: Any) -> recognition.Array:
    found = recognition.describe(value)
    if found.kind == "torch":
        found = copy.copy(found)
        found.device = _mine.device
    return found


@contextlib.contextmanager
def _on_no_stream(group: lz.Group) -> Iterator[None]:
    yield


class Site:
    """The broker that this process has, for ranks."""

    def python(self, code: str, **pipes: Any) -> Any:
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **pipes)
