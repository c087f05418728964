"""Calls of functions as a worker serves them: a frame in, an answer out.

A function runs once for each frame. What its answer does not fit into is kept, and fetched by another frame.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import AsyncGeneratorType, GeneratorType
from typing import Any, TypeAlias

from layerzero.ipc.errors import MAX_TEXT, CudaError, InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code, Frame, Payload
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions.again import LIBRARIES, NO_KWARGS, START_BYTES, Again, again_of
from layerzero.workers.functions.breakpoints import Breakpoints
from layerzero.workers.functions.code import Modules, renamed
from layerzero.workers.functions.coroutines import EventLoop
from layerzero.workers.functions.device import (
    Results,
    Span,
    apart,
    copy_of,
    device,
    host_array,
    outs_of,
    span_of,
    span_or_view,
)
from layerzero.workers.functions.errors import error_of
from layerzero.workers.functions.installed import told_of
from layerzero.workers.functions.kept import Kept, Result, Written
from layerzero.workers.functions.libraries import Arrays, Models
from layerzero.workers.functions.objects import Held, Objects, demand_use, ended_within, use_of
from layerzero.workers.functions.output import Output
from layerzero.workers.functions.placing import Copied, placing
from layerzero.workers.functions.there import There
from layerzero.workers.provider import Bind, Block, Bound, Call

CLOSE_S = 5.0  # so long what is let go of when a client has left may take, all together
MAX_NAME = 200  # of a type
Memories: TypeAlias = "list[memoryview | Span | None]"
_NOTHING = Frame([frames.RETURNED, None, []])


class Functions:
    """The kernel `function`. What is kept for a client goes with it, and no other client can have it."""

    def __init__(self, arrays: Arrays, name: str, models: Models | None = None) -> None:
        self._arrays, self._name, self._environment = arrays, name, pools.environment_of(name)
        self._models, self._modules, self._output = models, Modules(), Output()
        self._breakpoints, self._kept, self._objects = Breakpoints(name), Kept(), Objects(name)
        self._told, self._loop = 0, EventLoop()
        self._note_kept: Callable[[int], None] = lambda _: None
        self._code: tuple[list[Any], Code] | None = None  # of the last call
        self._there = There(self)

    def bind_of(self, client: int) -> Bind:
        """As provider.PerClient."""
        return partial(self._bind, client)

    def forget(self, client: int) -> None:
        """As provider.PerClient. What closes a generator or an object is the user's code, and nobody waits for it: it
        ends this process where it takes too long, so that others are served."""
        self._kept.forget(client)
        several: list[Held | None] = [*self._objects.forget(client)]
        if several:
            with ended_within(CLOSE_S):
                self._let_go(several)
        self._tell()

    def begin(self, note_kept: Callable[[int], None], endpoint: str) -> None:
        """As provider.PerClient."""
        self._note_kept = note_kept
        self._breakpoints.begin(endpoint)

    def _tell(self) -> None:
        count = len(self._kept) + self._objects.count
        if count != self._told:
            self._told = count
            self._note_kept(count)

    def _bind(self, client: int, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        frame, *memories = [None if block is None else span_or_view(block) for block in inputs]
        lent, answer = memories, outputs[0].host[: outputs[0].spec.span_bytes]
        assert isinstance(frame, memoryview)
        ordinal = next((one.device for one in lent if isinstance(one, Span)), None)
        room = len(answer)
        start, before = frame[:START_BYTES], b""
        again: Again | None = None

        def bound() -> None:
            self._breakpoints.client = client
            try:
                if ordinal is None and not device.is_used:
                    serve()
                else:
                    with device.around(ordinal):
                        serve()
            finally:
                placing.end()
                self._breakpoints.end()
            self._tell()

        def serve() -> None:
            nonlocal before, again
            read = start.tobytes()  # nobody changes that meanwhile
            made: Frame | Written | None = None if ordinal is None else self._there.serve(client, read, lent)
            if again is not None and read.startswith(again.head):
                placing.begin(answer)
                made = self._run_again(client, again)
            elif made is None:
                made = self._serve(client, frame, lent, answer)
                if read == before and ordinal is None:
                    held = partial(self._objects.code_of, client)
                    again = again_of(read, frame, lent, self._known, self._arrays, held)
                before = read
            if made.nbytes > room:
                made = self._notice(client, made, room)
            made.write(answer)

        return bound

    def _notice(self, client: int, made: Frame | Written, room: int) -> Frame:
        """Keep an answer that has no room, and say so."""
        made = made if isinstance(made, Written) else Written(made)
        notice = Frame([frames.KEPT, self._kept.add(client, made, made.nbytes), made.nbytes])
        if notice.nbytes > room:
            raise InvalidArgument(f"an answer has room for {room} bytes; allowed: at least {notice.nbytes}")
        return notice

    def _serve(self, client: int, frame: memoryview, lent: Memories, answer: memoryview) -> Frame | Written:
        try:
            head, payload = frames.read(frame)
            match head:
                case [frames.CALL | frames.USE, *_]:
                    placing.begin(answer)
                    return self._run(client, head, [payload, *lent])
                case [frames.PING]:
                    return frames.pong()
                case [frames.FETCH, int(token)]:
                    return self._fetch(client, token)
                case [frames.LOAD, code]:
                    return self._load(Code.from_tree(self._own(code)))
                case [frames.PLACE, list(call), list(specs)] if call[:1] == [frames.CALL]:
                    placing.begin(answer)
                    return self._run(client, call, [payload, *lent], specs=specs)
                case [frames.GPU, list(call), list(outs), bool(is_given)]:
                    memories = [payload, *lent]
                    device.expect(Results(outs_of(outs, memories), is_given=is_given))
                    match call:
                        case [frames.HOLD, list(held), frames.ALL | frames.OWN as stays]:
                            return self._run(client, held, memories, stays)
                        case [frames.NEXT, reference, int(level)]:
                            self._output.level(level)
                            return self._next(client, reference)
                    return self._run(client, call, memories, specs=outs if is_given else None)
                case [frames.TAKE, int(token), list(outs)]:
                    return self._take(client, token, outs_of(outs, [payload, *lent]))
                case [frames.MANY, tree, args, kwargs, int(level)] if kwargs == NO_KWARGS:
                    return self._run_many(client, tree, args, level, [payload, *lent])
                case [frames.HOLD, list(call), frames.ALL | frames.OWN as stays]:
                    return self._run(client, call, [payload, *lent], stays)
                case [frames.NEXT, reference, int(level)]:
                    self._output.level(level)
                    return self._next(client, reference)
                case [frames.NAME, tree, int(level)]:
                    self._output.level(level)
                    return self._name_of(self._known(tree))
                case [frames.RELEASE, list(references)]:
                    self._let_go([self._objects.release(client, reference) for reference in references])
                    return self._returned(None, "")
        except (ProtocolError, InvalidArgument) as exc:
            return self._refused(exc)
        return self._refused(ProtocolError(f"no call begins with {head[0]}"))

    def _run_again(self, client: int, call: Again) -> Frame:
        """As `_serve`, of a call that was read before."""
        code, reference = call.code, call.reference
        held = None if reference is None else self._objects.find(client, reference)
        if held is None and reference is not None:
            return Frame([frames.GONE, reference, ""])
        self._breakpoints.label = call.label
        self._output.level(call.level)
        try:
            if held is None:
                run = self._modules.function(code)
            else:
                self._modules.enter(code)
            given = call.arguments()
        except InvalidArgument as exc:
            return self._refused(exc)
        except BaseException as exc:
            return self._raised(exc, code.file, is_import=True)
        try:
            result = run(*given) if held is None else getattr(held.value, call.name)(*given)
            if result is None:
                output = self._output.take()
                return Frame([frames.RETURNED, None, output]) if output else _NOTHING
            if isinstance(result, Coroutine):
                result = self._loop.complete(result)
        except BaseException as exc:  # as of `_run`
            if code.is_model and isinstance(exc, InvalidArgument):
                return self._refused(exc)
            return self._raised(exc, code.file)
        del given
        try:
            return self._returned(result, f"{call.label} has run")
        except InvalidArgument as exc:
            return self._refused(exc)

    def _known(self, tree: Any) -> Code:
        if self._code is None or self._code[0] != tree:
            self._code = (tree, Code.from_tree(self._own(tree)))
        return self._code[1]

    def _own(self, tree: Any) -> Any:
        """Of what is named by environment, this one's."""
        match tree:
            case [frames.BY_ENVIRONMENT, *several]:
                for one in several:
                    match one:
                        case [str(name), list(own)] if name == self._environment:
                            return own
                raise ProtocolError(f"{self._environment} is not among the environments of the call")
        return tree

    def _refused(self, exc: ProtocolError | InvalidArgument) -> Frame:
        return Frame([frames.REFUSED, isinstance(exc, InvalidArgument), exc.message[:MAX_TEXT], self._output.take()])

    def _raised(self, exc: BaseException, file: str, *, is_import: bool = False) -> Frame:
        return Frame([frames.RAISED, *error_of(exc, file, is_import=is_import), self._output.take()])

    def _fetch(self, client: int, token: int) -> Written:
        made = self._kept.take(client, token)
        if not isinstance(made, Written):
            raise ProtocolError(f"answer {token} is of a GPU, and is to be taken there")
        return made

    def _take(self, client: int, token: int, outs: list[tuple[TensorSpec, Span]]) -> Frame:
        """The result of a call whose parts on the GPU have memory now."""
        kept = self._kept.take(client, token)
        if not isinstance(kept, Result):
            raise ProtocolError(f"answer {token} is not of a GPU, and is to be fetched")
        device.expect(Results(outs))
        return self._returned(*kept)

    def _load(self, code: Code) -> Frame:
        self._breakpoints.label = code.label
        try:
            self._modules.function(code)
        except InvalidArgument:
            raise
        except BaseException as exc:  # whatever a module raises when it is imported
            return self._raised(exc, code.file, is_import=True)
        return Frame([frames.LOADED, self._output.take()])

    def _name_of(self, code: Code) -> Frame:
        """What a name is, and the value of one that is neither function, class nor module."""
        try:
            found = self._modules.named_by(code)
        except InvalidArgument:
            raise
        except BaseException as exc:
            return self._raised(exc, code.file, is_import=True)
        return self._returned(told_of(found), f"{code.label} is a value")

    def _run(
        self,
        client: int,
        call: list[Any],
        memories: Memories,
        stays: int = frames.NOTHING,
        specs: list[Any] | None = None,
    ) -> Frame:
        """`stays`: what of the result does, as an object. `specs`: of arrays for the argument `out`."""
        run: Callable[..., Any]
        match call:
            case [frames.CALL, tree, args, kwargs, int(level)]:
                code, is_set = self._known(tree), False
                label = self._breakpoints.label = code.label
                self._output.level(level)
                try:
                    run = self._function(code)
                except InvalidArgument:
                    raise
                except BaseException as exc:
                    return self._raised(exc, code.file, is_import=True)
            case [frames.USE, reference, int(how), str(name), args, kwargs, int(level)]:
                self._output.level(level)
                held = self._objects.find(client, reference)
                if held is None:
                    return Frame([frames.GONE, reference, ""])
                code, is_set = held.code, how == frames.SET
                self._modules.enter(code)
                run = use_of(held.value, how, name)
                label = self._breakpoints.label = f"{code.label}{'.' * bool(name)}{name}"
            case _:
                raise ProtocolError(f"no call begins with {call[:1]!r:.80}")
        if stays != frames.NOTHING:
            self._objects.demand_room(client)
        try:
            given, named = self._arguments(client, args, kwargs, memories, is_kept=is_set or stays != frames.NOTHING)
        except values.NotHeld as exc:
            return Frame([frames.GONE, exc.facts["reference"], exc.message[:MAX_TEXT]])
        if call[0] == frames.USE:
            demand_use(how, name, len(given))
        if specs is not None:
            named["out"] = self._outs(specs, memories)
        device.begin(label)
        try:
            result = run(*given, **named)
            if result is not None and isinstance(result, Coroutine):
                result = self._loop.complete(result)
        except BaseException as exc:  # SystemExit and Rust's panics too: this call's outcome, not the worker's
            if code.is_model and isinstance(exc, InvalidArgument):
                raise  # what we say of a model, not what it says
            return self._raised(exc, code.file)
        if device.results is not None:
            device.demand_unwritten(label)
        del given, named
        if stays == frames.ALL or (stays == frames.OWN and self._is_own(result, code)):
            node = [values.HELD, *self._objects.add(client, Held(result, code)), values.described(result)[:MAX_NAME]]
            return Frame([frames.RETURNED, node, self._output.take()])
        return self._returned(result, f"{label} has run", client)

    def _run_many(self, client: int, tree: Any, args: Any, level: int, memories: Memories) -> Frame:
        """One call with each tuple of arguments, up to the first that raises."""
        code = self._known(tree)
        self._output.level(level)
        try:
            run = self._function(code)
        except InvalidArgument:
            raise
        except BaseException as exc:
            return self._raised(exc, code.file, is_import=True)
        try:
            several, _ = self._arguments(client, args, NO_KWARGS, memories)
        except values.NotHeld as exc:
            return Frame([frames.GONE, exc.facts["reference"], exc.message[:MAX_TEXT]])
        if any(type(given) is not tuple for given in several):
            raise ProtocolError("arguments of several calls are tuples")
        payload, results, failure = Payload(), list[Any](), list[str]()
        for given in several:
            try:
                result = run(*given)
            except BaseException as exc:  # as of one call
                failure = error_of(exc, code.file)
                break
            try:
                results.append(self._encoded(result, "result", f"{code.label} has run", payload))
            except InvalidArgument as exc:
                failure = [exc.message[:MAX_TEXT]]
                break
        made = renamed([values.LIST, *results])
        head = [frames.SEVERAL, made, failure or None]
        return self._output.answer(head, payload=payload, what=f"{code.label} has run", results="results")

    def _function(self, code: Code) -> Callable[..., Any]:
        if not code.is_model:
            return self._modules.function(code)  # type: ignore[no-any-return]
        if self._models is None:
            raise InvalidArgument(f"{self._name} opens no models")
        return self._models.find(code.qualname, self._modules)

    def _outs(self, specs: list[Any], memories: Memories) -> Any:
        """Arrays in the memory of the answer, or in that of a GPU: one, or a tuple of several. Raises ProtocolError,
        InvalidArgument."""
        found = []
        if device.results is not None:
            found = [device.out(*span_of(node, memories)) for node in specs]
            return found[0] if len(found) == 1 else tuple(found)
        for node in specs:
            match node:
                case [str(library), str(), list(), list()] if library in LIBRARIES:
                    spec = TensorSpec.from_wire(node[1:])
                case _:
                    raise ProtocolError("no description of a result")
            if not spec.is_contiguous:
                raise ProtocolError(f"{spec} has gaps")
            memory = placing.take(spec.span_bytes) if spec.numel else memoryview(b"")
            if memory is None:
                raise ProtocolError(f"an answer has {placing.room} bytes, too few for {spec}")
            found.append(self._arrays.open(library, spec, memory))
        return found[0] if len(found) == 1 else tuple(found)

    def _next(self, client: int, reference: Any) -> Frame:
        """An item in a list, or an empty one at the end. What has ended or raised is let go of."""
        held = self._objects.find(client, reference)
        if held is None:
            return Frame([frames.GONE, reference, ""])
        advance = next if hasattr(type(held.value), "__next__") else self._loop.next_of
        if not hasattr(type(held.value), "__next__" if advance is next else "__anext__"):
            raise ProtocolError(f"{values.described(held.value)} is no iterator")
        self._modules.enter(held.code)
        self._breakpoints.label = held.code.label
        try:
            items = [advance(held.value)]
        except StopIteration:
            self._objects.release(client, reference)
            items = []
        except BaseException as exc:  # as of a call
            self._objects.release(client, reference)
            return self._raised(exc, held.code.file)
        payload, what = Payload(), f"{held.code.label} has run"
        tree = [values.LIST, *(self._encoded(item, "item", what, payload) for item in items)]
        return self._answer(client, Result(items, what), renamed(tree), payload)

    def _let_go(self, several: list[Held | None]) -> None:
        """A generator that nobody has any more is closed by that: its own code runs, as it does of an object."""
        while several:
            held = several.pop()
            if held is not None and isinstance(held.value, (GeneratorType, AsyncGeneratorType)):
                self._modules.enter(held.code)
            if held is not None and isinstance(held.value, AsyncGeneratorType):
                try:
                    self._loop.complete(held.value.aclose())
                except BaseException:  # what its closing raises is shown
                    traceback.print_exc()
            del held

    def _is_own(self, result: Any, code: Code) -> bool:
        """Whether it is an object of the class that the called method is of."""
        try:
            owner = self._modules.named_by(code.of(code.qualname.rpartition(".")[0]))
        except AttributeError:  # its module has no such name any more
            return False
        return isinstance(owner, type) and isinstance(result, owner)

    def _arguments(
        self, client: int, args: Any, kwargs: Any, memories: Memories, *, is_kept: bool = False
    ) -> tuple[list[Any], dict[str, Any]]:
        """`is_kept`: an object may keep them, so that arrays are copies. Raises NotHeld where an object among them is
        not here."""

        def get(node: list[Any]) -> Any:
            is_here = device.results is not None and str(node[0]).startswith(frames.OF_GPU)
            its = span_of(node, memories) if is_here else host_array(node, memories, LIBRARIES)
            found = device.open(*its) if is_here else self._arrays.open(*its)
            if not is_kept:
                return found
            if is_here:
                device.disown()
            return copy_of(found)

        def find(node: list[Any]) -> Any:
            held = self._objects.find(client, node)
            if held is None:
                raise values.NotHeld("the object is lost", reference=node)
            return held.value

        if kwargs == NO_KWARGS and (flat := values.decode_flat(args, get)) is not None:
            return flat, {}
        given = values.decode(args, get, self._modules.named, "args", find)
        named = {} if kwargs == NO_KWARGS else values.decode(kwargs, get, self._modules.named, "kwargs", find)
        if type(given) is not list or type(named) is not dict or any(type(key) is not str for key in named):
            raise ProtocolError("arguments are a list and a dict")
        return given, named

    def _returned(self, result: Any, what: str, client: int = 0) -> Frame:
        """`what`: begins the error where it cannot cross. `client`: whose it is kept for without memory on a GPU."""
        if result is None:
            output = self._output.take()
            return Frame([frames.RETURNED, None, output]) if output else _NOTHING
        if placing.is_used:
            placed = placing.payload()
            head = [frames.PLACED, renamed(self._encoded(result, "result", what, placed))]
            made = self._output.answer(head, placed.places, payload=placed, what=what, is_placed=True)
            if placed.places and made.has_room and made.nbytes <= placing.room:
                return made
            self._output.put_back()
        payload = Copied() if placing.is_used else Payload()
        tree = renamed(self._encoded(result, "result", what, payload))
        return self._answer(client, Result(result, what), tree, payload)

    def _answer(self, client: int, result: Result, tree: Any, payload: Payload) -> Frame:
        """With its results on a GPU in their memory; without that they are kept."""
        if device.results is None or not device.results.found:
            return self._output.answer([frames.RETURNED, tree], payload=payload, what=result.what)
        made_there = device.settle()
        if made_there is not None:
            return self._output.answer([frames.RETURNED_THERE, tree], made_there, payload=payload, what=result.what)
        token = self._kept.add(client, Result(apart(result.value), result.what), device.results.nbytes)
        return Frame([frames.AWAITS, token, device.results.specs, self._output.take()])

    def _encoded(self, value: Any, root: str, what: str, payload: Payload) -> Any:
        try:
            return values.encode(value, lambda part: self._arrays.put(part, payload), root)
        except InvalidArgument as exc:
            first = f"{exc.facts['repair']}: " if "repair" in exc.facts else ""
            raise InvalidArgument(f"{first}{what}, and {exc.message}") from exc
        except (ProtocolError, CudaError):
            raise
        except Exception as exc:  # a library that has no memory for a dense copy, say: the function is not run again
            text = f"{what}, and its result cannot cross: {type(exc).__name__}: {exc}"[:MAX_TEXT]
            raise InvalidArgument(text) from exc
