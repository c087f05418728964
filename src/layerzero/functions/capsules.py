"""Capsules of calls of functions (docs/capsules.md): what is known of one whose worker died or hung, or whose shadow
check found another result, and its arguments as they cross."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from layerzero.client.capsules.form import ALIGNMENTS, CPU, CUDA, Failure, Segment
from layerzero.client.capsules.of_function import FunctionCall, Part, Target, given_of
from layerzero.client.capsules.taking import Capsules, Failed, Memory, bytes_at, merge, not_kept, pids_of
from layerzero.client.connection.report import SelectionReport
from layerzero.client.gpu.lent import GpuArguments
from layerzero.client.gpu.memory import memory_of
from layerzero.functions.calling import Arguments
from layerzero.functions.places import Candidate
from layerzero.ipc.errors import BackendError, LayerZeroError
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION

OUT_ON_GPU = "it writes to memory on a GPU that its caller gave it"
WRITTEN = "the program has written to an array on a GPU since the call"
OBJECTS = "objects among its arguments are in their worker alone"


class Asked(NamedTuple):
    """What a frame asks of a worker: as Part. `outs`: of results that have their memory before the call."""

    kind: str
    name: str
    stays: int
    given: Arguments
    outs: Sequence[Any] = ()


class Told(NamedTuple):
    """A call. `candidates`: what is called, in each environment. `asked`: the construction of an object first.
    `problem`: why it cannot be made again."""

    label: str
    candidates: Sequence[Candidate]
    asked: Sequence[Asked]
    problem: str
    tolerance: float


def take(
    capsules: Capsules, told: Told, failures: Sequence[Failure], served_by: str, report: SelectionReport | None = None
) -> str:
    """A note that names the capsule, "" where there is none. Costs nothing but a comparison where capsules are off.
    Raises nothing: what fails is the note."""
    if not capsules.is_on or not failures:
        return ""
    try:
        return _take(capsules, told, failures, served_by, report)
    except Exception as exc:  # the call has its result or its error all the same
        return not_kept(exc)


def _take(
    capsules: Capsules, told: Told, failures: Sequence[Failure], served_by: str, report: SelectionReport | None
) -> str:
    problem = told.problem or (OBJECTS if any(one.given.loans for one in told.asked) else "")
    on_gpu = [one.given.on_gpu for one in told.asked if one.given.on_gpu is not None]
    problem = problem or (OUT_ON_GPU if on_gpu and any(one.outs for one in told.asked) else "")

    def describe() -> tuple[Failed, Memory]:
        parts, segments, loads = [], list[Segment](), list[Any]()
        for one in told.asked:
            args, kwargs, _ = one.given.trees
            first = len(segments)
            there, places = _placed_there(one.given.on_gpu, len(one.given.ranges))
            trees = pack_tree([args, kwargs])
            payload_bytes, ranges = one.given.memory
            segments += [Segment(len(trees), 0), Segment(payload_bytes, 0)]
            segments += [Segment(nbytes, address % ALIGNMENTS) for address, nbytes in ranges]
            segments += there
            loads.append((trees, one.given, ranges, places))
            memory = tuple(range(first, len(segments)))
            given = given_of(args, kwargs)
            parts.append(Part(one.kind, one.name, one.stays, given, memory, tuple(map(tuple, one.outs))))

        stream = next((one.stream for one in on_gpu if one.stream is not None), None)

        def load() -> list[Any]:
            found = list[Any]()
            for trees, given, ranges, places in loads:
                found += [trees, given.payload()]
                found += [bytes_at(address, nbytes) for address, nbytes in ranges]
                if given.on_gpu is not None:
                    found += memory_of(given.on_gpu.like.device).read(places, stream)
            if any(one.is_changed for one in on_gpu):
                raise BackendError(WRITTEN)
            return found

        first_env = pools.environment_of(failures[0].backend)
        inside = sorted(told.candidates, key=lambda one: one.env.backend != first_env)
        targets = tuple(Target.of(one.env.backend, one.code) for one in inside)
        locked = _locked(inside[0])
        function = FunctionCall(told.label, targets, tuple(parts), problem)
        failed = Failed(
            *(FUNCTION, failures, None, {"tolerance": told.tolerance}),
            served_by=served_by,
            report="" if report is None else json.dumps(report.to_dict(), default=str),
            function=function,
            device=CUDA if on_gpu else CPU,
            facts={**({"environment": locked} if locked else {}), **_facts_of(on_gpu)},
            pids=() if report is None else pids_of(report),
        )
        return failed, Memory(tuple(segments), load, WRITTEN if any(one.is_changed for one in on_gpu) else "")

    likeness = (told.label, json.dumps([given_of(*one.given.trees[:2]) for one in told.asked]))
    return capsules.keep(failures[0], likeness, describe)


def _placed_there(given: GpuArguments | None, ranges: int) -> tuple[list[Segment], list[tuple[int, int]]]:
    """Pieces of a GPU's memory that arguments lie in, behind so many ranges of shared memory; address and bytes of
    each. Their nodes say so from here on."""
    if given is None:
        return [], []
    named = {str(number): array for number, array in enumerate(given.arrays) if array.spec.span_bytes}
    arguments, segments, starts = merge({name: (array.address, array.spec) for name, array in named.items()})
    for one in arguments:
        given.nodes[int(one.name)][-2:] = [ranges + one.segment, one.start]
    return list(segments), [(start, one.nbytes) for start, one in zip(starts, segments, strict=True)]


def _facts_of(on_gpu: Sequence[GpuArguments]) -> dict[str, str]:
    """What of arrays on a GPU is not as it was, or not known to be."""
    if not any(one.arrays for one in on_gpu):
        return {}
    said = "as the failed attempts, and who answered, left them: what a function writes there is not known"
    counts = all(version is not None for one in on_gpu for version in one.versions)
    return {"arrays on the GPU": said if counts else f"{said}; not all of them count the program's writes"}


def _locked(where: Candidate) -> list[str] | str:
    try:
        return where.env.locked()
    except LayerZeroError as exc:
        return f"not known: {exc.message}"
