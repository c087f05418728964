"""Lifted calls and machine code in this process: fetched from a broker by digest, and loaded once for each GPU."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from layerzero.client.connection.link import Link
from layerzero.client.gpu.memory import GpuMemory
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.cuda.driver import Driver
from layerzero.ipc.errors import Busy, ProtocolError
from layerzero.ipc.lifting.form import Lifted, digest
from layerzero.ipc.lifting.launch import LoadedCall
from layerzero.ipc.lifting.program import Scratch, program_of
from layerzero.ipc.lifting.specimen import MAX_BYTES

MAX_KEPT = 4096  # calls; machine code is kept as long as the process lives

Fetch = Callable[[str], bytes]


class LoadedLift(NamedTuple):
    """A lifted call that can be launched on one GPU. `program`: the same for the C; None where that has no room."""

    call: LoadedCall
    program: bytes | None
    scratch: Scratch

    @property
    def lifted(self) -> Lifted:
        return self.call.lifted


class _Loaded:
    """What this process has loaded. Contexts of GPUs are the process's, so sessions share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while code is fetched and loaded: nobody else needs it twice
        self.modules: dict[tuple[str, str], int] = {}  # by GPU and digest
        self.lifts: OrderedDict[tuple[str, str], LoadedLift] = OrderedDict()


_loaded = _Loaded()


def load(memory: GpuMemory, wanted: str, fetch: Fetch) -> LoadedLift:
    """The lifted call whose packed form has this digest. Raises CudaError, ProtocolError, and what `fetch` raises."""
    loaded = _loaded
    key = (memory.uuid, wanted)
    with loaded.lock:
        found = loaded.lifts.get(key)
        if found is None:
            lifted = Lifted.unpack(fetch(wanted))
            codes = {code: fetch(code) for code in lifted.codes if (memory.uuid, code) not in loaded.modules}
            with relaxed(memory) as driver:
                for code, data in codes.items():
                    loaded.modules[memory.uuid, code] = driver.load_module(data)
                modules = {code: loaded.modules[memory.uuid, code] for code in lifted.codes}
                call = LoadedCall(driver, lifted, modules)
            found = loaded.lifts[key] = LoadedLift(call, program_of(call), Scratch.of(lifted))
            if len(loaded.lifts) > MAX_KEPT:
                loaded.lifts.popitem(last=False)
        else:
            loaded.lifts.move_to_end(key)
    return found


def load_form(memory: GpuMemory, fetch: Fetch, wanted: str, form: bytes) -> LoadedLift:
    """As `load`, of a form that the broker has sent along. Raises ProtocolError for one with another digest, too."""
    if not isinstance(form, bytes) or digest(form) != wanted:
        raise ProtocolError(f"the form that came for {wanted:.80} has another digest")
    return load(memory, wanted, lambda name: form if name == wanted else fetch(name))


def forget() -> None:
    """As in a new process; for tests, whose GPUs come and go."""
    global _loaded
    _loaded = _Loaded()


@contextlib.contextmanager
def relaxed(memory: GpuMemory) -> Iterator[Driver]:
    """With the GPU's context current, in a way that breaks none of the application's captures."""
    with memory.context as context:
        before = context.driver.exchange_capture_mode(CAPTURE_RELAXED)
        try:
            yield context.driver
        finally:
            context.driver.exchange_capture_mode(before)


def fetch_from(link: Link) -> Fetch:
    """How a broker hands bytes over. Raises ProtocolError for other bytes than were asked for, Busy when there are no
    descriptors left, and what the broker refuses it with."""

    def fetch(wanted: str) -> bytes:
        given = link.get_lifted(wanted)
        if given is None:
            raise Busy("no file descriptors are left for what the broker hands over")
        fd, nbytes = given
        try:
            data = _read(fd, nbytes) if 0 < nbytes <= MAX_BYTES else b""
        finally:
            os.close(fd)
        if digest(data) != wanted:
            raise ProtocolError(f"{wanted:.80} was asked for, {len(data)} of {nbytes} bytes with another digest came")
        return data

    return fetch


def _read(fd: int, nbytes: int) -> bytes:
    parts, at = [], 0
    while at < nbytes:
        part = os.pread(fd, nbytes - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)
