"""Which kernels may serve a call, in which order, and why not the others. Functions of their arguments."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from layerzero.capabilities.descriptor import Capability, KernelCapability
from layerzero.capabilities.match import Rejection, match
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument, NoBackend, ProtocolError
from layerzero.ipc.messages import Prepare, Route, decode, encode
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import TensorSpec

MAX_NAME = 64
ATTR_TYPES = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class CallSpec:
    """A call signature in canonical form."""

    op: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]
    pinned: str  # backend the caller insists on, or ""

    @classmethod
    def parse(cls, body: bytes) -> CallSpec:
        """From an encoded Route message. Raises ProtocolError or InvalidArgument."""
        message = decode(body, Route)
        if len(message.backend) > MAX_NAME:
            raise ProtocolError(f"backend name of {len(message.backend)} characters; allowed: {MAX_NAME}")
        op = OPS.get(message.op)
        if op is None:
            near = difflib.get_close_matches(message.op, OPS, n=1)
            raise InvalidArgument(f"unknown op {message.op!r:.80}{f'; did you mean {near[0]!r}?' if near else ''}")
        if len(message.inputs) != len(op.inputs) or len(message.outputs) != len(op.outputs):
            raise ProtocolError(f"{op.name} has {len(op.inputs)} inputs and {len(op.outputs)} outputs")
        missing = [
            n for n, spec in zip(op.inputs, message.inputs, strict=True) if spec is None and n not in op.optional
        ]
        if missing:
            raise ProtocolError(f"{op.name} lacks {', '.join(missing)}")
        if set(message.attrs) != set(op.attrs) or not all(type(v) in ATTR_TYPES for v in message.attrs.values()):
            raise ProtocolError(
                f"{op.name} takes exactly the attributes {', '.join(op.attrs) or '(none)'}, all scalars"
            )
        inputs = tuple(None if spec is None else TensorSpec.from_wire(spec) for spec in message.inputs)
        if op.name == "attention" and any(spec is not None and spec.ndim != 4 for spec in inputs):
            raise ProtocolError("attention takes tensors of 4 dimensions (BHSD)")
        return cls(
            op.name,
            inputs,
            tuple(TensorSpec.from_wire(spec) for spec in message.outputs),
            message.attrs,
            message.backend,
        )

    def prepare(self, kernel_id: str) -> bytes:
        """The encoded Prepare message that tells a worker about this signature."""
        return encode(
            Prepare(
                op=self.op,
                kernel_id=kernel_id,
                inputs=[None if spec is None else spec.to_wire() for spec in self.inputs],
                outputs=[spec.to_wire() for spec in self.outputs],
                attrs=dict(self.attrs),
            )
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate: accepted with a score, or rejected with every reason."""

    kernel_id: str
    backend: str
    reasons: tuple[Rejection, ...]
    priority: int = 0
    kernel: KernelCapability | None = None
    measured_us: float | None = None

    @property
    def is_accepted(self) -> bool:
        return not self.reasons

    @property
    def score(self) -> float:
        """Priority first; the measured time decides between equals: 1 / (1 + us) lies in (0, 1)."""
        return self.priority + (1.0 / (1.0 + self.measured_us) if self.measured_us is not None else 0.0)

    def to_wire(self) -> dict[str, Any]:
        return {
            "kernel_id": self.kernel_id,
            "backend": self.backend,
            "accepted": self.is_accepted,
            "reasons": [{"code": r.code.value, "detail": r.detail} for r in self.reasons],
            "score": round(self.score, 6) if self.is_accepted else None,
            "measured_us": self.measured_us,
        }


def static_verdicts(spec: CallSpec, capabilities: Mapping[str, Capability]) -> tuple[Verdict, ...]:
    """What the descriptors say, one verdict per kernel of the op."""
    found: list[Verdict] = []
    for backend, capability in capabilities.items():
        kernels = capability.ops.get(spec.op, ())
        for kernel in kernels:
            reasons = match(spec.op, kernel, spec.inputs, spec.outputs, spec.attrs)
            found.append(Verdict(kernel.kernel_id, backend, tuple(reasons), kernel.priority, kernel))
        if not kernels and backend == spec.pinned:
            detail = f"{backend} serves {', '.join(sorted(capability.ops))}"
            found.append(Verdict(f"{backend}.{spec.op}", backend, (Rejection(Reason.OP_UNSUPPORTED, detail),)))
    return tuple(found)


def rank(
    spec: CallSpec,
    verdicts: Sequence[Verdict],
    unavailable: Mapping[str, Rejection],
    measured_us: Mapping[str, float],
) -> tuple[Verdict, ...]:
    """Descriptors' verdicts joined with what is true now: accepted ones first, best first."""
    joined = []
    for verdict in verdicts:
        reasons = list(verdict.reasons)
        if spec.pinned and verdict.backend != spec.pinned:
            reasons.insert(0, Rejection(Reason.NOT_PINNED, f"the call is pinned to {spec.pinned!r}"))
        if verdict.backend in unavailable:
            reasons.append(unavailable[verdict.backend])
        joined.append(
            Verdict(
                verdict.kernel_id,
                verdict.backend,
                tuple(reasons),
                verdict.priority,
                verdict.kernel,
                measured_us.get(verdict.kernel_id),
            )
        )
    return tuple(sorted(joined, key=lambda v: (not v.is_accepted, -v.score, v.kernel_id)))


@dataclass
class Signature:
    """A call signature in use, shared by all clients' routes that have it."""

    key: bytes
    spec: CallSpec
    verdicts: tuple[Verdict, ...]
    ranked: tuple[Verdict, ...] = ()
    order: tuple[Verdict, ...] = ()  # the accepted part of `ranked`
    epoch: int = -1  # of the broker's availability when `ranked` was computed
    calls: int = 0
    users: int = 0  # routes and open calls
    measured_us: dict[str, float] = field(default_factory=dict)

    def note_time(self, kernel_id: str, kernel_ns: int) -> None:
        """Keep a running average of the kernel's own time, weight 1/8 for the newest."""
        us = kernel_ns / 1e3
        old = self.measured_us.get(kernel_id)
        self.measured_us[kernel_id] = us if old is None else old + (us - old) / 8


def no_backend(
    spec: CallSpec, ranked: tuple[Verdict, ...], known: Mapping[str, Capability]
) -> NoBackend | InvalidArgument:
    """The error for a call that nobody can take: which candidates there are, and why each refuses."""
    if spec.pinned and spec.pinned not in known:
        near = difflib.get_close_matches(spec.pinned, known, n=1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        return InvalidArgument(f"no backend is called {spec.pinned!r}{hint}. Known: {', '.join(sorted(known))}")
    if not ranked:
        return NoBackend(f"{spec.op}: no backend serves it; see `lz status`")
    relevant = [v for v in ranked if not spec.pinned or v.backend == spec.pinned]
    lines = [f"  {v.kernel_id}: " + "; ".join(f"{r.code.value}: {r.detail}" for r in v.reasons) for v in relevant]
    return NoBackend(f"{spec.op}: no kernel accepts this call\n" + "\n".join(lines))
