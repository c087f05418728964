"""One call of a function: arguments into a frame in shared memory, the answer out of one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.connection import arena as arenas
from layerzero.client.connection.call import Request, why_copied
from layerzero.client.connection.report import Copy
from layerzero.client.gpu.arrays import device_name, is_on_gpu
from layerzero.client.gpu.lent import GpuArguments, GpuLoan, Lent
from layerzero.client.gpu.lent_calls import lend
from layerzero.client.planning.plans import Plan
from layerzero.client.session.preparation import BYTES
from layerzero.client.session.session import Session
from layerzero.functions.devices import on_that
from layerzero.functions.ranges import MAX_LENT, Place, Ranges
from layerzero.functions.results import array_on, of_those, resolve, whole
from layerzero.functions.warned import Warned
from layerzero.ipc.errors import BackendError, InvalidArgument, LayerZeroError, ProtocolError, RemoteError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Frame, Payload, Reference
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.ops import FUNCTION
from layerzero.ipc.vocabulary.tensors import TensorSpec

MIN_ROOM = 4096  # bytes for an answer
LIBRARIES = ("numpy", "torch")
_TAIL = (None,) * MAX_LENT
_log, _root_logger = logging.getLogger("layerzero.functions"), logging.getLogger()


def plan(*inputs: TensorSpec | None, of: str = "") -> Plan:
    """What the broker is told of calls: the same of all that lend memory of as many arenas. `of`: of a function that
    several environments have, what times are kept by."""
    return Plan(FUNCTION, inputs, {"of": of}, (BYTES,), ())


class Loan(Protocol):
    """An object of a worker, lent to a call: it is not released before this is let go of."""

    @property
    def reference(self) -> Reference: ...

    @property
    def backend(self) -> str:
        """The worker that it is in."""

    def rebuild(self) -> bool:
        """Have the object again, which is lost. False where nobody can, or wants to. Raises as a call does."""


class Inside:
    """What stands for an object inside of a worker."""

    __slots__ = ()

    def _lz_lend(self, backends: Sequence[str]) -> Loan:
        """To a call that one of these may serve. Raises InvalidArgument."""
        raise NotImplementedError


class Arguments:
    """The arguments of a call, encoded once; `keep` holds them while they are lent. `loans`: of objects among them.
    `backends`: those that may serve it, which an object among them leaves one of. `library`: of arrays there.
    `device`: the GPU that results are on, where that was said."""

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        backends: Sequence[str],
        library: str = "",
        device: str | None = None,
    ) -> None:
        """`library`: what the worker has arrays of, whose they may be here; each its own when left out. `device`: as of
        lz.isolated. Raises InvalidArgument with the place of what cannot go to another environment."""
        self.copies: list[Copy] = []
        self.uncopied_bytes = 0
        self.loans: list[Loan] = []
        self.keep = (args, kwargs, self.loans)
        self.backends, self.library = backends, library
        self._payload, self._lent = Payload(), Ranges()
        self.on_gpu: GpuArguments | None = None
        self.loan: Lent | None = None  # of the present attempt, what it lends on a GPU
        named = self._tree(dict(kwargs), "kwargs") if kwargs else [values.DICT]
        given = self._tree(list(args), "args") if args else [values.LIST]
        self.trees = [given, named, _root_logger.level]
        self.ranges = self._lent.close()
        self.device = ""
        if device is not None:
            self.on_gpu = on_that(device, self.on_gpu)
            self.device = device_name(self.on_gpu.like.device)
        self.nbytes = self._payload.nbytes + self.uncopied_bytes
        self.nbytes += 0 if self.on_gpu is None else self.on_gpu.nbytes

    @property
    def lent(self) -> tuple[Place | None, ...]:
        """Of each range of memory that a call can lend, what it does."""
        return all_lent(self.ranges, self.loan)

    @property
    def lent_arrays(self) -> Sequence[Array]:
        """Those that are lent as they lie."""
        return self._lent.arrays

    def frame(self, *head: Any, stays: int = frames.NOTHING, has_out: bool = False) -> Frame:
        """The frame that begins with these items and ends with the arguments. `stays`: what of the result does.
        `has_out`: memory on a GPU is an argument."""
        call = [*head, *self.trees]
        call = call if stays == frames.NOTHING else [frames.HOLD, call, stays]
        return Frame(call if self.loan is None else [frames.GPU, call, self.loan.outs, has_out], self._payload)

    def placed(self, call: list[Any], outs: list[Any]) -> Frame:
        """The frame of a call that is given memory of its answer for these results."""
        return Frame([frames.PLACE, [*call, *self.trees], outs], self._payload)

    @property
    def memory(self) -> tuple[int, list[tuple[int, int]]]:
        """Bytes beside the trees, and where what is lent lies: address and bytes."""
        return self._payload.nbytes, [(arena.address + offset, nbytes) for arena, offset, nbytes in self.ranges]

    def payload(self) -> bytearray:
        """The bytes beside the trees, of arrays as they are now."""
        found = bytearray(self._payload.nbytes)
        for offset, nbytes, write in self._payload.parts:
            write(memoryview(found)[offset : offset + nbytes])
        return found

    def note_kept(self, reason: str) -> None:
        """The worker copies all arrays."""
        if self.loan is not None:
            self.loan.note_kept(reason)
        nbytes = self.uncopied_bytes + sum(copy.nbytes for copy in self.copies if copy.where == "client")
        if nbytes and not any(copy.where == "worker" for copy in self.copies):
            self.copies.append(Copy("an argument", nbytes, "worker", reason))
        self.uncopied_bytes = 0

    def _tree(self, value: Any, root: str) -> Any:
        return values.encode(value, self._put, root, self._refer)

    def _refer(self, value: Any) -> list[int] | None:
        if not isinstance(value, Inside):
            return None
        loan = value._lz_lend(self.backends)
        self.loans.append(loan)
        self.backends = (loan.backend,)
        return loan.reference.place

    def _put_on_gpu(self, array: Array) -> list[Any]:
        if self.on_gpu is None:
            self.on_gpu = GpuArguments(array)
        node = frames.array_node(f"{frames.OF_GPU}{array.kind}", array.spec, frames.IN_FRAME, 0)
        self.on_gpu.add(array, node)
        return node

    def _put(self, value: Any) -> list[Any] | None:
        array = _array(value)
        if array is None:
            return None
        if array.device != CPU:
            return self._put_on_gpu(array)
        library, place = self.library or array.kind, None
        if not array.needs_copy:
            place = arenas.pool.find(array.address, array.spec.span_bytes)
            node = None if place is None else self._lent.add(library, array, *place)
            if node is not None:
                self.uncopied_bytes += array.nbytes
                return node
        spec = TensorSpec.contiguous(array.spec.dtype, array.spec.shape)
        offset = self._payload.add(array.nbytes, lambda target: copy_into(array, target))
        if array.nbytes:
            why = why_copied(array, False) if place is None else f"a call lends memory of at most {MAX_LENT} arenas"
            self.copies.append(Copy("an argument", array.nbytes, "client", why))
        return frames.array_node(library, spec, frames.IN_FRAME, offset)


def all_lent(ranges: Sequence[Place], loan: Lent | None) -> tuple[Place | None, ...]:
    """Of each range of memory that a call can lend, what it does: shared memory, then a GPU's."""
    found = ranges if loan is None else [*ranges, *loan.ranges]
    return (*found, *_TAIL[len(found) :])


def _array(value: Any) -> Array | None:
    """A NumPy array, a torch tensor, or another library's array on a GPU; None for what is neither. Raises
    InvalidArgument for others of theirs."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    is_known = numpy is not None and isinstance(value, numpy.ndarray)
    is_known = is_known or (torch is not None and isinstance(value, torch.Tensor))
    if not is_known and not is_on_gpu((value,)):
        return None
    array = describe(value)
    if array.requires_grad and torch is not None and torch.is_grad_enabled():
        raise InvalidArgument("a tensor that requires gradients, which end here; pass value.detach()")
    return array


class ObjectLost(BackendError):
    """The worker has no such object: nothing has begun."""

    reference: Reference


class Answer:
    """What came back: `value`, or an error to raise. `served_by`: the worker that it is of."""

    def __init__(self, value: Any = None, error: LayerZeroError | None = None) -> None:
        self.value, self.error = value, error
        self.served_by = ""


class Exchange:
    """One frame to an environment, and its answer. `room` for it is a guess; a larger one is fetched. `stays`: what of
    the result does, whose answer is a Reference."""

    def __init__(
        self,
        session: Session,
        backends: Sequence[str],
        label: str,
        env: str,
        stays: int = frames.NOTHING,
        of: str = "",
    ) -> None:
        """`backends`: those that may serve it, of environments of which `env` is the first. `of`: as of `plan`."""
        self._session, self._label, self._env = session, label, env
        self._backends, self._backend = backends, backends[0]
        self._stays, self._params = stays, {"of": of}
        self.answer_bytes = self.placed_bytes = 0  # placed: of arrays that were made where they lie
        self.library = ""  # of arrays here; each its own when empty
        self.arrays: Sequence[Array] = ()  # that are lent
        self.loan: Lent | None = None  # of a call on a GPU
        self.there: tuple[TensorSpec, ...] | None = None  # its results there, which the next call may have room for
        self.warned: list[tuple[Warned, str]] = []  # with the function and the environment

    def request(
        self,
        frame: Frame,
        lent: tuple[Place | None, ...] = _TAIL,
        *,
        room: int = MIN_ROOM,
        timeout_s: float | None = None,
        copies: list[Copy] | None = None,
        keep: Any = None,
        loan: GpuLoan | None = None,
    ) -> Request:
        """What a session sends. Its result is an Answer. `loan`: of a call on a GPU; `lent` has its ranges."""
        try:
            block, arena, offset = arenas.pool.allocate(frame.nbytes)
            frame.write(block)
        except BaseException:
            if loan is not None:
                loan.close()
            raise
        made = self.request_at((arena, offset, frame.nbytes), [block, keep], lent, room, timeout_s, copies)
        made.on_gpu, self.loan = loan, loan or self.loan  # an answer that is fetched is of the same call
        return made

    def request_at(
        self,
        place: Place,
        held: list[Any],
        lent: tuple[Place | None, ...] = _TAIL,
        room: int = MIN_ROOM,
        timeout_s: float | None = None,
        copies: list[Copy] | None = None,
    ) -> Request:
        """As `request`, of a frame that lies there already. `held`: keeps it, and all that it lends."""
        noted = [] if copies is None else copies

        def finish(outputs: list[memoryview], _: bytes) -> Answer:
            """Knows nothing of the request: one that nobody takes lets go of its memory by itself."""
            held.clear()  # nobody reads it any more
            answer = self._read(outputs[0], noted, timeout_s)
            answer.served_by = self._backend
            return answer

        pinned = pools.joined(self._backends)
        made = Request(FUNCTION, (), self._params, plan, None, pinned, timeout_s, (room,), finish)
        made.copies, made.places, made.lent, made.serves = noted, (place, *lent), self.arrays, self._serves
        return made

    def _serves(self, backend: str) -> None:
        if backend != self._backend:
            self._backend, self._backends = backend, (backend,)
            self._env = pools.environment_of(backend).partition(".")[0]

    def _read(self, memory: memoryview, copies: list[Copy], timeout_s: float | None) -> Answer:
        try:
            head, payload = frames.read(memory)
            match head:
                case [frames.RETURNED, tree, list(output)] | [frames.PLACED, tree, list(output), list()]:
                    self._show(output)
                    find = None if self._stays == frames.NOTHING else _reference
                    places, payload = (head[3], memory) if head[0] == frames.PLACED else ([], payload)
                    opener = self._opener(memory, payload, copies, places)
                    value = values.decode(tree, opener, resolve, "result", find)
                    if self._stays == frames.ALL and not isinstance(value, Reference):
                        raise ProtocolError("no reference to what it holds")
                    self.answer_bytes = len(memory) if len(payload) or len(memory) > MIN_ROOM else MIN_ROOM
                    return Answer(value)
                case [frames.SEVERAL, tree, failure, list(output)]:
                    self._show(output)
                    results = values.decode(tree, self._opener(memory, payload, copies, []), resolve, "result")
                    self.answer_bytes = len(memory) if len(payload) or len(memory) > MIN_ROOM else MIN_ROOM
                    return Answer((results, self._failure(failure)))
                case [frames.RAISED, str(kind), str(message), str(trace), list(output)]:
                    self._show(output)
                    return Answer(error=self._remote(kind, message, trace))
                case [frames.REFUSED, bool(is_argument), str(message), list(output)]:
                    self._show(output)
                    text = f"{self._label} in {self._env}: {message}"
                    return Answer(
                        error=InvalidArgument(text) if is_argument else BackendError(text, backend=self._backend)
                    )
                case [frames.RETURNED_THERE, tree, list(output), list(made)]:
                    self._show(output)
                    there = self._there(made, copies)
                    opener = self._opener(memory, payload, copies, [], there)
                    value = values.decode(tree, opener, resolve, "result")
                    self.answer_bytes = len(memory) if len(payload) or len(memory) > MIN_ROOM else MIN_ROOM
                    return Answer(value)
                case [frames.AWAITS, int(token), list(specs), list(output)] if token >= 0:
                    self._show(output)
                    return self._take(token, specs, len(memory), copies, timeout_s)
                case [frames.KEPT, int(token), int(nbytes)] if token >= 0 and 0 < nbytes < 1 << 46:
                    self.answer_bytes = nbytes
                    frame = Frame([frames.FETCH, token])
                    found = self._session.run(self.request(frame, room=nbytes, timeout_s=timeout_s, copies=copies))
                    assert isinstance(found, Answer)
                    return found
                case [frames.LOADED, list(output)]:
                    self._show(output)
                    return Answer()
                case [frames.GONE, list(reference), str(place)]:
                    text = f"{self._label} in {self._env}: {place or 'the object is lost'}: the worker that it was in "
                    text += "has ended, or this process has connected anew or was forked; construct another one, or "
                    text += 'decorate its class with on_death="rebuild", which does so by itself'
                    lost = ObjectLost(text, backend=self._backend)
                    lost.reference = Reference.from_tree(reference)
                    return Answer(error=lost)
        except ProtocolError as exc:
            text = f"{self._label} in {self._env}: its worker's answer breaks the protocol: {exc.message}"
            return Answer(error=BackendError(text, backend=self._backend))
        except InvalidArgument as exc:
            text = f"{self._label} in {self._env} has run, and its result cannot be read here: {exc.message}"
            return Answer(error=InvalidArgument(text))
        return Answer(error=BackendError(f"{self._label}: no answer begins with {head[0]}", backend=self._backend))

    def _there(self, made: list[Any], copies: list[Copy]) -> list[tuple[TensorSpec, Any]]:
        """The results on the GPU. `made`: the numbers of those that the function made there."""
        loan = self.loan
        if loan is None:
            raise ProtocolError("results on a GPU, of a call without one")
        self.there = loan.results
        for number, spec in enumerate(loan.results):
            if number in made:
                self.placed_bytes += spec.span_bytes
            elif spec.numel:
                why = "a function's result lies in its own memory on the GPU"
                copies.append(Copy("result", spec.span_bytes, "worker", why))
        return list(zip(loan.results, loan.given(), strict=True))

    def _take(self, token: int, specs: list[Any], room: int, copies: list[Copy], timeout_s: float | None) -> Answer:
        """The answer of a call whose results on the GPU have no memory here yet, with that."""
        before = self.loan
        if before is None:
            raise ProtocolError("results on a GPU, of a call without one")
        results = [TensorSpec.from_wire(spec) for spec in specs]
        if not all(spec.is_contiguous for spec in results):
            raise ProtocolError("results with gaps")
        stream = None if before.like.kind == "dlpack" else before.stream  # of those each thread has one of ours
        try:
            loan = lend(self._session.gpus, GpuArguments(before.like), range(MAX_LENT), results, stream)
            before.hush()
            copies += loan.copies
            copies.append(Copy("result", loan.result_bytes, "worker", "it waited there for memory of its caller's"))
            frame = Frame([frames.TAKE, token, loan.outs])
            its = self.request(frame, all_lent((), loan), room=room, timeout_s=timeout_s, copies=copies, loan=loan)
            found = self.run(its)
        except LayerZeroError as exc:  # the function has run: what would have it run again is not to be said
            text = f"{self._label} in {self._env} has run, and its result could not be fetched: {exc.message}"
            return Answer(error=BackendError(text, backend=self._backend))
        assert isinstance(found, Answer)
        return found

    def run(self, request: Request) -> Any:
        """What comes of it; what it lends on a GPU is not lent longer than that."""
        try:
            return self._session.run(request)
        finally:
            if request.on_gpu is not None:
                request.on_gpu.close()

    def _opener(
        self,
        memory: memoryview,
        payload: memoryview,
        copies: list[Copy],
        places: list[Any],
        there: Sequence[tuple[TensorSpec, Any]] = (),
    ) -> Callable[[list[Any]], Any]:
        """Arrays of a result: views of the whole answer `memory`, whose slot is free again after the last of them.
        `places`: offsets of those that were made there. `there`: those on a GPU."""
        start = len(memory) - len(payload)
        wholes: dict[str, Any] = {}

        def get(node: list[Any]) -> Any:
            if node[:1] == [frames.OF_GPU]:
                return of_those(there, node)
            library, spec, part = frames.read_array(node, [payload], LIBRARIES)
            library = self.library or library
            if library not in sys.modules:
                raise InvalidArgument(f"it has an array of {library}, which this process has not imported")
            if not spec.is_contiguous:
                raise ProtocolError(f"{spec} has gaps")
            if node[-1] in places:
                self.placed_bytes += len(part)
            elif spec.numel:
                copies.append(Copy("result", len(part), "worker", "a function's result lies in its own memory"))
            if library not in wholes:
                wholes[library] = whole(library, memory)
            first = start + node[-1]
            return array_on(library, wholes[library][first : first + len(part)], spec)

        return get

    def _failure(self, tree: Any) -> LayerZeroError | None:
        """What ended several calls before the last. Raises ProtocolError."""
        match tree:
            case None:
                return None
            case [str(kind), str(message), str(trace)]:
                return self._remote(kind, message, trace)
            case [str(message)]:
                return InvalidArgument(f"{self._label} in {self._env}: {message}")
        raise ProtocolError("no error of a call")

    def _remote(self, kind: str, message: str, trace: str) -> RemoteError:
        text = f"{self._label} in {self._env} raised {kind}: {message}\n{trace.rstrip()}"
        return RemoteError(text, type=kind, message=message, traceback=trace, env=self._env)

    def _show(self, output: list[Any]) -> None:
        """What the function printed and logged, with a label, and note what it warned of. Others say what they like:
        nothing of it is trusted."""
        for item in _joined(output) if output else ():
            match item:
                case [0 | 1 as kind, str(text)]:
                    stream = sys.stdout if kind == 0 else sys.stderr
                    lines = text.splitlines(keepends=True)
                    stream.write("".join(f"[{self._env}] {line}" if line.strip() else line for line in lines))
                case [2, str(name), int(level), str(text)]:
                    logging.getLogger(name[:200]).log(level, "[%s] %s", self._env, text)
                case [3, *tree]:
                    self.warned.append((Warned.from_tree(tree), f"{self._label} in {self._env}"))
                case _:
                    _log.warning("%s: output that cannot be shown: %.100r", self._env, item)


def _joined(output: list[Any]) -> list[Any]:
    """What was written in pieces, as `print` does, is one text."""
    found: list[Any] = []
    for item in output:
        match item:
            case [0 | 1 as kind, str(text)] if found and found[-1][0] == kind:
                found[-1][1] += text
            case [0 | 1 as kind, str(text)]:
                found.append([kind, text])
            case _:
                found.append(item if isinstance(item, list) and item else [None, item])
    return found


def _reference(tree: list[Any]) -> Reference:
    return Reference.from_tree(tree, is_answer=True)
