"""This process's memory on its GPUs, as workers can reach it. All sessions share it; none of it is freed before the
process ends, except what its own library frees."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import secrets
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from layerzero.client.arrays.recognition import CPU
from layerzero.ipc.cuda import driver, streams
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.memory import Arena, Block, InPlace, Pool
from layerzero.ipc.errors import BackendError, CudaError, InvalidArgument

READY_S = 5.0  # so long a stream's work is waited for before its memory is read
LOOK_S = 0.001


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

    def read(self, places: Sequence[tuple[int, int]], behind: int | None = None) -> list[bytearray]:
        """Copies of memory, by address and bytes, in a stream of this thread's, behind all that the stream `behind` has
        so far. Captures of the program go on. Raises CudaError, and BackendError where that stream takes too long."""
        blocks, stream = [bytearray(nbytes) for _, nbytes in places], self.own_stream()
        with self.context as context:
            driver = context.driver
            mode = driver.exchange_capture_mode(CAPTURE_RELAXED)
            try:
                if behind is not None:
                    _await(driver, behind)
                for block, (address, nbytes) in zip(blocks, places, strict=True):
                    if nbytes:
                        target = (ctypes.c_char * nbytes).from_buffer(block)
                        driver.copy_to_host(ctypes.addressof(target), address, nbytes, stream)
                driver.synchronize_stream(stream)
            finally:
                driver.exchange_capture_mode(mode)
        return blocks

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


def _await(driver: driver.Driver, stream: int) -> None:
    """Until a stream has done what it has now."""
    event, until_s = driver.create_event(), time.monotonic() + READY_S
    try:
        driver.record_event(event, stream)
        while not driver.is_event_done(event):
            if time.monotonic() >= until_s:
                raise BackendError(f"their stream was not done within {READY_S:g} s")
            time.sleep(LOOK_S)
    finally:
        driver.destroy_event(event)
