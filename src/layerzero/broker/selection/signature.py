"""What a selection is about: a call's signature in canonical form, and the verdict on each of its candidates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability, KernelCapability
from layerzero.capabilities.device import DEVICE_NAMES, SHARED_MEMORY, holds_tensors_of
from layerzero.capabilities.fixes import counterfactual
from layerzero.capabilities.match import Rejection, match
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument, NoBackend, ProtocolError
from layerzero.ipc.names import unknown_name
from layerzero.ipc.transport.messages import Prepare, Route, decode, encode
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.neighbours import Neighbourhood
from layerzero.ipc.vocabulary.ops import CALLED_OPS, FUNCTION
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.wording import shared_causes

if TYPE_CHECKING:
    from layerzero.broker.selection.ranking import TimingBucket

MAX_NAME = 64
MAX_ADVISED = 3  # a refusal looks for advice for so many kernels: that costs as much as the rest of it
MAX_NEXT_OPS = 8
ATTR_TYPES = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class CallSpec:
    """A call signature in canonical form."""

    op: str
    inputs: tuple[TensorSpec | None, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any]
    pinned: str  # backend the caller insists on, or ""; of functions' workers several, separated by ","
    policy: Mapping[str, Any] = field(default_factory=dict)  # what the caller asks for beyond the broker's policy
    next_ops: tuple[str, ...] = ()  # ops that take this one's result: a kernel that fuses them is worth more
    device: str = ""  # UUID of the GPU that all tensors are on; "" for the CPU
    rolled: tuple[str, ...] = ()  # versions that stand in for their backends here: a rollout wants it

    @classmethod
    def parse(cls, body: bytes) -> CallSpec:
        """From an encoded Route message. Raises ProtocolError or InvalidArgument."""
        message = decode(body, Route)
        pinned = pools.named(message.backend)
        longest = max(map(len, pinned), default=0)
        most = pools.MAX_PINNED if message.op == FUNCTION else 1
        if longest > MAX_NAME or len(pinned) > most:
            text = f"{len(pinned)} backends, with names of up to {longest} characters"
            raise ProtocolError(f"{text}; allowed: {most}, of {MAX_NAME}")
        op = CALLED_OPS.get(message.op)
        if op is None:
            raise InvalidArgument(unknown_name("op", message.op, CALLED_OPS))
        if len(message.inputs) != len(op.inputs) or len(message.outputs) != len(op.outputs):
            raise ProtocolError(f"{op.name} has {len(op.inputs)} inputs and {len(op.outputs)} outputs")
        missing = [
            n for n, spec in zip(op.inputs, message.inputs, strict=True) if spec is None and n not in op.optional
        ]
        if missing:
            raise ProtocolError(f"{op.name} lacks {', '.join(missing)}")
        if not op.has_attrs(message.attrs) or not all(type(v) in ATTR_TYPES for v in message.attrs.values()):
            names = ", ".join(f"[{name}]" if name in op.options else name for name in op.attrs)
            raise ProtocolError(f"{op.name} takes exactly the attributes {names or '(none)'}, all scalars")
        if message.device and message.op != FUNCTION and not op.runs_on_gpus:
            raise InvalidArgument(f"{op.name} runs on the CPU; its route names the device {message.device!r:.80}")
        inputs = tuple(None if spec is None else TensorSpec.from_wire(spec) for spec in message.inputs)
        outputs = tuple(TensorSpec.from_wire(spec) for spec in message.outputs)
        check_call(op.name, inputs, outputs, message.attrs)  # rules and kernels rely on it
        return cls(
            op.name,
            inputs,
            outputs,
            message.attrs,
            message.backend,
            message.policy,
            tuple(str(name) for name in message.next_ops[:MAX_NEXT_OPS]),
            message.device,
        )

    @cached_property
    def candidates(self) -> Mapping[str, int]:
        """The backends that the caller insists on, with the place of each one's environment among these. The first one
        has 0."""
        backends = pools.named(self.pinned)
        places = {name: at for at, name in enumerate(dict.fromkeys(map(pools.environment_of, backends)))}
        return {backend: places[pools.environment_of(backend)] for backend in backends}

    @cached_property
    def is_pooled(self) -> bool:
        """Whether several workers of one environment may serve it."""
        found = self.candidates
        return len(found) > len(set(found.values()))

    @cached_property
    def policy_key(self) -> bytes:
        """The overlay as bytes, equal for overlays that say the same."""
        return json.dumps(self.policy, sort_keys=True, default=str).encode()

    def prepare(self, kernel_id: str, *, is_graph_safe: bool) -> bytes:
        """The encoded Prepare message that tells a worker about this signature. `is_graph_safe`: of the kernel."""
        return encode(
            Prepare(
                op=self.op,
                kernel_id=kernel_id,
                inputs=[None if spec is None else spec.to_wire() for spec in self.inputs],
                outputs=[spec.to_wire() for spec in self.outputs],
                attrs=dict(self.attrs),
                device=self.device,
                is_graph_safe=is_graph_safe,
            )
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one candidate: accepted with a score, or rejected with every reason. A candidate that only has to
    be compiled has the score that it would have then.

    `terms` are the parts of the score by name; `transforms` what the client must do to its inputs first; `notes` what
    policy had to say.
    """

    kernel_id: str
    backend: str
    others: tuple[Rejection, ...]  # reasons besides the kernel's own constraints
    refused_in: SelectionContext | None = None  # the call that the kernel's constraints refuse
    kernel: KernelCapability | None = None
    terms: dict[str, float] = field(default_factory=dict)
    measured_us: float | None = None
    transforms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fused_ops: tuple[str, ...] = ()  # ops after this one that it does in the same pass
    is_on_trial: bool = False  # its breaker is half open: one call may try it
    is_last_resort: bool = False  # its breaker is open: for calls that nobody else can take
    may_run_here: bool = False  # policy wants it in the caller's own process
    uncompiled: Unit | None = None  # it would be accepted were it compiled for this
    is_lifted_only: bool = False  # its backend has no worker here: callers launch it, or nobody

    @property
    def is_accepted(self) -> bool:
        return self.refused_in is None and not self.others

    @property
    def is_in_doubt(self) -> bool:
        """Whether it has failed of late, so that its breaker is not closed."""
        return self.is_on_trial or self.is_last_resort

    @property
    def reasons(self) -> tuple[Rejection, ...]:
        """Every rejection, those by the kernel's own constraints first. Made anew each time: most are never read."""
        if self.refused_in is None or self.kernel is None:
            return self.others
        return (*match(self.refused_in, self.kernel), *self.others)

    @property
    def repair(self) -> str:
        """What makes the kernel eligible without a change of the call; empty where nothing of that kind does."""
        reasons = self.reasons
        return reasons[0].repair if reasons and all(reason.repair for reason in reasons) else ""

    @property
    def group(self) -> str:
        """What kernels need that are refused for the same cause, one which says nothing about this very call, so that
        people need not read it for each; empty for a kernel with reasons of its own."""
        if self.is_accepted:
            return ""
        by_code = {reason.code: reason for reason in self.others}
        if Reason.NOT_PINNED in by_code:
            return "need the call to be pinned to another backend"
        if Reason.VERSION_NOT_NAMED in by_code:
            return "are versions beside another backend, which serve calls that name them"
        if Reason.NOT_FOR_MACHINE in by_code and self.kernel is not None:
            needed = self.kernel.platform or "cpu"
            return f"need {DEVICE_NAMES[needed] if needed in SHARED_MEMORY else 'other hardware'}"
        if Reason.NOT_RUN in by_code:
            return "need a first run"
        if self.refused_in is not None and self.kernel is not None:
            platform = self.kernel.platform and holds_tensors_of(self.kernel.platform)
            if platform not in (None, self.refused_in.device.device_type):
                return f"need tensors on {DEVICE_NAMES[platform]}"
        return ""

    @property
    def score(self) -> float:
        return sum(self.terms.values())

    def to_wire(self) -> dict[str, Any]:
        return {
            "kernel_id": self.kernel_id,
            "backend": self.backend,
            "accepted": self.is_accepted,
            "reasons": [{"code": r.code.value, "detail": r.detail, "repair": r.repair} for r in self.reasons],
            "group": self.group,
            "score": round(self.score, 3) if self.is_accepted or self.uncompiled is not None else None,
            "terms": {name: round(value, 3) for name, value in self.terms.items()},
            "measured_us": self.measured_us,
            "transforms": list(self.transforms),
            "notes": list(self.notes),
            "fused_ops": list(self.fused_ops),
            "lifted_only": self.is_lifted_only,
        }


@dataclass
class Signature:
    """A call signature in use, shared by all clients' routes that have it."""

    key: bytes
    spec: CallSpec
    context: SelectionContext
    cell: TimingBucket  # timings of calls of this kind and size
    kernels: tuple[tuple[str, str], ...]  # (kernel id, backend) of every candidate, for what is kept per kernel
    ranked: tuple[Verdict, ...] = ()
    order: tuple[Verdict, ...] = ()  # the accepted part of `ranked`
    to_compile: tuple[Verdict, ...] = ()  # those of `ranked` that would serve it were they compiled, or probed
    seen: tuple[int, int] = (-1, -1)  # epochs of core and cell when `ranked` was computed
    neighbours: Neighbourhood | None = None  # calls that are ranked as this one is
    neighbours_seen: tuple[int, int] = (-1, -1)  # `seen` when they were looked for
    users: int = 0  # routes and open calls

    @property
    def place(self) -> tuple[bytes, tuple[str, ...]]:
        """What tells it from others: its key, and which versions stand in for their backends."""
        return self.key, self.spec.rolled


def unknown_backend(backend: object, known: Iterable[str], refused: str = "") -> str:
    """The text for a backend that does not exist. `refused`: why its descriptor cannot be used, if it has one."""
    if refused:
        return f"no backend is called {backend!r:.60}: its descriptor was refused: {refused}; mend it, then lz down"
    return unknown_name("backend", backend, sorted(known))


def no_backend(
    spec: CallSpec, ranked: tuple[Verdict, ...], known: Mapping[str, Capability], refused: Mapping[str, str]
) -> NoBackend | InvalidArgument:
    """The error for a call that nobody can take. Its first line says what would help, the next ones why each kernel
    refuses: first those that a repair makes eligible, last those that are refused for the same cause, as a count.
    `refused`: why descriptors of further backends cannot be used."""
    missing = next((backend for backend in spec.candidates if backend not in known), None)
    if missing is not None:
        text = unknown_backend(missing, known, refused.get(missing, ""))
        return InvalidArgument(text, unknown_backend=missing)
    if not ranked:
        return NoBackend(f"{spec.op}: no backend serves it; lz status shows those that there are")
    relevant = [v for v in ranked if not spec.pinned or v.backend in spec.candidates]
    groups = ["" if spec.pinned else verdict.group for verdict in relevant]
    alone = [verdict for verdict, group in zip(relevant, groups, strict=True) if not group]
    alone.sort(key=lambda verdict: (not verdict.repair, len(verdict.reasons)))
    lines = [f"  {verdict.kernel_id}: " + "; ".join(map(str, verdict.reasons)) for verdict in alone]
    lines += [f"  {text}" for text in shared_causes(filter(None, groups))]
    what, facts = f"{spec.op}: no kernel accepts this call", {}
    repairs = list(dict.fromkeys(v.repair for v in alone if v.repair))
    if repairs:
        facts["repair"] = repairs[0]
        what += f"; repair: {repairs[0]}"
    elif change := _smallest_change(alone):
        what += f"; for {change}"
    else:
        what += "; change what these name"
    return NoBackend("\n".join((what, *lines)), **facts)


def _smallest_change(refusing: Sequence[Verdict]) -> str:
    """How the caller makes the first of these kernels eligible for which there is a way; empty for none."""
    for verdict in refusing[:MAX_ADVISED]:
        if verdict.refused_in is not None and verdict.kernel is not None:
            fix = counterfactual(verdict.refused_in, verdict.kernel, verdict.reasons)
            if fix is not None:
                return f"{verdict.kernel_id}: {fix.change}"
    return ""
