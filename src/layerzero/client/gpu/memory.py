"""This process's memory on its GPUs, as workers can reach it. All sessions share it; none of it is freed before the
process ends, except what its own library frees."""

from __future__ import annotations

import functools
import itertools
import re
import secrets
import threading
from typing import NamedTuple

from layerzero.client.arrays.recognition import CPU
from layerzero.ipc.cuda import driver, streams
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.memory import Arena, Block, InPlace, Pool
from layerzero.ipc.errors import CudaError, InvalidArgument


class Place(NamedTuple):
    """Bytes that a worker can reach. `block` is lent for them where `copied` says why not the caller's own."""

    arena: Arena
    offset: int
    block: Block | None = None
    copied: str = ""


class GpuMemory:
    """One GPU. Raises CudaError when the driver does not give it to this process."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.context = Context(driver.load(), uuid)
        self.client = secrets.token_hex(8)  # in handles: who these arenas belong to
        self.numbers = itertools.count(1)
        self.in_place = InPlace(self.context, self.client, self.numbers)
        self.why_no_memops = streams.probe(self.context)
        self._pools: dict[str, Pool] = {}
        self._own = threading.local()

    def pool(self, transport: str) -> Pool:
        """Memory of the kind that a transport needs."""
        kind = "vmm" if transport == "vmm" else "plain"
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._pools[kind] = Pool(self.context, self.client, self.numbers, kind=kind)
        return pool

    def own_stream(self) -> int:
        """A stream of this thread's, for arrays whose library shows none."""
        stream: int | None = getattr(self._own, "stream", None)
        if stream is None:
            with self.context:
                stream = self._own.stream = self.context.driver.create_stream()
        return stream

    def find(self, address: int, nbytes: int, transport: str) -> tuple[Arena, int] | str:
        """The arena that these bytes lie in, and where; or why they must be copied. Needs a current context."""
        if not nbytes:
            return "it is empty"
        known = self.pool(transport).find(address, nbytes)
        if known is not None:
            return known
        return (
            self.in_place.find(address, nbytes)
            if transport == "ipc"
            else f"memory of others cannot be shared by {transport!r}"
        )


@functools.cache
def uuid_of(ordinal: int) -> str:
    """Raises InvalidArgument where there is no such GPU."""
    try:
        gpus = driver.load().gpus()
    except OSError as exc:
        raise InvalidArgument(f"there is no NVIDIA driver here: {exc}") from exc
    for gpu in gpus:
        if gpu.ordinal == ordinal:
            return gpu.uuid
    raise InvalidArgument(f"cuda:{ordinal} is not there; this process sees {len(gpus)} GPUs")


def ordinal_of(name: str) -> int:
    """The ordinal in this process of the GPU that is meant by "cuda", "cuda:1" or its UUID; CPU for "cpu".

    Raises InvalidArgument for another name, and for a GPU that is not there.
    """
    if name == "cpu":
        return CPU
    found = _NAMES.fullmatch(name)
    if found is None:
        raise InvalidArgument(f"device {name!r:.80} is none; pass cpu, cuda, cuda:1 or the UUID of a GPU")
    try:
        gpus, why = driver.load().gpus(), ""
    except (OSError, CudaError) as exc:
        gpus, why = (), f" ({exc})"
    ordinal = int(found["ordinal"] or 0)
    for gpu in gpus:
        if gpu.uuid == name or (gpu.ordinal == ordinal and not name.startswith("GPU-")):
            return gpu.ordinal
    there_are = ", ".join(f"cuda:{gpu.ordinal} ({gpu.uuid})" for gpu in gpus)
    instead = f"cpu or one of {there_are}" if gpus else f"cpu: this process sees no NVIDIA GPU{why}"
    raise InvalidArgument(f"{name} is not there; pass {instead}")


_NAMES = re.compile(r"cuda(:(?P<ordinal>\d{1,4}))?|GPU-[\w-]{1,60}")


@functools.cache
def memory_of(ordinal: int) -> GpuMemory:
    """Made at the first call on a GPU."""
    return GpuMemory(uuid_of(ordinal))
