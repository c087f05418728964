"""What is in a graph that was captured, as plain data: addresses are those of the process that captured it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Allocation(NamedTuple):
    """Memory that the driver knows. `nbytes` is 0 where it does not tell how far that goes."""

    base: int
    nbytes: int
    is_device: bool = True


@dataclass(frozen=True)
class KernelNode:
    """A launch. `params` are all parameters as one block, None where the driver does not tell them; `layout` has offset
    and bytes of each. `attributes`: CUlaunchAttributeID and the 64 bytes of its value. `module`: its handle, 0 where
    the driver does not tell."""

    module: int
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes | None
    layout: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, bytes], ...]
    max_shared_bytes: int
    is_cluster_size_free: bool


@dataclass(frozen=True)
class FillNode:
    """`rows` times `count` elements of `itemsize` bytes, each row `pitch` bytes after the one before."""

    target: int
    value: int
    itemsize: int
    count: int
    rows: int = 1
    pitch: int = 0


@dataclass(frozen=True)
class CopyNode:
    """`rows` times `nbytes`, each row so many bytes after the one before."""

    source: int
    target: int
    nbytes: int
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0


@dataclass(frozen=True)
class OtherNode:
    """What only its own process can run."""

    what: str


Node = KernelNode | FillNode | CopyNode | OtherNode
