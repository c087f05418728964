"""Which way a group's calls take, and why: by what was forced or measured, the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from layerzero.client.arrays.recognition import CPU
from layerzero.client.connection.report import Copy
from layerzero.groups.faults import named
from layerzero.ipc.errors import InvalidArgument

SHARED_MEMORY, GLOO, NCCL = "shared_memory", "gloo", "nccl"
BACKENDS = (SHARED_MEMORY, GLOO)  # of the CPU's memory; nccl is of a GPU's
MESSAGES, SHARED, ALONE = "messages", "shared memory", "here"  # paths, beside gloo
MESSAGE_BYTES = 64 << 10  # up to so much for each other rank goes with the message that begins a call
GLOO_DTYPES = ("int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")  # that it adds up
NCCL_DTYPES = GLOO_DTYPES
START_S = 60.0  # so long may a library take until it has all connections
MEASURED_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class OpLike(Protocol):
    """Of calls.Op, what a choice looks at."""

    @property
    def name(self) -> str: ...
    def share(self, nbytes: int, size: int) -> int: ...
    def cannot_gloo(self, dtype: str) -> str: ...
    def cannot_nccl(self, dtype: str) -> str: ...


@dataclass(frozen=True)
class Measured:
    """Medians of rank 0, in us."""

    shared_memory_us: float
    gloo_us: float

    @property
    def better(self) -> str:
        return GLOO if self.gloo_us < self.shared_memory_us else SHARED_MEMORY


@dataclass(frozen=True)
class Choice:
    """`path`: "messages", "shared memory", "gloo", "nccl", or "here" for a group of one. `why`: for what reason;
    `others`: why none of the other ways."""

    op: str
    nbytes: int
    path: str
    why: str
    others: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} of {self.nbytes:,} bytes: {self.path}, {self.why}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.others.items()])


@dataclass(frozen=True)
class GroupReport:
    """How a call went on this rank. `call`: its number in this generation of the group; `copies`: what was copied, and
    why; `waited_us`: of `elapsed_us`, for other ranks."""

    group: str
    rank: int
    size: int
    generation: int
    call: int
    choice: Choice
    copies: tuple[Copy, ...]
    waited_us: float
    elapsed_us: float

    @property
    def path(self) -> str:
        return self.choice.path

    @property
    def copied_bytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    def __str__(self) -> str:
        first, *rest = str(self.choice).splitlines()
        lines = [
            f"group {self.group!r}, rank {self.rank} of {self.size}, generation {self.generation}, call {self.call}: "
            f"{first}; {self.elapsed_us:,.0f} us, {self.waited_us:,.0f} of them for other ranks, "
            f"{self.copied_bytes:,} bytes copied"
        ]
        lines += [f"  copied: {copy.arg}, {copy.nbytes:,} bytes ({copy.where}): {copy.reason}" for copy in self.copies]
        return "\n".join(lines + rest)


def size_class(nbytes: int) -> int:
    """Powers of four."""
    return max(nbytes - 1, 0).bit_length() // 2


class Choices:
    """What was measured, by op and class of size. Rank 0's, which all ranks have."""

    def __init__(self) -> None:
        self.measured: dict[tuple[str, int], Measured] = {}

    def pick(self, op: str, nbytes: int, share: int, size: int, forced: str | None, cannot: str) -> Choice:
        """`share`: bytes for each other rank. `cannot`: why gloo has no such call, or nothing."""
        within = SHARED if share > MESSAGE_BYTES else MESSAGES
        limit = f"{share:,} bytes for each other rank, messages take up to {MESSAGE_BYTES:,}"
        other = {SHARED if within == MESSAGES else MESSAGES: limit}
        if size == 1:
            return Choice(op, nbytes, ALONE, "there is one rank", {})
        if forced == GLOO:
            return Choice(op, nbytes, GLOO, "asked for by backend=", {within: "backend='gloo' asks for another"})
        if forced == SHARED_MEMORY:
            return Choice(op, nbytes, within, limit, {**other, GLOO: "backend='shared_memory' asks for another"})
        found = self.measured.get((op, size_class(nbytes)))
        if found is None:
            return Choice(op, nbytes, within, limit, {**other, GLOO: cannot or "not measured; group.tune() does it"})
        times = f"{found.shared_memory_us:,.0f} us by shared memory, {found.gloo_us:,.0f} us by gloo on rank 0"
        if cannot or found.better == SHARED_MEMORY:
            return Choice(op, nbytes, within, limit, {**other, GLOO: cannot or times})
        return Choice(op, nbytes, GLOO, times, {within: times})

    def pick_at(
        self, op: OpLike, nbytes: int, dtype: str, device: int, size: int, forced: str | None, nccl: Any
    ) -> Choice:
        """Of memory of a device; `nccl` is this rank's, if it runs. Raises InvalidArgument where a backend is asked for
        what it does not have, or gets memory that it does not reach."""
        demand_place(forced, device, "x")
        cannot = op.cannot_gloo(dtype) if device == CPU else op.cannot_nccl(dtype)
        if cannot and (device != CPU or forced == GLOO):
            raise InvalidArgument(f"{cannot}; {'leave backend= out' if device == CPU else 'convert it'}")
        if device != CPU:
            demand_its_gpu(nccl, device)
            return on_gpu(op.name, nbytes, device)
        return self.pick(op.name, nbytes, op.share(nbytes, size), size, forced, cannot)

    def to_wire(self) -> list[list[Any]]:
        return [[op, of, one.shared_memory_us, one.gloo_us] for (op, of), one in self.measured.items()]

    def take(self, rows: Any) -> None:
        """Raises TypeError, ValueError for what is none."""
        self.measured = {(str(op), int(of)): Measured(float(own), float(gloo)) for op, of, own, gloo in rows}


def demand_backend(backend: str | None) -> None:
    """Raises InvalidArgument."""
    allowed = (*BACKENDS, NCCL)
    if backend is not None and backend not in allowed:
        raise InvalidArgument(f"backend is {backend!r:.40}; allowed: {', '.join(allowed)}")


def demand_place(forced: str | None, device: int, what: str) -> None:
    """Whether the memory is where that backend works. Raises InvalidArgument."""
    if device == CPU and forced == NCCL:
        raise InvalidArgument(f"{what} is on the CPU: nccl works on GPUs' memory; leave backend= out")
    if device != CPU and forced in BACKENDS:
        raise InvalidArgument(
            f"{what} is on GPU {device}: {forced} works on the CPU's memory; leave backend= out, or pass {what}.cpu()"
        )


def demand_its_gpu(nccl: Any, device: int) -> None:
    """Raises InvalidArgument where the rank's NCCL runs on another GPU."""
    if nccl is not None and nccl.device != device:
        raise InvalidArgument(f"x is on GPU {device}: this rank's nccl runs on GPU {nccl.device}; move x there")


def on_gpu(op: str, nbytes: int, device: int) -> Choice:
    others = dict.fromkeys((SHARED, GLOO), "it works on the CPU's memory")
    return Choice(op, nbytes, NCCL, f"the array is on GPU {device}", others)


def demand_one_each(group: str, places: Mapping[int, str]) -> None:
    """`places`: the GPU of each rank, as all name it alike. Raises InvalidArgument where two have the same: NCCL would
    wait for ever, or say something else."""
    of: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        of.setdefault(place, []).append(rank)
    shared = {place: ranks for place, ranks in of.items() if place and len(ranks) > 1}
    if shared:
        text = "; ".join(f"{named(ranks)} are on {place}" for place, ranks in shared.items())
        raise InvalidArgument(
            f"give each rank of group {group!r} a GPU of its own, by CUDA_VISIBLE_DEVICES or tensors' devices: {text}"
        )
