"""Arrays on a GPU that calls of functions lend, and memory for their results: where a worker reaches them, and in which
stream (docs/functions.md). Such a call is described by its maker and goes by the broker; the rest is as of ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from layerzero.client.arrays.recognition import Array, array_namespace, describe
from layerzero.client.connection.report import Copy
from layerzero.client.gpu.arrays import current_stream, device_name, give, new_like, version_of
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.lent_keys import ALIGNMENT, learn
from layerzero.client.gpu.memory import Place
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.gpu.results import layout_of, result_like
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import STAGED
from layerzero.ipc.cuda.memory import Arena, Block
from layerzero.ipc.errors import CudaGraphUnsafe, InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.vocabulary.tensors import TensorSpec

LEFT = 2  # positions that are left for blocks


class Range(NamedTuple):
    """Bytes of an arena that a call lends."""

    arena: Arena
    offset: int
    nbytes: int


class GpuArguments:
    """The arrays of a call that are on a GPU, all on one and of one library. Nothing is done with them yet. `like`:
    what results are made like."""

    def __init__(self, like: Array) -> None:
        self.like = like
        self.arrays: list[Array] = []
        self.nodes: list[list[Any]] = []  # to be told where the array lies
        self.versions: list[int | None] = []  # torch's counts of writes
        self.stream: int | None = None  # the caller's, once a call was made

    def add(self, array: Array, node: list[Any]) -> None:
        """Raises InvalidArgument for one beside which others cannot go."""
        first = self.like
        if array.device != first.device:
            text = f"an array on {device_name(array.device)} beside one on {device_name(first.device)}"
            raise InvalidArgument(f"{text}; move the arrays of a call to one GPU")
        if array.kind != first.kind:
            ours, theirs = (type(one.obj).__module__.partition(".")[0] for one in (first, array))
            raise InvalidArgument(f"an array of {theirs} on a GPU beside one of {ours}; pass arrays of one library")
        learn(type(array.obj))
        self.arrays.append(array)
        self.nodes.append(node)
        self.versions.append(version_of(array))

    @property
    def is_changed(self) -> bool:
        """Whether the program has written there since, as far as that is counted."""
        return any(version_of(a) != version for a, version in zip(self.arrays, self.versions, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class _OfLibrary:
    """What stands for an array where it is asked for its library alone."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __array_namespace__(self) -> Any:
        return self._namespace


def like_of(given: GpuArguments | None) -> Array | None:
    """What later results of a call are made like; it keeps none of the arguments. None where no array is on a GPU."""
    if given is None:
        return None
    like, empty = given.like, TensorSpec.contiguous(given.like.spec.dtype, (0,))
    if like.kind == "dlpack":
        return Array("dlpack", empty, 0, _OfLibrary(array_namespace(like.obj)), None, device=like.device)
    return describe(new_like(like, empty)[0])


def demand_uncaptured(context: Context, stream: int) -> None:
    """Raises CudaGraphUnsafe."""
    if context.driver.is_capturing(stream):
        raise CudaGraphUnsafe("call the function outside of the CUDA graph's capture; its process runs it at each call")


class Lent:
    """What one attempt of a call has lent, and what was `made` for its results: `ranges` and `outs` are of those that
    its maker does not know by itself."""

    def __init__(self, gpu: Gpu, like: Array, stream: int, results: Sequence[TensorSpec], made: list[Any]) -> None:
        self.gpu, self.transport, self.like, self.stream = gpu, gpu.transport, like, stream
        self.copies: list[Copy] = []
        self.uncopied_bytes = 0
        self.results = tuple(results)
        self.pending: Enqueued | None = None  # what the call is waited for by
        self._made = made
        self.ranges: list[Range] = []
        self.outs: list[list[Any]] = []

    @property
    def result_bytes(self) -> int:
        """Of all arrays that it has made for results."""
        return sum(spec.span_bytes for spec in self.results)

    def hush(self) -> None:
        """Another call follows that fails where this one does: it tells of that."""
        if self.pending is not None:
            self.pending.is_apart = True

    def given(self) -> list[Any]:
        """The results as the caller gets them, once the stream waits for the call."""
        if self.like.kind == "dlpack":  # its library waits for a stream of ours, that of the thread that takes them
            own, driver = self.gpu.memory.own_stream(), self.gpu.memory.context.driver
            with self.gpu.memory.context:
                event = driver.create_event()
                driver.record_event(event, self.stream)
                driver.wait_event(own, event)
                driver.destroy_event(event)
        return [give(self.like, one) for one in self._made]

    def note_kept(self, reason: str) -> None:
        """The worker copies what it was lent."""
        if self.uncopied_bytes:
            self.copies.append(Copy("an argument", self.uncopied_bytes, "worker", reason))
        self.uncopied_bytes = 0

    def close(self) -> None:
        """What was lent for it serves what the stream does next."""


class GpuLoan(Lent):
    """What one attempt of a call lends, in the order of the caller's stream: `ranges`, which its nodes name by their
    positions, and among them memory for its results, of which `outs` are the nodes. `sent` follows once the stream
    waits for the call, `close` in any case."""

    def __init__(
        self,
        gpu: Gpu,
        given: GpuArguments,
        positions: range,
        results: Sequence[TensorSpec] = (),
        stream: int | None = None,
    ) -> None:
        """`positions`: those that ranges may have. `stream`: None for the caller's current one. Raises InvalidArgument,
        and CudaGraphUnsafe while the stream is captured."""
        given.stream = current_stream(given.like) if stream is None else stream
        super().__init__(gpu, given.like, given.stream, results, [])
        self._positions, self.first = positions, positions.start  # ranges of shared memory come before them
        # Each array has a range of its own where there is room: so calls that are alike have the same nodes.
        self._is_apart = self.transport not in STAGED and len(given.arrays) + bool(results) + LEFT <= len(positions)
        self._blocks: list[Block] = []
        self._named: list[tuple[list[Any], int, int]] = []  # nodes, with range and offset in the arena
        self._whole: tuple[Place, int, int] | None = None  # the results' memory, their own address and bytes
        with gpu.memory.context as context:
            demand_uncaptured(context, self.stream)
            try:
                for array, node in zip(given.arrays, given.nodes, strict=True):
                    self._lend(array, node)
                self._make()
                if not self.ranges:  # nothing has elements; the worker is to know which GPU it is all the same
                    self._put(self._taken(ALIGNMENT, "it is empty"), ALIGNMENT, None)
                self._close_ranges()
            except BaseException:
                self.close()
                raise

    def _lend(self, array: Array, node: list[Any]) -> None:
        nbytes = array.spec.span_bytes
        if not nbytes:
            return
        place = self._find(array.address, nbytes)
        if place.block is not None:
            driver = self.gpu.memory.context.driver
            driver.copy_on_device(place.block.address, array.address, nbytes, self.stream)
        why = "its strides cannot be described to a worker" if array.needs_copy else place.copied
        if why:
            self.copies.append(Copy("an argument", array.nbytes, "client", why))
        else:
            self.uncopied_bytes += array.nbytes
        self._put(place, nbytes, node)

    def _make(self) -> None:
        """New arrays for the results."""
        specs = self.results
        if not specs:
            return
        made, address = result_like(self.like, None, specs)
        self._made = list(made) if len(specs) > 1 else [made]
        self.outs = [frames.array_node(frames.OF_GPU, spec, frames.IN_FRAME, 0) for spec in specs]
        layout = layout_of(specs)
        if not layout.nbytes:
            return
        place = self._find(address, layout.nbytes)
        if place.copied:
            self.copies.append(Copy("result", layout.nbytes, "client", place.copied))
        self._whole = (place, address, layout.nbytes)
        self._put(place, layout.nbytes, None)
        for node, at, spec in zip(self.outs, layout.offsets, specs, strict=True):
            if spec.span_bytes:
                self._named.append((node, self._position_of(place.arena), place.offset + at))

    def _find(self, address: int, nbytes: int) -> Place:
        """The caller's own memory where a worker reaches it, and a position is left for it; else a block."""
        found = self.gpu.memory.find(address, nbytes, self.transport)
        if isinstance(found, str):
            return self._taken(nbytes, found)
        is_new = all(one.arena is not found[0] for one in self.ranges)
        most = len(self._positions) - LEFT
        if is_new and len(self.ranges) >= most:
            return self._taken(nbytes, f"a call lends memory of at most {most} allocations on a GPU")
        return Place(*found)

    def _taken(self, nbytes: int, why: str) -> Place:
        block = self.gpu.memory.pool(self.transport).take(nbytes, self.stream)
        self._blocks.append(block)
        return Place(block.arena, block.offset, block, why)

    def _put(self, place: Place, nbytes: int, node: list[Any] | None) -> None:
        low, high = place.offset // ALIGNMENT * ALIGNMENT, place.offset + nbytes
        at = len(self.ranges) if self._is_apart else self._position_of(place.arena)
        if at < len(self.ranges):
            known = self.ranges[at]
            low = min(known.offset, low)
            self.ranges[at] = Range(place.arena, low, max(known.offset + known.nbytes, high) - low)
        else:
            if at == len(self._positions):
                text = f"pass arrays of at most {at} allocations on a GPU, such as parts of one"
                raise InvalidArgument(f"{text}: a call names no more")
            self.ranges.append(Range(place.arena, low, high - low))
        if node is not None:
            self._named.append((node, at, place.offset))

    def _position_of(self, arena: Arena) -> int:
        """That of the newest range in an arena; of a new one where there is none."""
        found = [at for at, known in enumerate(self.ranges) if known.arena is arena]
        return found[-1] if found else len(self.ranges)

    def _close_ranges(self) -> None:
        """They are known: tell nodes where they are in them, and workers that see copies what is there."""
        for node, at, offset in self._named:
            node[-2:] = [self._positions[at], offset - self.ranges[at].offset]
        if self.transport in STAGED:
            for arena, offset, nbytes in self.ranges:
                self.gpu.number(arena, self.transport)  # it is shown before anything is put into what is shown
                arena.publish(self.transport, offset, nbytes, self.stream)

    def sent(self) -> None:
        """The call is on its way, and the stream waits for it: what it made goes where the caller wants it."""
        if self._whole is None:
            return
        place, address, nbytes = self._whole
        if self.transport in STAGED:
            place.arena.collect(self.transport, place.offset, nbytes, self.stream)
        if place.block is not None:
            self.gpu.memory.context.driver.copy_on_device(address, place.block.address, nbytes, self.stream)

    def close(self) -> None:
        """The blocks serve what the stream does next."""
        pool = self.gpu.memory.pool(self.transport)
        while self._blocks:
            pool.give(self._blocks.pop())
