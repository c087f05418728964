"""lz.pipeline: stages over the ranks of a group, through which parts of a batch go at the same time."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.connection.report import html_of_text
from layerzero.client.plans.execution_plan import ExecutionPlan, plan
from layerzero.client.plans.guards import label_of
from layerzero.client.plans.recording import is_array
from layerzero.groups.arrays import new
from layerzero.groups.choices import SHARED_MEMORY
from layerzero.groups.group import Group
from layerzero.groups.joint import turn
from layerzero.groups.schedules import DRAIN, FILL, STEADY, Schedule, Task, schedule
from layerzero.groups.split_plan import SplitPlan
from layerzero.groups.stretches import joined
from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, MAX_NDIM
from layerzero.ipc.wording import counted

_NOTE_BYTES = 4096  # of what the last rank says of the result's shapes


@dataclass(frozen=True)
class PipelineExplanation:
    """`stages`: those of this rank; `phases`: ticks to fill the pipeline, steady ones, and to drain it; `bubble`: the
    share of all ranks' ticks in which they wait, were all stages alike; `made_us` and `elapsed_us` of the last run: in
    this rank's stages, and of all."""

    rank: int
    schedule: Schedule
    stages: tuple[int, ...]
    phases: Mapping[str, int]
    bubble: float
    made_us: float
    elapsed_us: float

    def __str__(self) -> str:
        its = self.schedule
        lines = [
            f"rank {self.rank} of {its.ranks}: {counted(its.stages, 'stage')}, here {', '.join(map(str, self.stages))}",
            f"  {its.micro_batches} micro-batches, {counted(len(its.ticks), 'tick')}: {self.phases[FILL]} to fill, "
            f"{self.phases[STEADY]} steady, {self.phases[DRAIN]} to drain; bubble {self.bubble:.0%}",
            *(f"  rank {rank}: {line}" for rank, line in enumerate(its.chart())),
        ]
        if self.elapsed_us:
            lines.append(f"  the last run took {self.elapsed_us:,.0f} us, {self.made_us:,.0f} of them in its stages")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_of_text(str(self))


_Spec = tuple[str, tuple[int, ...]]  # dtype and shape


class _Like:
    """Of which kind, and where, the arrays of a call are: those between stages and the result are, too."""

    def __init__(self, array: Any) -> None:
        found = describe(array)
        self.kind, self.is_on_gpu, self._array = found.kind, found.device != CPU, array

    def new(self, dtype: str, shape: tuple[int, ...]) -> Any:
        if self.is_on_gpu:
            return self._array.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
        return new(self.kind, dtype, shape)

    def demand(self, arrays: Sequence[Any], stage: int) -> None:
        """Raises InvalidArgument for arrays that are not where those of the call are."""
        if any((describe(array).device != CPU) != self.is_on_gpu for array in arrays):
            where = "a GPU" if self.is_on_gpu else "the CPU"
            raise InvalidArgument(f"let stage {stage} return arrays of {where}, as it takes them")


class Pipeline:
    """Made by lz.pipeline. All ranks call it with arrays of equal shapes, in the same order."""

    def __init__(self, stages: Sequence[Any], group: Group, micro_batches: int, *, shares_result: bool) -> None:
        self._group, self._shares_result = group, shares_result
        self._given = tuple(stages)
        self._count = micro_batches
        self._lock = threading.RLock()
        self._generation = -1
        self._made_ns = self._elapsed_ns = 0
        self._prepare()

    def __call__(self, *arrays: Any) -> Any:
        """`arrays` are the first stage's; their first dimension is the batch. Raises InvalidArgument before anything is
        sent, what a stage raises, and GroupBroken: on all other ranks, too, where a stage has raised."""
        # Transfers that are not agreed on would meet calls of another thread.
        with self._lock, turn(self._group):
            if self._group.generation != self._generation:
                self._prepare()
            batches = self._cut(arrays)
            start_ns, self._made_ns = time.perf_counter_ns(), 0
            like = _Like(arrays[0])
            label = f"{label_of((arrays, {}))}{' on GPUs' if like.is_on_gpu else ''}"
            is_known = self._agree(label)
            if like.is_on_gpu and not is_known:  # each rank's GPU is settled before anything flows
                self._group.broadcast(arrays[0].new_zeros(1))
            with self._group.giving_up():
                made = self._run(batches, label, like, is_known=is_known)
                self._settled.add(label)
                is_here = like.is_on_gpu and all(map(_asks_no_worker, self._stages.values()))
                (self._here.add if is_here else self._here.discard)(label)
                result = self._result(made, like)
                if like.is_on_gpu:
                    self._synchronize()
            self._elapsed_ns = time.perf_counter_ns() - start_ns
            return result

    def __repr__(self) -> str:
        its = self._schedule
        return f"<lz.pipeline of {counted(its.stages, 'stage')} over {self._group!r}>"

    def explain(self) -> PipelineExplanation:
        """The order in which ranks make their stages."""
        its, rank = self._schedule, self._group.rank
        times = self._made_ns / 1e3, self._elapsed_ns / 1e3
        return PipelineExplanation(
            rank, its, tuple(range(rank, its.stages, its.ranks)), its.phases(), its.bubble, *times
        )

    # --- a run

    def _prepare(self) -> None:
        """For the ranks that there are. Raises InvalidArgument."""
        group = self._group
        self._schedule = schedule(group.size, len(self._given), self._count)
        self._stages = {
            number: _planned(stage, number)
            for number, stage in enumerate(self._given)
            if number % group.size == group.rank
        }
        self._widths: dict[tuple[str, int], int] = {}  # how many arrays a stage gives, by shapes of the batch
        self._specs: dict[tuple[str, Task], list[_Spec]] = {}  # on GPUs, what these were, of each micro-batch
        self._settled: set[str] = set()  # such shapes of which all widths are known
        self._here: set[str] = set()  # such that this rank's stages asked no worker in the last run
        self._is_open = False  # a GPU may not have come to the end of the transfers
        self._generation = group.generation

    def _cut(self, arrays: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not arrays or not all(is_array(array) and array.shape for array in arrays):
            raise InvalidArgument("pass arrays whose first dimension is the batch")
        rows = arrays[0].shape[0]
        if any(array.shape[0] != rows for array in arrays) or rows % self._count or not rows:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise InvalidArgument(
                f"arrays have shapes {shapes}; allowed: one first dimension, which {self._count} micro-batches divide"
            )
        found = [describe(array) for array in arrays]
        if any(one.kind != "torch" and one.device != CPU for one in found) or len({one.device for one in found}) > 1:
            places = ", ".join("the CPU" if one.device == CPU else f"{one.kind}'s GPU {one.device}" for one in found)
            raise InvalidArgument(f"arrays are on {places}; allowed: all on the CPU, or torch tensors of one GPU")
        step = rows // self._count
        return [tuple(array[n : n + step] for array in arrays) for n in range(0, rows, step)]

    def _agree(self, label: str) -> bool:
        """Whether all ranks have made such a run. Raises InvalidArgument where they are to make different ones."""
        its = self._schedule
        digest = hashlib.sha256(f"{its.stages} {its.micro_batches} {label}".encode()).digest()
        said = np.frombuffer(digest + bytes([label in self._settled]), np.uint8)
        told = self._group.all_gather(said, backend=SHARED_MEMORY).reshape(its.ranks, len(said))
        unlike = [rank for rank in range(its.ranks) if told[rank, :-1].tobytes() != digest]
        if unlike:
            raise InvalidArgument(
                "let all ranks call it with equal shapes, on the CPU or each on its GPU, with equally many stages and "
                f"micro-batches: unlike rank {self._group.rank} are {', '.join(map(str, unlike))}"
            )
        return bool(told[:, -1].all())

    def _run(self, batches: list[tuple[Any, ...]], label: str, like: _Like, *, is_known: bool) -> list[tuple[Any, ...]]:
        """What the last stage has made of each micro-batch, where it is this rank's. `is_known`: on all ranks, what
        goes on from each stage."""
        its, rank = self._schedule, self._group.rank
        known = {Task(-1, n): batch for n, batch in enumerate(batches)}
        for tick, row in enumerate(its.ticks):
            task = row[rank]
            if task is not None:
                taken = known.pop(Task(task.stage - 1, task.micro_batch))
                stage = self._stages[task.stage]
                if self._is_open and not _asks_no_worker(stage):  # which it did not in the last run
                    self._synchronize()
                start_ns = time.perf_counter_ns()
                made = _as_tuple(stage(*taken), task.stage)
                self._made_ns += time.perf_counter_ns() - start_ns
                known[task] = made
            for moved, source, target in its.transfers(tick):
                if rank == source:
                    self._send(known.pop(moved), target, (label, moved), like, is_known=is_known)
                elif rank == target:
                    known[moved] = self._receive(source, (label, moved), like, is_known=is_known)
        ends = [Task(its.stages - 1, n) for n in range(its.micro_batches)]
        return [known[task] for task in ends if task in known]

    def _send(
        self, arrays: tuple[Any, ...], target: int, edge: tuple[str, Task], like: _Like, *, is_known: bool
    ) -> None:
        label, task = edge
        like.demand(arrays, task.stage)
        width = self._widths.setdefault((label, task.stage), len(arrays))
        if len(arrays) != width:
            raise InvalidArgument(
                f"let stage {task.stage} give equally many arrays each time: {len(arrays)}, before {width}"
            )
        if not is_known:
            self._group.send(np.array([width], np.int64), target)
        wait = self._waits(label)
        if like.is_on_gpu and is_known:
            found = [_spec_of(array) for array in arrays]
            if found != self._specs[edge]:
                raise InvalidArgument(
                    f"let stage {task.stage} give arrays of equal shapes each time: {_named(found)}, before "
                    f"{_named(self._specs[edge])}"
                )
            for array in arrays:
                self._group._pass_agreed(array, target, sends=True, wait=wait)
            return
        for array in arrays:
            self._group.send(array, target, wait=wait)
        self._keep(edge, arrays, like)

    def _receive(self, source: int, edge: tuple[str, Task], like: _Like, *, is_known: bool) -> tuple[Any, ...]:
        label, task = edge
        wait = self._waits(label)
        if like.is_on_gpu and is_known:
            arrays = tuple(like.new(*spec) for spec in self._specs[edge])
            for array in arrays:
                self._group._pass_agreed(array, source, sends=False, wait=wait)
            return arrays
        if not is_known:
            self._widths[label, task.stage] = int(self._group.recv(source)[0])
        width = self._widths[label, task.stage]
        arrays = tuple(self._group.recv(source, kind=like.kind, wait=wait) for _ in range(width))
        self._keep(edge, arrays, like)
        return arrays

    def _keep(self, edge: tuple[str, Task], arrays: tuple[Any, ...], like: _Like) -> None:
        """What both ranks know then, so that the next run need not agree on each array."""
        if like.is_on_gpu:
            self._specs[edge] = [_spec_of(array) for array in arrays]

    def _waits(self, label: str) -> bool:
        """Whether the end of a transfer is waited for, on a GPU: a worker that serves several ranks may have to wait
        for a stream of this one, whose GPU waits for another rank, which that worker has not served yet."""
        waits = label not in self._here or not all(map(_asks_no_worker, self._stages.values()))
        self._is_open |= not waits
        return waits

    def _synchronize(self) -> None:
        self._group.synchronize()
        self._is_open = False

    def _result(self, made: list[tuple[Any, ...]], like: _Like) -> Any:
        """The micro-batches' results put together, on all ranks; or where they are."""
        group, root = self._group, (self._schedule.stages - 1) % self._group.size
        whole = [joined(list(parts), 0) for parts in zip(*made, strict=True)]
        if self._shares_result and group.size > 1:
            note = np.zeros(_NOTE_BYTES, np.uint8)
            if group.rank == root:
                like.demand(whole, self._schedule.stages - 1)
                text = json.dumps([_spec_of(array) for array in whole]).encode()
                if len(text) > _NOTE_BYTES:
                    raise InvalidArgument(f"let the last stage give fewer arrays than {len(whole)}")
                note[: len(text)] = np.frombuffer(text, np.uint8)
            said = group.broadcast(note, root, out=note, backend=SHARED_MEMORY)
            specs = _specs_of(said.tobytes().rstrip(b"\0"))
            if group.rank != root:
                whole = [like.new(dtype, tuple(shape)) for dtype, shape in specs]
            whole = [group.broadcast(array, root, out=array) for array in whole]
        if not whole:
            return None
        return whole[0] if len(whole) == 1 else tuple(whole)


def _planned(stage: Any, number: int) -> Callable[..., Any]:
    if not callable(stage):
        raise InvalidArgument(f"stage {number} is {stage!r:.40}, and this rank's; allowed: a function or a model")
    return stage if isinstance(stage, (ExecutionPlan, SplitPlan)) else plan(stage)


def _asks_no_worker(stage: Any) -> bool:
    return isinstance(stage, ExecutionPlan) and stage.runs_here


def _spec_of(array: Any) -> _Spec:
    return describe(array).spec.dtype, tuple(array.shape)


def _specs_of(note: bytes) -> list[_Spec]:
    """What another rank says. Raises ProtocolError."""
    found: list[_Spec] = []
    try:
        told = json.loads(note)
    except ValueError as exc:
        raise ProtocolError(f"the last stage's rank told {note[:32]!r} of its result's shapes") from exc
    for one in told if isinstance(told, list) else [told]:
        match one:
            case [str(dtype), list(shape)] if (
                dtype in ITEMSIZE
                and len(shape) <= MAX_NDIM
                and all(type(extent) is int and extent >= 0 for extent in shape)
            ):
                found.append((dtype, tuple(shape)))
            case _:
                raise ProtocolError(f"the last stage's rank told {one!r:.40} in place of dtype and shape")
    return found


def _named(specs: list[_Spec]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in specs)


def _as_tuple(made: Any, stage: int) -> tuple[Any, ...]:
    found = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if not found or not all(is_array(one) for one in found):
        raise InvalidArgument(f"let stage {stage} return arrays; it returned {made!r:.80}")
    return found


def pipeline(stages: Sequence[Any], group: Group, *, micro_batches: int, shares_result: bool = True) -> Pipeline:
    """Functions or models, each of which takes what the one before it returns, as stages over the ranks of a group.

    A call cuts its arrays along their first dimension into micro-batches, which go through the stages one after the
    other, so that all ranks compute at the same time. Stage s is rank s % size's; with several for each rank these are
    interleaved. Each is a plan of its own, as by lz.plan, unless it is one already, or one that is split over another
    group.

    stages: as many as ranks, or a multiple; None for those of other ranks. Each returns an array, or a tuple of them.
    micro_batches: how many; the batch must be a multiple. shares_result: all ranks get the result; else the last
    stage's rank alone, and others None.
    Raises InvalidArgument.
    """
    if not isinstance(group, Group):
        raise InvalidArgument(f"group is a {type(group).__name__}; allowed: what lz.group gives")
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise InvalidArgument(f"stages is a {type(stages).__name__}; allowed: a list of functions or models")
    return Pipeline(stages, group, micro_batches, shares_result=shares_result)
