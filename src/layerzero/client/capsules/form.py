"""What a capsule is: a folder with a description of one call, what became of it, and, where that was wanted, the memory
of its arguments. It may have come from another machine: whatever is read from it is checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerzero.client.capsules.of_function import FunctionCall, demand_inside
from layerzero.ipc import files
from layerzero.ipc.errors import DeadlineExceeded, InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.ops import FUNCTION, OPS, PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.vocabulary.worker_codes import STICKY_EXIT

SCHEMA, WIDER = 1, 2  # WIDER: of a function, or of a call on a GPU, which older versions do not know
DEVICES = CPU, CUDA = "cpu", "cuda"
CALL, REPORT, LOG = "call.json", "report.json", "worker.log"  # files of a capsule, beside memory_name(n)
LAST_CALLS = "its worker's last calls"  # a fact: lines, or why there are none
WRONG = "WRONG"  # the outcome of an attempt whose result a shadow check found too far off
MAX_TEXT_BYTES = 4 << 20  # of each of those
MAX_SEGMENTS = 64
ALIGNMENTS = 256  # the start of a segment is known as a remainder of this
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Segment:
    """Memory that arguments lie in, several where they overlap. `offset`: of its start, modulo ALIGNMENTS. `sha256`: ""
    where the bytes were not kept, and of a new capsule until they were hashed."""

    nbytes: int
    offset: int
    sha256: str = ""


@dataclass(frozen=True)
class Argument:
    """A tensor of a call: what it is, and where it lies."""

    name: str
    spec: TensorSpec
    segment: int
    start: int  # bytes from the segment's


@dataclass(frozen=True)
class Failure:
    """An attempt that ended badly; exit_signal or exit_code where its worker died. WRONG: with a wrong result."""

    backend: str
    kernel_id: str
    outcome: str
    detail: str
    exit_signal: int | None
    exit_code: int | None

    @property
    def is_late(self) -> bool:
        """It took too long: that its worker was killed for it says nothing."""
        return self.outcome == DeadlineExceeded.code

    @property
    def what(self) -> str:
        """In one word."""
        if self.is_late:
            return self.outcome.lower()
        if self.exit_signal is not None:
            return f"signal{self.exit_signal}"
        if self.exit_code == STICKY_EXIT:
            return "gpu-lost"
        return f"exit{self.exit_code}" if self.exit_code is not None else self.outcome.lower()


@dataclass(frozen=True)
class Capsule:
    """A call. `arguments`: its tensors in the op's order, without those left out. `params`: its other values, as its
    planner takes them. `output`: the spec of `out=`, where one was given. `left_out`: why no memory was kept, "" where
    it was. `facts`: of the machine and the libraries, for people. `device`: where the arguments were. `function`: of a
    call of one, whose `op` is "function"; its arguments are in there."""

    name: str
    op: str
    made_s: float
    arguments: tuple[Argument, ...]
    segments: tuple[Segment, ...]
    params: Mapping[str, Scalar | list[Any]]
    output: TensorSpec | None
    failures: tuple[Failure, ...]
    served_by: str
    left_out: str
    facts: Mapping[str, Any]
    device: str = CPU
    function: FunctionCall | None = None

    @property
    def failed(self) -> Failure:
        """The first attempt, which is what the capsule was made for."""
        return self.failures[0]

    @property
    def has_data(self) -> bool:
        return not self.left_out

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def label(self) -> str:
        """The call in a line."""
        if self.function is not None:
            return self.function.text
        shapes = [f"{'x'.join(map(str, a.spec.shape))}:{a.spec.dtype}" for a in self.arguments]
        params = [f"{name}={value!r:.24}" for name, value in self.params.items() if value is not None]
        return f"{self.op}({', '.join((*shapes, *params))})" + ("" if self.device == CPU else f" on {self.device}")

    def without_data(self) -> Capsule:
        """The same without any bytes of the caller's."""
        bare = tuple(replace(segment, sha256="") for segment in self.segments)
        return replace(self, segments=bare, left_out=self.left_out or "it was shared without data")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        is_wider = self.function is not None or self.device != CPU
        return {
            "schema": WIDER if is_wider else SCHEMA,
            **({"device": self.device} if is_wider else {}),
            **({} if self.function is None else {"function": self.function.to_dict()}),
            "name": self.name,
            "op": self.op,
            "made_s": self.made_s,
            **arguments_to_dict(self.arguments, self.segments),
            "params": dict(self.params),
            "output": None if self.output is None else self.output.to_wire(),
            "failures": [vars(failure) for failure in self.failures],
            "served_by": self.served_by,
            "left_out": self.left_out,
            "facts": dict(self.facts),
        }


def memory_name(number: int) -> str:
    """The file of a segment."""
    return f"memory-{number}.bin"


def read(folder: Path) -> Capsule:
    """The capsule in a folder, its hashes not compared yet. Raises InvalidArgument for what is none."""
    try:
        value = json.loads(files.read(folder / CALL, MAX_TEXT_BYTES))
        capsule = _of(folder.name, value)
    except OSError as exc:
        raise InvalidArgument(
            f"{folder} is no capsule: {CALL}: {exc.strerror or exc}; lz capsule list has all"
        ) from exc
    except LayerZeroError as exc:
        raise InvalidArgument(f"{folder} is a damaged capsule: {exc.message}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise InvalidArgument(f"{folder} is a damaged capsule: {type(exc).__name__}: {exc!s:.200}") from exc
    return capsule


def memory(folder: Path, capsule: Capsule) -> list[bytes]:
    """The bytes of each segment. Raises InvalidArgument where they are not those that were kept."""
    found = []
    for number, segment in enumerate(capsule.segments):
        path = folder / memory_name(number)
        try:
            data = files.read(path, segment.nbytes)
        except OSError as exc:
            raise InvalidArgument(f"{path}: {exc.strerror or exc}; the capsule is damaged") from exc
        is_same = not segment.sha256 or hashlib.sha256(data).hexdigest() == segment.sha256
        if len(data) != segment.nbytes or not is_same:
            raise InvalidArgument(f"{path} is not what was kept: the capsule is damaged")
        found.append(data)
    return found


def _of(name: str, value: Any) -> Capsule:
    if value["schema"] not in (SCHEMA, WIDER):
        raise ValueError(f"schema {value['schema']!r:.20}; this version reads {SCHEMA} and {WIDER}")
    op, device = str(value["op"]), value.get("device", CPU)
    function = FunctionCall.of(value["function"]) if op == FUNCTION else None
    if (op not in PUBLIC_OPS and function is None) or device not in DEVICES:
        raise ValueError(f"no op is called {op!r:.40}, or it is on {device!r:.40}")
    arguments, segments = arguments_of(op, value)
    if function is not None and max((n for part in function.parts for n in part.memory), default=-1) >= len(segments):
        raise ValueError("arguments lie in memory that it does not have")
    for part in () if function is None or function.problem else function.parts:  # else: shown, not made again
        demand_inside(part, part.given, [segments[n].nbytes for n in part.memory[1:]])
    failures = tuple(Failure(**{key: one[key] for key in Failure.__annotations__}) for one in value["failures"])
    if not failures or not isinstance(value["params"], dict) or not isinstance(value["facts"], dict):
        raise ValueError("fields are missing")
    made_s, output = float(value["made_s"]), value["output"]
    return Capsule(
        name,
        op,
        made_s if math.isfinite(made_s) else 0.0,
        arguments,
        segments,
        value["params"],
        None if output is None else TensorSpec.from_wire(output),
        failures,
        str(value["served_by"]),
        str(value["left_out"]),
        value["facts"],
        device,
        function,
    )


def arguments_to_dict(arguments: Sequence[Argument], segments: Sequence[Segment]) -> dict[str, Any]:
    """Plain values of "arguments" and "segments"."""
    told = [{"name": a.name, "spec": a.spec.to_wire(), "segment": a.segment, "start": a.start} for a in arguments]
    return {"arguments": told, "segments": [dict(vars(segment)) for segment in segments]}


def arguments_of(op: str, value: Any) -> tuple[tuple[Argument, ...], tuple[Segment, ...]]:
    """What `arguments_to_dict` made of a call of an op, which may be anybody's: checked. Raises what is wrong with it:
    ValueError, KeyError, TypeError, LayerZeroError."""
    segments = tuple(
        Segment(_count(one["nbytes"]), _count(one["offset"]) % ALIGNMENTS, str(one["sha256"]))
        for one in value["segments"]
    )
    arguments = tuple(
        Argument(str(one["name"]), TensorSpec.from_wire(one["spec"]), _count(one["segment"]), _count(one["start"]))
        for one in value["arguments"]
    )
    if len(segments) > MAX_SEGMENTS or not {a.name for a in arguments} <= set(OPS[op].inputs):
        raise ValueError(f"arguments that {op} does not have")
    for a in arguments:
        if a.segment >= len(segments) or a.start + a.spec.span_bytes > segments[a.segment].nbytes:
            raise ValueError(f"{a.name} lies outside of its memory")
    return arguments, segments


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no number of bytes")
    return value
