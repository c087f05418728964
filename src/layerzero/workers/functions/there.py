"""Calls of functions on a GPU whose frames come again as the same bytes: they are not read again. Where their memory
lies may change: that is lent beside the frame."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.functions import frames, values
from layerzero.ipc.functions.frames import Code, Frame
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions.again import Plain, demand_plain
from layerzero.workers.functions.breakpoints import Breakpoints
from layerzero.workers.functions.code import Modules
from layerzero.workers.functions.coroutines import EventLoop
from layerzero.workers.functions.device import Results, Span, device, outs_of, span_of
from layerzero.workers.functions.objects import Objects
from layerzero.workers.functions.output import Output

MAX_KNOWN = 256  # calls, of all clients
ARRAYS = frozenset({"Tensor", "ndarray"})  # names of types that are results by themselves


class Part(NamedTuple):
    """An array in memory that a call lends: which of it, and where in that."""

    library: str
    spec: TensorSpec
    position: int
    offset: int

    def span(self, lent: Sequence[Any]) -> Span:
        """Raises ProtocolError where it does not lie there."""
        memory = lent[self.position]
        end = self.offset + self.spec.span_bytes
        if not isinstance(memory, Span) or end > memory.nbytes:
            raise ProtocolError(f"{self.spec} at {self.offset} is outside of its memory {self.position}")
        return memory[self.offset : end] if self.offset or end < memory.nbytes else memory


@dataclass(frozen=True)
class AgainThere:
    """A call that came twice. `given`: its arguments, of which those at the places of `parts` are arrays on the GPU;
    `outs`: memory for results, which the function has as its argument `out` with `is_given`."""

    plain: Plain
    given: list[Any]
    parts: tuple[tuple[int, Part], ...]
    outs: tuple[Part, ...]
    is_given: bool
    answers: dict[tuple[int, ...], Frame] = field(default_factory=dict)  # by results that were made in their place

    def results(self, lent: Sequence[Any]) -> Results:
        """Raises ProtocolError."""
        return Results([(one.spec, one.span(lent)) for one in self.outs], is_given=self.is_given)

    def arguments(self, lent: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Those of one call, in their order and by name. Raises ProtocolError, InvalidArgument."""
        given = self.given.copy()
        for place, one in self.parts:
            given[place] = device.open(one.library, one.spec, one.span(lent))
        if not self.is_given:
            return given, {}
        found = [device.out(one.library, one.spec, one.span(lent)) for one in self.outs]
        return given, {"out": found[0] if len(found) == 1 else tuple(found)}


class Server(Protocol):
    """What serves all calls of functions (serving.py)."""

    _modules: Modules
    _objects: Objects
    _breakpoints: Breakpoints
    _output: Output
    _loop: EventLoop

    def _known(self, tree: Any) -> Code: ...
    def _refused(self, exc: ProtocolError | InvalidArgument) -> Frame: ...
    def _raised(self, exc: BaseException, file: str, *, is_import: bool = False) -> Frame: ...
    def _returned(self, result: Any, what: str, client: int = 0) -> Frame: ...


class There:
    """For the worker's one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._calls: dict[bytes, AgainThere | bool] = {}  # by frame: True for one that came once, False to be read

    def serve(self, client: int, start: bytes, lent: Sequence[Any]) -> Frame | None:
        """The answer to a call whose frame begins with these bytes; None for one that is to be read."""
        head, calls = frames.whole(start), self._calls
        found = calls.get(head)
        if found is None:
            if head:
                if len(calls) >= MAX_KNOWN:
                    calls.clear()
                calls[head] = True
            return None
        if found is True:
            server = self._server
            made = again_there(head, lent, server._known, partial(server._objects.code_of, client))
            found = calls[head] = made or False
        if not isinstance(found, AgainThere):
            return None
        try:
            return self._run(client, found, lent)
        except (ProtocolError, InvalidArgument) as exc:
            return self._server._refused(exc)

    def _run(self, client: int, call: AgainThere, lent: Sequence[Any]) -> Frame:
        """As of calls that are read. Raises ProtocolError, InvalidArgument."""
        server, (code, label, level, _, reference, name) = self._server, call.plain
        device.expect(call.results(lent))
        held = None if reference is None else server._objects.find(client, reference)
        if held is None and reference is not None:
            return Frame([frames.GONE, reference, ""])
        server._breakpoints.label = label
        server._output.level(level)
        try:
            if held is None:
                run = server._modules.function(code)
            else:
                server._modules.enter(code)
        except InvalidArgument:
            raise
        except BaseException as exc:
            return server._raised(exc, code.file, is_import=True)
        given, named = call.arguments(lent)
        device.begin(label)
        try:
            result = run(*given, **named) if held is None else getattr(held.value, name)(*given)
            if isinstance(result, Coroutine):
                result = server._loop.complete(result)
        except BaseException as exc:  # as of others
            return server._raised(exc, code.file)
        device.demand_unwritten(label)
        del given, named
        if len(call.outs) == 1 and type(result).__name__ in ARRAYS:
            made = self._plainly(call, result)
            if made is not None:
                return made
        return server._returned(result, f"{label} has run", client)

    def _plainly(self, call: AgainThere, result: Any) -> Frame | None:
        """The answer of a call that results in one array, as there is memory for; None for all others."""
        assert device.results is not None
        found = device.found(result)
        if found is None or self._server._output.has_items or not device.results.takes(found):
            return None
        there = tuple(device.settle() or ())
        answer = call.answers.get(there)
        if answer is None:
            tree = [values.ARRAY, *frames.array_node(frames.OF_GPU, found.spec, frames.ON_GPU, 0)]
            answer = call.answers[there] = Frame([frames.RETURNED_THERE, tree, [], list(there)])
        return answer


def again_there(
    head: bytes, lent: Sequence[Any], known: Callable[[Any], Code], held: Callable[[Any], Code | None]
) -> AgainThere | None:
    """Of a call whose frame is `head`; None for one that is to be read each time. As again_of."""
    try:
        return demand_again_there(head, lent, known, held)
    except (ProtocolError, InvalidArgument, IndexError):
        return None


def demand_again_there(
    head: bytes, lent: Sequence[Any], known: Callable[[Any], Code], held: Callable[[Any], Code | None]
) -> AgainThere | None:
    """As again_there. Raises ProtocolError, InvalidArgument, IndexError for what cannot be read."""
    _, tree = frames.head_of(head)
    match tree:
        case [frames.GPU, list(call), list(outs), bool(is_given)]:
            plain = demand_plain(call, known, held)
        case _:
            return None
    if plain is None:
        return None
    given, parts, memories = [], [], [None, *lent]
    for place, one in enumerate(plain.items):
        if type(one) is not list:
            given.append(one)
        elif type(one[0]) is int and one[0] == values.ARRAY and str(one[1]).startswith(frames.OF_GPU):
            parts.append((place, _part(one[1:], memories)))
            given.append(None)
        else:
            return None
    outs_of(outs, memories)  # which raises
    made = tuple(_part(node, memories) for node in outs)
    return AgainThere(plain, given, tuple(parts), made, is_given)


def _part(node: list[Any], memories: Sequence[Any]) -> Part:
    """Raises ProtocolError, InvalidArgument."""
    library, spec, _ = span_of(node, memories)
    if not spec.numel:
        raise ProtocolError("an empty array has no place")
    return Part(library, spec, node[-2], node[-1])
