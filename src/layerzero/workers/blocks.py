"""Shared memory of clients as the blocks of a call, and the kernels that keep something for their clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from layerzero.ipc.errors import BackendError, ProtocolError
from layerzero.ipc.transport.wire import NO_ARENA, Ref
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.arenas import Arena
from layerzero.workers.provider import Bind, Block, PerClient


class Blocks:
    """For the loop's thread. `arenas`: by client and number."""

    def __init__(
        self, arenas: Mapping[tuple[int, int], Arena], per_client: PerClient | None, hear: Callable[..., bool]
    ) -> None:
        """`hear(waits=True)` takes a message of the broker's that may add an arena."""
        self.arenas, self._per_client, self._hear = arenas, per_client, hear

    def bind_of(self, bind: Bind, client: int) -> Bind:
        """The client's own, where the provider keeps something for each."""
        return bind if self._per_client is None else self._per_client.bind_of(client)

    def of(self, client: int, spec: TensorSpec, ref: Ref, *, is_sized: bool, writable: bool) -> Block:
        """`is_sized`: the leading extent is as long as the bytes given. Raises ProtocolError for a reference that does
        not hold its tensor, BackendError for an arena that could not be mapped."""
        if ref.arena == NO_ARENA:
            raise ProtocolError("a required tensor has no arena")
        arena = self.arenas.get((client, ref.arena))
        while arena is None:  # its descriptor was sent before this RUN; take what is queued until it is here
            self._hear(waits=True)
            arena = self.arenas.get((client, ref.arena))
        if arena.problem:
            raise BackendError(arena.problem)
        if ref.offset + ref.nbytes > arena.nbytes:
            raise ProtocolError(f"bytes {ref.offset}+{ref.nbytes} are outside an arena of {arena.nbytes}")
        spec = sized(spec, ref.nbytes) if is_sized else spec
        if spec.span_bytes > ref.nbytes:
            raise ProtocolError(f"{spec} spans {spec.span_bytes} bytes, the reference has {ref.nbytes}")
        view = arena.write if writable else arena.read
        return Block(view[ref.offset : ref.offset + ref.nbytes], spec)


def sized(spec: TensorSpec, nbytes: int) -> TensorSpec:
    """With as many rows as go into so many bytes."""
    row = spec.itemsize
    for extent in spec.shape[1:]:
        row *= extent
    return TensorSpec.contiguous(spec.dtype, (nbytes // row, *spec.shape[1:]))
