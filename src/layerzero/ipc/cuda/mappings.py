"""The borrower's side of GPU memory that crosses: the clients' arenas as a worker has them mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from layerzero.ipc.cuda.abi import ALREADY_MAPPED
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import STAGED, ArenaHandle, Key, check_span
from layerzero.ipc.cuda.staging import Staging
from layerzero.ipc.errors import CudaError, ProtocolError
from layerzero.ipc.shm import memory

MAX_MAPPINGS = 4096  # of all clients together


@dataclass(eq=False)
class Mapping:
    """A client's arena in this process."""

    handle: ArenaHandle
    address: int  # of its first byte, on the GPU
    context: Context
    _physical: int = 0  # transport "vmm"
    _staging: Staging | None = None
    events: list[int] = field(default_factory=list)  # once retired: what to wait for before it is unmapped

    def at(self, offset: int, nbytes: int) -> int:
        """The address of some bytes. Raises ProtocolError when they are not all within the arena."""
        check_span(offset, nbytes, self.handle.nbytes)
        return self.address + offset

    def collect(self, offset: int, nbytes: int, stream: int) -> int:
        """Make bytes that the client has published visible to the stream; returns how many were copied for it.

        Needs a current context, as `publish` does.
        """
        address = self.at(offset, nbytes)
        if self._staging is None:
            return 0
        self._staging.to_device(address - offset, offset, nbytes, stream)
        return nbytes

    def publish(self, offset: int, nbytes: int, stream: int) -> int:
        """Make bytes that the stream has written visible to the client; returns how many were copied for it."""
        address = self.at(offset, nbytes)
        if self._staging is None:
            return 0
        self._staging.from_device(address - offset, offset, nbytes, stream)
        return nbytes

    def forget_events(self) -> None:
        """Needs a current context."""
        for event in self.events:
            self.context.driver.destroy_event(event)
        self.events.clear()

    def close(self) -> None:
        """Unmap it. To be called once no work that uses it is under way."""
        driver = self.context.driver
        with self.context:
            self.forget_events()
            if self.handle.transport == "ipc":
                driver.ipc_close(self.address)
            elif self.handle.transport == "vmm":
                driver.vmm_unmap(self.address, self.handle.nbytes)
                driver.vmm_release(self._physical)
            else:
                if self._staging is not None:
                    self._staging.close()
                driver.free(self.address)


class Mappings:
    """All arenas that this process has mapped, each once. For one thread."""

    def __init__(self, context_of: Callable[[str], Context]) -> None:
        """`context_of`: the context of a GPU by its UUID; raises CudaError for one that is not visible here."""
        self._context_of = context_of
        self._open: dict[Key, Mapping] = {}
        self._retired: dict[Key, Mapping] = {}

    def get(self, key: Key) -> Mapping:
        """Raises ProtocolError for an arena that was never opened or is retired."""
        try:
            return self._open[key]
        except KeyError:
            raise ProtocolError(f"arena {key} is not mapped here") from None

    def open(self, handle: ArenaHandle, fd: int | None = None) -> Mapping:
        """Map an arena, or return the mapping there is, also one that is retired and not unmapped yet: its client has
        lent it again. Takes `fd` over in every case.

        Raises ProtocolError for a handle that cannot be true, CudaError when the driver refuses: the transport does not
        work then for this arena.
        """
        try:
            if handle.has_fd != (fd is not None):
                how = "with" if handle.has_fd else "without"
                raise ProtocolError(f"an arena of transport {handle.transport} travels {how} a file descriptor")
            known = self._open.get(handle.key) or self._retired.get(handle.key)
            if known is not None:
                if known.handle != handle:
                    raise ProtocolError(f"arena {handle.key} is described in two ways: {known.handle}, then {handle}")
                if self._retired.pop(handle.key, None) is not None:
                    with known.context:
                        known.forget_events()
                    self._open[handle.key] = known
                return known
            if len(self._open) + len(self._retired) >= MAX_MAPPINGS:
                raise ProtocolError(f"more than {MAX_MAPPINGS} arenas are mapped")
            context = self._context_of(handle.gpu)
            with context:
                try:
                    mapping = _map(context, handle, fd)
                except CudaError as exc:
                    # What its client freed too early may still be mapped where the driver wants to put this one.
                    if exc.number != ALREADY_MAPPED or not self._reap_client(handle.client):
                        raise
                    mapping = _map(context, handle, fd)
            self._open[handle.key] = mapping
            return mapping
        finally:
            if fd is not None:
                os.close(fd)

    def retire(self, key: Key, streams: Iterable[int]) -> None:
        """No call will use this arena any more. It is unmapped by `reap`, after all that these streams do until now.

        Raises ProtocolError for an arena that is not mapped.
        """
        mapping = self.get(key)
        del self._open[key]
        self._retired[key] = mapping
        driver = mapping.context.driver
        with mapping.context:
            for stream in streams:
                mapping.events.append(driver.create_event())
                driver.record_event(mapping.events[-1], stream)

    def reap(self, busy: Iterable[int] = ()) -> list[Key]:
        """Unmap the retired arenas whose last work is done; returns them, for their client to free.

        The driver unmaps only when no stream of the process waits for a word, and blocks until then: while one of the
        `busy` streams has work, nothing is unmapped. Without any, this may wait.
        """
        streams = tuple(busy)

        def is_over(mapping: Mapping) -> bool:
            driver = mapping.context.driver
            return all(driver.is_event_done(event) for event in mapping.events) and all(
                driver.is_stream_idle(stream) for stream in streams
            )

        return self._reap(is_over)

    def close(self) -> None:
        """Unmap all, after the work that uses them."""
        for mapping in [*self._open.values(), *self._retired.values()]:
            with mapping.context:
                mapping.context.driver.synchronize()
            mapping.close()
        self._open.clear()
        self._retired.clear()

    def __len__(self) -> int:
        return len(self._open) + len(self._retired)

    def _reap_client(self, client: str) -> list[Key]:
        """Unmap all retired arenas of a client, waiting for their work."""

        def wait(mapping: Mapping) -> bool:
            if mapping.handle.client != client:
                return False
            for event in mapping.events:
                mapping.context.driver.synchronize_event(event)
            return True

        return self._reap(wait)

    def _reap(self, is_over: Callable[[Mapping], bool]) -> list[Key]:
        reaped = []
        for key, mapping in list(self._retired.items()):
            with mapping.context:
                if not is_over(mapping):
                    continue
            mapping.close()
            del self._retired[key]
            reaped.append(key)
        return reaped


def _map(context: Context, handle: ArenaHandle, fd: int | None) -> Mapping:
    """Needs the context to be current. Leaves `fd` open."""
    driver = context.driver
    if fd is None:
        mapping = Mapping(handle, driver.ipc_open(handle.handle), context)
    elif handle.transport in STAGED:
        memory.check_memfd(fd, handle.nbytes)
        staging = Staging(context, fd, handle.nbytes, is_pinned=handle.transport == "staged")
        try:
            return Mapping(handle, driver.allocate(handle.nbytes), context, _staging=staging)
        except CudaError:
            staging.close()
            raise
    else:
        physical = driver.vmm_import(fd)
        try:
            mapping = Mapping(handle, driver.vmm_map(physical, handle.nbytes, context.ordinal), context, physical)
        except CudaError:
            driver.vmm_release(physical)
            raise
    base, nbytes = driver.address_range(mapping.address)
    if base != mapping.address or nbytes < handle.nbytes:
        mapping.close()
        raise ProtocolError(
            f"arena {handle.key} is said to have {handle.nbytes} bytes; what was mapped has {nbytes}, "
            f"{mapping.address - base} of them before its start"
        )
    return mapping
