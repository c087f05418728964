"""One call of an op: what was asked, its way to a kernel, and what the caller gets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import ACCEPTED, Array, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.connection.express import Lease
from layerzero.client.connection.link import Link, Pending
from layerzero.client.connection.overlay import Overlay
from layerzero.client.connection.report import ADAPTED, Attempt, Copy
from layerzero.client.planning.plans import Plan
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, from_wire
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.vocabulary.ops import ACTIVATIONS, OPS
from layerzero.ipc.vocabulary.shapes import overlaps
from layerzero.ipc.vocabulary.tensors import TensorSpec

MAX_TIMEOUT_S = 86_400
BACK = "it is written in place, and was copied to where a worker reaches it"


@dataclass(slots=True)
class Request:
    """One public call before it runs. `params` are its scalars: with the specs of `args` they settle the plan."""

    op: str
    args: tuple[Any, ...]  # the op's tensor arguments as given, None where left out
    params: dict[str, Any]
    planner: Callable[..., Plan]  # of the specs of `args` and `params`
    out: Any = None  # of an op with several results a tuple of them
    backend: str | None = None
    timeout_s: float | None = None
    output_bytes: tuple[int, ...] | None = None  # ops with sized outputs: how much to allocate for each
    finish: Callable[[list[memoryview], bytes], Any] | None = None  # what to make of those for the caller
    is_rigid: bool = False  # copies did not help before: the broker must not ask for any
    copies: list[Copy] | None = None  # what was copied before; what is copied later is added
    # Of a function: arena, offset and bytes of each input, in place of `args`. Nobody but its maker calls again.
    places: tuple[tuple[Any, int, int] | None, ...] | None = None
    lent: Sequence[Array] = ()  # of a function: what lies in `places` behind the first, which is its frame
    serves: Callable[[str], None] | None = None  # of a function: is told the backend, before `finish`
    on_gpu: Any = None  # of a function with arrays on a GPU: client/gpu/lent.py's GpuLoan, whose ranges are in `places`
    is_apart: bool = False  # on a GPU: nobody but its maker hears of its failure, and it goes by the broker

    def shape_specs(self, specs: tuple[TensorSpec | None, ...]) -> tuple[TensorSpec | None, ...]:
        """What settles the plan: for ops with sized outputs without the lengths, which travel with each call."""
        if self.output_bytes is None or self.places is not None:  # these have none
            return specs
        return tuple(None if s is None else TensorSpec.contiguous(s.dtype, (0, *s.shape[1:])) for s in specs)


class Runner(Protocol):
    """What runs one route's calls in this process (client/session/in_process.py)."""

    def run(
        self, inputs: Sequence[tuple[int, int] | None], outputs: Sequence[tuple[int, int]]
    ) -> tuple[int, bytes]: ...


@dataclass(frozen=True)
class Refusal:
    """Why calls do not run in this process. `is_final`: and never will."""

    why: str
    is_final: bool


@dataclass(slots=True, eq=False)
class Here:
    """A grant to run a route's calls in this process, while it lasts."""

    runner: Runner
    decision: messages.Decision
    until_s: float


@dataclass(slots=True)
class Sample:
    """A sampled call: its inputs as they were when it was sent, and later its output."""

    blocks: list[memoryview]
    refs: list[bytes]
    is_checked: bool  # and not for tuning, or for watchers, alone
    is_watched: bool = False
    output: bytes = b""
    kernel_id: str = ""
    reference: str = ""  # kernel id
    backend: str = ""  # of the reference
    decision: messages.Decision | None = None  # by which it was served


@dataclass(slots=True, weakref_slot=True, eq=False)
class Route:
    """A call signature that the broker knows under `number`; a neighbour of another route's calls only once it has been
    told of it."""

    number: int
    plan: Plan
    body: bytes = b""  # what the broker is told of it
    overlay: str = ""  # the caller's policy, as text
    decisions: dict[int, messages.Decision] = field(default_factory=dict)
    needs_digest: bool = False
    dense: frozenset[str] = frozenset()  # inputs that the chosen kernel takes only contiguous
    dense_until_s: float = 0.0  # then the broker is asked again: policy or timings may have changed
    here: Here | None = None  # what runs this route's calls in this process
    worker_until_s: float = 0.0  # not here: its probe has not ended, or it failed here
    stays_out: str = ""  # and what of that is to be said in a report
    lease: Lease | None = None  # calls may go straight to the worker
    slot: int = 0  # on a GPU: where the worker that serves it has left its sign
    is_armed: bool = False  # on a GPU: a call has been answered well, and later ones are not waited for
    asked: tuple[str | None, Overlay | None] = (None, None)  # the backend and the policy that the caller wants
    kind: Hashable = None  # what its neighbours have in common
    near: Route | None = None  # whose lease its calls have, as neighbours
    is_told: bool = False  # the broker knows it
    asks: tuple[Mapping[str, Any], tuple[TensorSpec | None, ...]] | None = None  # on a GPU: params, specs of the inputs
    not_lifted: str = ""  # on a GPU: why the broker does not let this process launch its kernel
    awaits: str = ""  # and what it waits for before it says so, or does
    beside: Mapping[str, Any] = field(default_factory=dict)  # of a function, whose route says nothing of its arrays


@dataclass(slots=True)
class Submitted:
    """A call on its way, with all that its answer needs."""

    link: Link
    route: Route
    request: Request
    pending: Pending
    arrays: tuple[Array | None, ...]
    blocks: list[memoryview]
    outputs: list[memoryview]
    results: tuple[TensorSpec, ...]
    outs: tuple[Array, ...]  # the caller's own, for each result, or none
    out_is_direct: bool
    copies: list[Copy]
    start_ns: int
    refs: bytes
    adapted: frozenset[str]
    asked_in: object  # overlay.process() before its policy was read
    written: Sequence[tuple[str, Array, memoryview, TensorSpec]] = ()  # copies of what the op writes in place
    sample: Sample | None = None
    prior: tuple[Attempt, ...] = ()  # attempts that failed in this process or on an express lane
    decision: messages.Decision | None = None  # of a call that ran in this process
    after_lane: int = 0  # the express lane that ended with this call on it, and which call of the lane it was
    after_call: int = 0
    near: int = 0  # the route whose lease it had there

    @property
    def writes_to_caller(self) -> bool:
        """Whether a worker writes straight into memory that is the caller's own."""
        in_place = OPS[self.request.op].in_place
        return self.out_is_direct or any(name not in {name for name, *_ in self.written} for name in in_place)

    def digest(self) -> bytes:
        """Of the inputs' contents: tells a poisonous call from a harmless one of the same signature. What the call
        writes in place is left out: it is another one at each call."""
        digest = hashlib.blake2b(digest_size=wire.DIGEST_BYTES)
        op, request = OPS[self.request.op], self.request
        if request.places is not None and request.places[0] is not None:
            arena, offset, nbytes = request.places[0]
            digest.update(arena.view[offset : offset + nbytes])
        named = zip(op.inputs, self.arrays, strict=True)
        inputs = [array for name, array in named if array is not None and name not in op.in_place]
        for array in (*request.lent, *inputs):  # what a function is given on a GPU is not looked at
            scratch = bytearray(array.nbytes)
            copy_into(array, memoryview(scratch))
            digest.update(scratch)
        return digest.digest()

    def result(self, body: bytes) -> Any:
        """What the caller gets; `body` is what the kernel returned."""
        if self.outs:
            if not self.out_is_direct:
                self._copy_to_caller()
            return self.outs[0].obj if len(self.outs) == 1 else tuple([out.obj for out in self.outs])
        if self.request.finish is not None:
            return self.request.finish(self.outputs, body)
        for name, array, memory, spec in self.written:
            assign(array, memory, spec)
            self.copies.append(Copy(name, array.nbytes, "client", BACK))
        if not self.results:
            return None
        like = next(a for a in self.arrays if a is not None)
        if len(self.results) == 1:
            return self._wrapped("out", self.outputs[0], self.results[0], like)
        named = zip(OPS[self.request.op].outputs, self.outputs, self.results, strict=True)
        return tuple([self._wrapped(name, memory, spec, like) for name, memory, spec in named])

    def _copy_to_caller(self) -> None:
        named = zip(OPS[self.request.op].outputs, self.outs, self.outputs, self.results, strict=True)
        for name, out, memory, spec in named:
            assign(out, memory, spec)
            reason = "out= does not lie in an arena, or shares memory with an input"
            self.copies.append(Copy(name, out.nbytes, "client", reason))

    def _wrapped(self, name: str, memory: memoryview, spec: TensorSpec, like: Array) -> Any:
        value, was_copied = wrap(memory, spec, like)
        if was_copied:
            library = type(like.obj).__module__.partition(".")[0]
            self.copies.append(Copy(name, spec.span_bytes, "client", f"{library} owns its arrays' memory"))
        return value


def assign(target: Array, memory: memoryview, result: TensorSpec) -> None:
    """Write a result that lies in `memory` into the caller's own array."""
    if not target.nbytes:
        return
    value, _ = wrap(memory, result, target)
    match target.kind:
        case "torch":
            target.owner.copy_(value)
        case "numpy":
            target.owner[...] = value
        case _:
            target.owner.cast("B")[:] = memoryview(value).tobytes()


def describe_all(request: Request) -> tuple[tuple[Array | None, ...], tuple[Array, ...]]:
    """The arrays of `args` and of `out`: none, or one for each result."""
    arrays = describe_args(request)
    op = OPS[request.op]
    for name in op.in_place:
        target = arrays[op.inputs.index(name)]
        if target is None:
            raise InvalidArgument(f"{request.op}: {name} is None; pass the array that it writes to")
        _check_writable(f"{request.op}: {name}", target)
    return arrays, describe_outs(request)


def describe_outs(request: Request) -> tuple[Array, ...]:
    """The arrays of `out`. Raises InvalidArgument for what cannot be written, or shares its memory."""
    if request.out is None:
        return ()
    names = OPS[request.op].outputs
    given = (request.out,)
    if len(names) > 1:
        if not isinstance(request.out, tuple) or len(request.out) != len(names):
            kind, wanted = type(request.out).__name__, ", ".join(names)
            raise InvalidArgument(f"{request.op}: out= is a {kind}; pass a tuple of {len(names)} arrays, ({wanted})")
        given = request.out
    try:
        outs = tuple([describe(out) for out in given])
    except InvalidArgument as exc:
        raise InvalidArgument(f"{request.op}: out=: {exc.message}") from None
    for number, out in enumerate(outs):
        _check_writable("out=", out)
        if not all(_are_apart(out, other) for other in outs[:number]):
            raise InvalidArgument(f"{request.op}: two arrays of out= share memory; pass one for each result")
    return outs


def _are_apart(one: Array, other: Array) -> bool:
    """Whether no element of one lies in the other: also of parts of one array that lie in turns, row by row, and of
    parts that follow each other in one dimension, like the heads of queries and of keys."""
    if not one.nbytes or not other.nbytes or not overlap(one, other):
        return True
    first, second = (array.spec for array in sorted((one, other), key=lambda array: array.address))
    step, rest = divmod(abs(one.address - other.address), first.itemsize)
    if (first.dtype, first.strides) != (second.dtype, second.strides) or rest:
        return False
    if first.shape == second.shape and not overlaps(TensorSpec(first.dtype, (2, *first.shape), (step, *first.strides))):
        return True
    unlike = [dim for dim in range(first.ndim) if first.shape[dim] != second.shape[dim]]
    if len(unlike) != 1 or not first.strides[unlike[0]]:
        return False
    (dim,) = unlike
    places, rest = divmod(step, first.strides[dim])
    if rest or places < first.shape[dim]:
        return False
    whole = (*first.shape[:dim], places + second.shape[dim], *first.shape[dim + 1 :])
    return not overlaps(TensorSpec(first.dtype, whole, first.strides))


def describe_args(request: Request, *, takes_specs: bool = False) -> tuple[Array | None, ...]:
    """What `args` are; None for those left out, and with `takes_specs` for TensorSpecs that stand for arrays. Raises
    InvalidArgument with the name of the one at fault."""
    args = request.args
    try:
        if takes_specs:
            return tuple([_described(request, n, takes_specs) for n in range(len(args))])
        return tuple([_absent(request, n) if arg is None else describe(arg) for n, arg in enumerate(args)])
    except InvalidArgument as exc:
        raise _with_name(request, exc, takes_specs) from None


def _described(request: Request, index: int, takes_specs: bool) -> Array | None:
    arg = request.args[index]
    if takes_specs and isinstance(arg, TensorSpec):
        return None
    return _absent(request, index) if arg is None else describe(arg)


def _absent(request: Request, index: int) -> Array | None:
    op = OPS[request.op]
    if op.inputs[index] not in op.optional:
        raise InvalidArgument(f"None is no array; allowed: {ACCEPTED}")
    return None


def _with_name(request: Request, error: InvalidArgument, takes_specs: bool) -> InvalidArgument:
    """The error of the first argument that cannot be described, with the op and the argument as the caller knows it."""
    op = OPS[request.op]
    for index, name in enumerate(op.inputs):
        try:
            _described(request, index, takes_specs)
        except InvalidArgument as exc:
            return InvalidArgument(f"{op.name}: {parameter(op.name, name)}: {exc.message}")
    return error  # it was at fault a moment ago


def parameter(op: str, name: str) -> str:
    """What an op's input is called in Python, where it is another name: torch's."""
    return "input" if name == "ids" or (name == "x" and op in _OF_INPUT) else name


_OF_INPUT = frozenset(
    {"add", "mul", "clamp", "where", "cast", "conv", "conv_transpose"}
    | {"max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "interpolate"}
    | {
        "addmm",
        "gated_mlp",
        "grouped_linear",
        "moe_mlp",
        "linear",
        "softmax",
        "log_softmax",
        "gelu",
        "silu",
        *ACTIVATIONS,
    }
    | {"layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward"}
    | {"cross_entropy"}
    | {"add_rms_norm", "group_norm", "instance_norm", "batch_norm"}
)


def _check_writable(what: str, array: Array) -> None:
    kind = type(array.obj).__name__
    is_torch_view = array.kind == "torch" and array.owner is not array.obj and array.obj.is_neg()
    if is_torch_view or not (hasattr(array.obj, "__setitem__") or array.kind in ("buffer", "own")):
        raise InvalidArgument(f"{what} is a {kind} that cannot be written to; pass an array of its own")
    if not array.writable:
        raise InvalidArgument(f"{what} is read-only ({array.spec}); pass a writable array")
    if array.kind == "dlpack":
        raise InvalidArgument(f"{what} is a {kind}, whose memory its library owns; pass an array that can be written")
    if array.kind == "buffer" and not array.owner.c_contiguous:
        raise InvalidArgument(f"{what} is a strided buffer; pass a contiguous one")
    if array.requires_grad:
        raise InvalidArgument(f"{what} requires gradients; pass a tensor without, or use torch.no_grad()")


def refuse_sharing(op: str, arrays: Sequence[Array | None]) -> None:
    """Raises InvalidArgument where a tensor that the op writes in place is in another one's memory: the call may be run
    again on what a dead worker has left. Of two that are written only their strides can tell, which interleave in
    caches of keys and values; the same one twice is refused."""
    given = {name: array for name, array in zip(OPS[op].inputs, arrays, strict=True) if array is not None}
    for name in OPS[op].in_place:
        target = given[name]
        for other, array in given.items():
            is_written = other in OPS[op].in_place
            is_same = array.address == target.address if is_written else overlap(array, target)
            if other != name and is_same and array.nbytes and target.nbytes:
                raise InvalidArgument(f"{op}: {other} shares memory with {name}, which is written; pass a copy")


def seconds(request: Request, default_s: float) -> float:
    """How long a call may take."""
    return default_s if request.timeout_s is None else microseconds(request.timeout_s) / 1e6


def microseconds(timeout_s: float) -> int:
    """A caller's time limit as it travels. Raises InvalidArgument."""
    if isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and 0 < timeout_s <= MAX_TIMEOUT_S:
        return max(int(timeout_s * 1e6), 1)
    raise InvalidArgument(f"timeout_s is {timeout_s!r}; allowed: seconds, more than 0 and at most {MAX_TIMEOUT_S:,}")


def refuse_gradients(op: str, arrays: Sequence[Array | None]) -> None:
    """Raises InvalidArgument for an input that would need a backward pass."""
    for name, array in zip(OPS[op].inputs, arrays, strict=True):
        if array is not None and array.requires_grad and sys.modules["torch"].is_grad_enabled():
            raise InvalidArgument(
                f"{op}: {name} requires gradients, and kernels here are forward only; call under torch.no_grad(), "
                f"pass {name}.detach(), or import layerzero.torch and call torch.ops.layerzero.{op}"
            )


def why_copied(array: Array, is_adapted: bool) -> str:
    """For the report."""
    if is_adapted:
        return ADAPTED
    if array.needs_copy:
        return "its strides cannot be described to a worker"
    return "it does not lie in an arena; lz.share() or lz.empty() avoid this"


def overlap(one: Array, other: Array) -> bool:
    """Whether two arrays may share memory."""
    return one.address < other.address + other.spec.span_bytes and other.address < one.address + one.spec.span_bytes


def error_of(body: bytes) -> tuple[LayerZeroError, messages.Outcome]:
    """What a FAILED message says."""
    outcome = messages.decode(body, messages.Outcome)
    return from_wire(outcome.error), outcome
