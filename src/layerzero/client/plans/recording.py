"""A function's run, written down: its steps in order, the arrays between them, and whose memory those are.

Arrays are told apart by memory: a storage is what one step, one argument or one constant brought along, and every view
of it is a value on the same storage. Whether a step writes to its arguments is seen by their bytes, before and after.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.connection.call import Request
from layerzero.client.connection.record import kernel_of
from layerzero.client.facade import running
from layerzero.client.plans.graph_library import LIBRARIES
from layerzero.client.plans.traced import Traced, array_of, map_leaves
from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.ops import OPS

INPUT, CONSTANT, STEP = "input", "constant", "step"
MAX_STEPS = 4096
MAX_CONSTANT_BYTES = 1 << 20  # of a constant that a function makes anew at each run, and which is compared


@dataclass(frozen=True, slots=True)
class Use:
    """In the arguments and results of steps: the array of this value."""

    value: int


@dataclass(eq=False)
class Storage:
    """Memory that came as a whole. `made_by`: the step, the argument's place, or the constant's. `nbytes` is 0 for what
    has no memory that can be described. `writers`: steps that write to it after it was made."""

    number: int
    origin: str
    made_by: int
    address: int
    nbytes: int
    writers: list[int] = field(default_factory=list)
    is_whole: bool = True  # False: views reach beyond what is known of it


@dataclass(eq=False)
class Value:
    """An array of the run. `array` is what describe() made of it, None for what workers cannot be given."""

    number: int
    obj: Any
    array: Array | None
    storage: Storage
    offset: int  # of its first byte in the storage


@dataclass(eq=False)
class Step:
    """A call of an lz op (`request`) or of another function. `args` and `kwargs` have Use in place of arrays; `made`
    are the values of its result, which `result` is made of. `fresh`: storages that it made."""

    number: int
    name: str
    where: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    function: Callable[..., Any] | None = None
    request: Request | None = None
    result: Any = None
    made: tuple[int, ...] = ()
    fresh: tuple[Storage, ...] = ()
    writes: tuple[Storage, ...] = ()
    kernel: str = ""  # that served it when it was recorded
    kernel_us: float = 0.0


@dataclass(eq=False)
class Recording:
    """`inputs` are the values of the arguments' arrays in order, `output` the function's result with Use in place of
    arrays. `problem`: why no plan can be made of it, "" when one can."""

    steps: list[Step] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    output: Any = None
    problem: str = ""
    device: int | None = None  # where its arrays are: the ordinal of a GPU, or CPU; None before the first
    kind: str = ""  # of the arrays, on a GPU

    @property
    def writes_outside(self) -> bool:
        """Whether it writes to arrays that are not its own results."""
        return any(storage.origin != STEP for step in self.steps for storage in step.writes)

    def copy(self) -> Recording:
        """One of its own, with the same arrays: passes change storages, values and steps."""
        storages = [replace(storage, writers=list(storage.writers)) for storage in self.storages]

        def its(known: tuple[Storage, ...]) -> tuple[Storage, ...]:
            return tuple(storages[storage.number] for storage in known)

        values = [replace(value, storage=storages[value.storage.number]) for value in self.values]
        steps = [replace(step, fresh=its(step.fresh), writes=its(step.writes)) for step in self.steps]
        return replace(
            self, steps=steps, values=values, storages=storages, inputs=[*self.inputs], constants=[*self.constants]
        )

    def let_go(self, kept: Collection[int]) -> None:
        """Keep the arrays of these storages alone; of the others what is known of them."""
        for value in self.values:
            if value.storage.number not in kept:
                value.obj = _empty_like(value.obj)
                if value.array is not None:
                    known = value.array
                    value.array = Array(known.kind, known.spec, 0, value.obj, None, needs_copy=known.needs_copy)


class FunctionRecorder:
    """Records one run. For one thread; calls that the function makes in other threads are not seen."""

    def __init__(self, session: Session) -> None:
        self.made = Recording()
        self._session = session
        self._known: dict[int, Value] = {}  # by id of the array object
        self._taken: dict[int, Any] = {}  # arrays that the function has got itself, by the id of the view that it has
        self._lent: list[Any] = []  # keeps those ids
        self._given: set[int] = set()  # those of them that it returned

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function's result. Raises what it raises."""
        given = map_leaves((tuple(args), dict(kwargs)), self._take_input)
        tokens = running.handler.set(self._call), running.tracer.set(self._call)
        try:
            value = function(*given[0], **given[1])
        finally:
            running.handler.reset(tokens[0])
            running.tracer.reset(tokens[1])
        self.made.output = map_leaves(value, self._note_output)
        if not self.made.problem and self._taken.keys() - self._given:
            self._fail("has a result's array itself (numpy.asarray or the like), and does not return it")
        if not self.made.problem and not any(step.request is not None for step in self.made.steps):
            self.made.problem = "the function makes no lz call"
        return map_leaves(value, lambda leaf: self._taken.get(id(leaf), array_of(leaf)))

    # --- what Traced arrays tell

    def record(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        step = self._step(_name_of(function), args, kwargs)
        step.function = function
        before = {n: _mark(self.made.values[n]) for n in step.reads} if not self.made.problem else {}
        got = function(*map_leaves(tuple(args), array_of), **map_leaves(dict(kwargs), array_of))
        if self.made.problem:
            return map_leaves(got, self._wrapped)
        written = [self.made.values[n].storage for n in before if _mark(self.made.values[n]) != before[n]]
        written += [self.made.values[n].storage for n in _targets(function, step)]
        step.writes = tuple({storage.number: storage for storage in written}.values())
        return self._note_result(step, got)

    def escape(self, what: str) -> None:
        self._fail(f"{what}, which only its own run can know")

    def take_out(self, lent: Any, array: Any) -> None:
        self._taken[id(lent)] = array
        self._lent.append(lent)

    # --- calls of lz ops

    def _call(self, request: Request) -> Any:
        args, out = map_leaves((request.args, request.out), array_of)
        plain = replace(request, args=args, out=out)
        value = self._session.run(plain)
        record = self._session.last_record
        if self.made.problem:
            return map_leaves(value, self._wrapped)
        if request.finish is not None:
            self._fail(f"lz.{request.op} gives no arrays")
            return value
        for arg in (*request.args, *_flat(request.out)):
            if arg is not None and not is_array(array_of(arg)):
                self._fail(f"calls lz.{request.op} on a {type(arg).__name__}; allowed: NumPy arrays and torch tensors")
                return value
        outs = {} if request.out is None else {"out": request.out}
        step = self._step(request.op, request.args, outs)
        if self.made.problem:
            return map_leaves(value, self._wrapped)
        step.request = replace(request, args=(), out=None)
        written = [
            n for name, n in zip(OPS[request.op].inputs, step.args, strict=True) if name in OPS[request.op].in_place
        ]
        written += _flat(step.kwargs.get("out"))
        step.writes = tuple(self.made.values[use.value].storage for use in written if isinstance(use, Use))
        step.kernel = kernel_of(record)[0]
        step.kernel_us = record[4] / 1e3 if isinstance(record, tuple) else 0.0
        return self._note_result(step, value)

    # --- notes

    def _step(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        reads: list[int] = []

        def note(leaf: Any) -> Any:
            value = self._value_of(leaf)
            if value is None:
                return leaf
            reads.append(value.number)
            return Use(value.number)

        where = _caller()
        if self._taken and not self.made.problem:
            map_leaves((tuple(args), dict(kwargs)), self._refuse_late)
        used = map_leaves((tuple(args), dict(kwargs)), note) if not self.made.problem else ((), {})
        return Step(len(self.made.steps), name, where, used[0], used[1], tuple(reads))

    def _refuse_late(self, leaf: Any) -> Any:
        """An array that is not one of ours may have been made of one that the function has itself."""
        if is_array(leaf) and id(leaf) not in self._taken:
            self._fail("has a result's array itself (numpy.asarray or the like), and uses another array after that")
        return leaf

    def _note_result(self, step: Step, got: Any) -> Any:
        made: list[int] = []
        fresh: list[Storage] = []

        def note(leaf: Any) -> Any:
            if not is_array(leaf):
                if leaf is not None and not self.made.problem:
                    self._fail(f"takes numbers out of an array by {step.name}")
                return leaf
            known = len(self.made.storages)
            value = self._known.get(id(leaf)) or self._add_value(leaf, STEP, step.number)
            fresh.extend(self.made.storages[known:])
            made.append(value.number)
            if self.made.device != CPU and getattr(leaf, "requires_grad", False):
                self._fail(f"makes an array that takes part in gradients by {step.name}; run it under torch.no_grad()")
            return Traced(value.obj, self)

        result = map_leaves(got, note)
        if len(self.made.steps) >= MAX_STEPS and not self.made.problem:
            self._fail(f"has more than {MAX_STEPS} steps; plan its parts one by one")
        if self.made.problem:
            return result
        step.result = map_leaves(result, self._use_of)
        step.made, step.fresh = tuple(made), tuple(fresh)
        for storage in step.writes:
            storage.writers.append(step.number)
        self.made.steps.append(step)
        return result

    def _use_of(self, leaf: Any) -> Use | None:
        return None if leaf is None else Use(self._known[id(array_of(leaf))].number)

    def _take_input(self, leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        is_known, storages = id(leaf) in self._known, len(self.made.storages)
        value = self._known.get(id(leaf)) or self._add_value(leaf, INPUT, len(self.made.inputs))
        if is_known or len(self.made.storages) == storages:
            self._fail("is given arguments that share memory")
        self.made.inputs.append(value.number)
        return Traced(leaf, self)

    def _note_output(self, leaf: Any) -> Any:
        if self.made.problem:
            return leaf
        if id(leaf) in self._taken:
            self._given.add(id(leaf))
            return Use(self._known[id(self._taken[id(leaf)])].number)
        if isinstance(leaf, Traced):
            return Use(self._known[id(array_of(leaf))].number)
        if is_array(leaf):
            if self._taken:
                self._refuse_late(leaf)
            value = self._value_of(leaf)
            return leaf if value is None else Use(value.number)
        return leaf

    def _value_of(self, leaf: Any) -> Value | None:
        """The value of an array, a constant where it was not seen before; None for what is none."""
        array = self._taken.get(id(leaf), array_of(leaf))
        if not is_array(array):
            return None
        value = self._known.get(id(array))
        if value is None:
            value = self._add_value(array, CONSTANT, len(self.made.constants))
            if value.storage.origin != CONSTANT:
                self._fail("has the memory of an argument or result by another way than the array it was given")
            self.made.constants.append(value.number)
        return value

    def _add_value(self, obj: Any, origin: str, made_by: int) -> Value:
        """A value for an array that is new; on the storage that it is a view of, or on one of its own."""
        try:
            array: Array | None = describe(obj)
        except InvalidArgument:
            array = None
        self._note_device(obj, array)
        start, nbytes = _extent(obj, array)
        end = start + nbytes
        homes = (s for s in self.made.storages if s.nbytes and start < s.address + s.nbytes and s.address < end)
        home = next(homes, None) if nbytes else None
        if home is None:
            home = Storage(len(self.made.storages), origin, made_by, start, nbytes)
            self.made.storages.append(home)
        elif start < home.address or end > home.address + home.nbytes:
            home.is_whole = False
        first = start if array is None else array.address
        value = Value(len(self.made.values), obj, array, home, first - home.address)
        self.made.values.append(value)
        self._known[id(obj)] = value
        return value

    def _note_device(self, obj: Any, array: Array | None) -> None:
        """A plan is on one device, and its arrays are of kinds that it knows."""
        if array is None:
            device, kind = (obj.device.index if getattr(obj, "is_cuda", False) else CPU), ""
        else:
            device, kind = array.device, array.kind
        if self.made.device is None:
            self.made.device, self.made.kind = device, kind
        elif self.made.device != device:
            self._fail("works on two devices, such as the CPU and a GPU")
        elif device != CPU and kind and kind != self.made.kind:
            self._fail("works on arrays of two libraries on a GPU")
        if kind and kind not in (("numpy", "torch") if device == CPU else LIBRARIES):
            self._fail(f"works on a {type(obj).__name__}{'' if device == CPU else ' on a GPU; allowed: torch tensors'}")

    def _wrapped(self, leaf: Any) -> Any:
        """After a problem: the run goes on, and nothing is noted."""
        return Traced(leaf, self) if is_array(leaf) else leaf

    def _fail(self, problem: str) -> None:
        if not self.made.problem:
            self.made.problem = f"{_caller()} {problem}"


def record(
    session: Session, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Recording]:
    """Run a function once: its result, and what it did. Raises what it raises. Where that may come of the recording
    itself (TypeError, AttributeError and the like of a library that does not take a Traced), it is run as it is, unless
    it has written to arrays of its caller's by then, which a second run would do again."""
    recorder = FunctionRecorder(session)
    try:
        return recorder.run(function, args, kwargs), recorder.made
    except LayerZeroError:
        raise
    except (TypeError, AttributeError, ValueError, NotImplementedError, RuntimeError) as exc:
        if recorder.made.writes_outside:
            exc.add_note("lz.plan was recording the function, and arrays are written already: call it without lz.plan")
            raise
        recorder.made.problem = f"cannot be recorded: {type(exc).__name__}: {exc}"[:300]
    return function(*args, **kwargs), recorder.made


def is_array(value: Any) -> bool:
    numpy, torch, cupy = sys.modules.get("numpy"), sys.modules.get("torch"), sys.modules.get("cupy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return True
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return True
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def _empty_like(obj: Any) -> Any:
    """An array of the same library and dtype, with no numbers."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        if obj.is_cuda or obj.is_meta:
            return torch.empty_strided(obj.shape, obj.stride(), dtype=obj.dtype, device="meta")
        return torch.empty(0, dtype=obj.dtype)
    if not isinstance(obj, (sys.modules["numpy"].ndarray, sys.modules["numpy"].generic)):
        return obj
    return sys.modules["numpy"].empty(0, obj.dtype)


def _extent(obj: Any, array: Array | None) -> tuple[int, int]:
    """First byte and bytes of an array's memory, all that lies between its elements included; of a scalar none."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.generic):
        return 0, 0
    if array is not None and not array.needs_copy:
        return array.address, array.spec.span_bytes if array.nbytes else 0
    if numpy is not None and isinstance(obj, numpy.ndarray):
        bounds = getattr(numpy.lib, "array_utils", numpy).byte_bounds
        low, high = bounds(obj)
        return low, high - low if obj.size else 0
    return obj.data_ptr(), obj.untyped_storage().nbytes()


def digest(value: Value) -> bytes:
    """Of an array's numbers, in row-major order."""
    obj, torch, data = value.obj, sys.modules.get("torch"), b""
    if torch is not None and isinstance(obj, torch.Tensor):
        if obj.numel():
            data = obj.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    elif not isinstance(obj, (sys.modules["numpy"].ndarray, sys.modules["numpy"].generic)):
        data = obj.get().tobytes()
    elif obj.size and obj.dtype != object:
        data = sys.modules["numpy"].ascontiguousarray(obj).view("u1")
    return hashlib.blake2b(data, digest_size=16).digest()


def _mark(value: Value) -> bytes | int:
    """Changes when the array is written to. On a GPU that is the tensor's version: looking at its bytes would wait."""
    obj = value.obj
    if getattr(obj, "is_cuda", False) and not obj.is_inference():
        return int(obj._version)
    return digest(value)


def _targets(function: Callable[..., Any], step: Step) -> list[int]:
    """Values that a function is known to write to, also where that changes nothing."""
    found = [use for use in _flat(step.kwargs.get("out")) if isinstance(use, Use)]
    name = step.name
    if step.args and (name in _WRITING or (name.endswith("_") and not name.endswith("__"))):
        found += [use for use in step.args[:1] if isinstance(use, Use)]
    return [use.value for use in found]


_WRITING = frozenset(
    (
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"),
        *("ilshift", "irshift", "setitem", "copyto", "put", "place", "putmask", "fill_diagonal", "fill", "sort"),
        *("partition", "at"),
    )
)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


_PACKAGE = str(Path(__file__).parents[2])


def _caller() -> str:
    """File and line of the function that is recorded."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and "site-packages" not in name and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the function"
