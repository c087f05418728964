"""lz.group: the processes of a program as ranks that call each other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from layerzero.client.arrays.recognition import CPU
from layerzero.client.connection.report import Copy
from layerzero.client.facade import default_session
from layerzero.groups import calls, choices, faults, meeting, points, staging, starting, tuning
from layerzero.groups.arrays import Given, Result
from layerzero.groups.calls import Call, Op
from layerzero.groups.choices import Choice, Choices, GroupReport, Measured
from layerzero.groups.libraries import Libraries
from layerzero.groups.peers import COLLECTIVE, Peers
from layerzero.groups.shared_memory import SharedMemory
from layerzero.ipc import spinning
from layerzero.ipc.errors import EnvError, GroupBroken, InvalidArgument, LayerZeroError, RanksDisagree
from layerzero.ipc.transport.plain import pack_body, unpack_body

if TYPE_CHECKING:
    from layerzero.functions.environment import FunctionEnv

T = TypeVar("T")
TIMEOUT_S = 60.0
_VALUE = b"CV"


def group(
    name: str,
    rank: int | None = None,
    size: int | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = TIMEOUT_S,
    gloo_env: FunctionEnv | None = None,
) -> Group:
    """This process as a rank of a group; returns when all ranks are there.

    name: the same on all ranks, and another one for each group that a broker's clients have. rank, size: of the
    variables RANK and WORLD_SIZE, as torchrun sets them, when left out. backend: "shared_memory" or "gloo" for all
    calls; else what group.tune() has found, and shared memory where it has not. Tensors on GPUs go by "nccl", which may
    be named. timeout_s: how long this and each call may wait for other ranks. gloo_env: an environment with torch
    (lz.env) for gloo; else the store's torch.

    Raises NotConnected before lz.connect(), InvalidArgument, ConfigError, and GroupBroken, which names the ranks that
    did not come.
    """
    rank = starting.of_environment("rank", "RANK", rank)
    size = starting.of_environment("size", "WORLD_SIZE", size)
    meeting.demand(name, rank, size)
    choices.demand_backend(backend)
    starting.demand_seconds(timeout_s)
    made = Group(default_session.session().path.parent, name, rank, size, backend, timeout_s, gloo_env)
    made._form(timeout_s)
    return made


class Group:
    """Made by lz.group. All ranks make the same calls in the same order; of one rank, threads take turns.

    What cannot be agreed on is RanksDisagree on all ranks. When a rank dies, leaves or does not come in time, all
    others get GroupBroken, in a call or with their next one; `reform()` puts the group together again.
    """

    def __init__(
        self,
        runtime: Path,
        name: str,
        rank: int,
        size: int,
        backend: str | None,
        timeout_s: float,
        gloo_env: FunctionEnv | None,
    ) -> None:
        self._runtime, self._name, self._rank, self._size = runtime, name, rank, size
        self._backend, self._timeout_s, self._gloo_env = backend, timeout_s, gloo_env
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._chunk, self._spin_ns = staging.chunk_bytes(os.environ), spinning.limit_ns(os.environ)
        self._choices = Choices()
        self._generation = self._calls = 0
        self._completed: dict[int, int] = {}
        self._error: LayerZeroError | None = None
        self._peers: Peers | None = None
        self._own: staging.OwnMemory | None = None
        self._shared: SharedMemory | None = None
        self._libraries = Libraries(runtime, gloo_env)
        self._report: GroupReport | None = None

    # --- what it is

    @property
    def name(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def generation(self) -> int:
        """1 at first, one more with each re-forming."""
        return self._generation

    @property
    def is_whole(self) -> bool:
        """False once this rank knows that the group is broken, or has closed it."""
        return self._peers is not None

    @property
    def completed(self) -> dict[int, int]:
        """How many calls of the last generation each rank had completed; -1 of a rank that is new. Empty at first."""
        return dict(self._completed)

    def __repr__(self) -> str:
        state = "" if self.is_whole else ", broken"
        return f"<lz.Group {self._name!r}: rank {self._rank} of {self._size}, generation {self._generation}{state}>"

    # --- calls of all ranks

    def all_reduce(
        self,
        x: T,
        op: str = "sum",
        *,
        out: Any = None,
        timeout_s: float | None = None,
        backend: str | None = None,
        wait: bool = True,
    ) -> T:
        """The sum over all ranks, of the shape of `x`; the same bits on all of them.

        op: sum, mean, prod, min or max. Additions go in the order of the ranks, (x0 + x1) + x2; of 16-bit floats in
        float32, rounded once. out: where to put it, which may be `x`; else new shared memory. wait: on a GPU, for
        the end of the call; without, it returns when the call is on the stream, and `synchronize` says how it ended.
        """
        return self._call(calls.ALL_REDUCE, x, out, timeout_s, backend, wait, detail=op)  # type: ignore[no-any-return]

    def all_gather(
        self, x: T, *, out: Any = None, timeout_s: float | None = None, backend: str | None = None, wait: bool = True
    ) -> T:
        """What all ranks gave, in their order, along the first dimension."""
        return self._call(calls.ALL_GATHER, x, out, timeout_s, backend, wait)  # type: ignore[no-any-return]

    def reduce_scatter(
        self,
        x: T,
        op: str = "sum",
        *,
        out: Any = None,
        timeout_s: float | None = None,
        backend: str | None = None,
        wait: bool = True,
    ) -> T:
        """Of the sum over all ranks, this rank's part along the first dimension. Additions as in `all_reduce`."""
        return self._call(calls.REDUCE_SCATTER, x, out, timeout_s, backend, wait, detail=op)  # type: ignore[no-any-return]

    def all_to_all(
        self, x: T, *, out: Any = None, timeout_s: float | None = None, backend: str | None = None, wait: bool = True
    ) -> T:
        """`x` has a part for each rank along the first dimension; gives what each rank has for this one."""
        return self._call(calls.ALL_TO_ALL, x, out, timeout_s, backend, wait)  # type: ignore[no-any-return]

    def broadcast(
        self,
        x: T,
        root: int = 0,
        *,
        out: Any = None,
        timeout_s: float | None = None,
        backend: str | None = None,
        wait: bool = True,
    ) -> T:
        """What rank `root` has. On others `x` says dtype and shape; out: may be `x`."""
        return self._call(calls.BROADCAST, x, out, timeout_s, backend, wait, detail=root)  # type: ignore[no-any-return]

    def barrier(self, *, timeout_s: float | None = None, backend: str | None = None) -> None:
        """Returns when all ranks are in it. It says nothing of their GPUs."""
        if backend is None and self._backend == choices.NCCL:  # which is of arrays
            backend = choices.SHARED_MEMORY
        self._call(calls.BARRIER, np.empty(0, np.uint8), None, timeout_s, backend, True)

    def synchronize(self, *, timeout_s: float | None = None) -> None:
        """Returns when the GPU has done this rank's calls with wait=False. Raises GroupBroken where it never will:
        what they gave is void."""
        with self._lock:
            peers, _ = self._demand_whole()
            try:
                self._libraries.wait(peers, self._until(timeout_s))
            except BaseException as exc:
                raise self._break(exc) from (None if isinstance(exc, LayerZeroError) else exc)

    # --- from one rank to another

    def send(self, x: Any, to: int, *, timeout_s: float | None = None, wait: bool = True) -> None:
        """Returns when rank `to` has it by `recv`; of a GPU's tensor when this GPU has sent it, or with wait=False when
        that is on the stream."""
        self._point(f"send(to={to})", to, timeout_s, wait, lambda ways: points.send(ways, x, to))

    def recv(
        self, source: int, *, out: Any = None, kind: str = "numpy", timeout_s: float | None = None, wait: bool = True
    ) -> Any:
        """What rank `source` sends: in `out`, whose dtype and shape must be those, or as a new array of NumPy, or of
        torch by kind="torch": on this rank's GPU where it is sent from one. wait: as of calls of all ranks."""
        doing = f"recv({source})"
        return self._point(doing, source, timeout_s, wait, lambda ways: points.receive(ways, source, out, kind))

    def _pass_agreed(self, x: Any, other: int, *, sends: bool, wait: bool) -> None:
        """Send a GPU's tensor, or receive into it, where both ranks have passed such a one before, and know that these
        two calls meet: nothing is agreed on. For plans of several calls, as of lz.pipeline."""
        doing = f"send(to={other})" if sends else f"recv({other})"
        self._point(doing, other, None, wait, lambda ways: points.pass_agreed(ways, x, other, sends=sends))

    # --- looking

    def last_report(self) -> GroupReport:
        """Of the last call that went well. Raises InvalidArgument before the first one."""
        if self._report is None:
            raise InvalidArgument(f"group {self._name!r}: call it first; it has not been yet")
        return self._report

    def explain(self, x: Any, op: str = "all_reduce", *, backend: str | None = None) -> Choice:
        """Which way a call takes, and why not the others; calls nothing. x: the array, or a number of bytes."""
        choices.demand_backend(backend)
        if op not in calls.BY_NAME:
            raise InvalidArgument(f"op is {op!r:.40}; allowed: {', '.join(calls.BY_NAME)}")
        if isinstance(x, int):
            return self._pick(calls.BY_NAME[op], x, "float32", backend)
        given = Given(x)
        return self._pick(calls.BY_NAME[op], given.nbytes, given.dtype, backend, given.device)

    def tune(
        self, sizes: Sequence[int] = tuning.BYTES, ops: Sequence[str] = ("all_reduce",), timeout_s: float | None = None
    ) -> dict[tuple[str, int], Measured]:
        """Measure both backends, of float32 and these numbers of bytes; starts gloo, a process of some 300 MB for each
        rank. A call of all ranks. What is faster on rank 0 is taken from then on by all, for sizes of the same power
        of four. Raises EnvError where gloo cannot be started on a rank, and as calls do."""
        with self._lock:
            found = tuning.measured(self, sizes, ops, timeout_s)
            told = self._exchange_values([[*key, *vars(one).values()] for key, one in found.items()], self._until(None))
            rows = {(str(op), int(nbytes)): Measured(float(own), float(gloo)) for op, nbytes, own, gloo in told[0]}
            self._choices.measured |= {(op, choices.size_class(n)): one for (op, n), one in rows.items()}
            return rows

    # --- its life

    def reform(self, *, rank: int | None = None, size: int | None = None, timeout_s: float | None = None) -> Group:
        """Put the group together again, as a new generation: all ranks that are left call it, and a process in the
        place of one that is lost calls lz.group. With `rank` and `size` fewer or more ranks go on, numbered anew. Of a
        group that is whole, calls that are under way on other ranks end as GroupBroken. `completed` says afterwards
        which calls of the last generation each rank had completed.

        Returns the group. Raises as lz.group.
        """
        self._demand_own()
        rank, size = self._rank if rank is None else rank, self._size if size is None else size
        meeting.demand(self._name, rank, size)
        seconds = self._timeout_s if timeout_s is None else timeout_s
        starting.demand_seconds(seconds)
        with self._lock:
            self._break(self._broken(faults.RANK_LEFT, f"rank {self._rank} re-forms the group", [self._rank]))
            self._rank, self._size = rank, size
            self._form(seconds)
        return self

    @contextlib.contextmanager
    def giving_up(self) -> Iterator[None]:
        """What is raised within, and is not the group's own, ends it, reason FAILED: others wait for this rank."""
        try:
            yield
        except BaseException as exc:
            if self._peers is not None and not isinstance(exc, (GroupBroken, RanksDisagree)):
                self._break(exc)
            raise

    def close(self) -> None:
        """Leave the group: others are told so by their next call. A second time does nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._peers is not None:
                self._peers.leave()
            self._error = self._broken(faults.CLOSED, f"rank {self._rank} has closed it", [self._rank])
            self._libraries.close()
            self._drop()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._break(error)
        self.close()

    def _form(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        own = staging.OwnMemory(self._chunk)
        try:
            completed = self._calls if self._generation else -1
            hello = meeting.Hello(self._name, self._rank, self._size, self._generation, completed, self._chunk)
            shared = own.share()
            try:
                roster = meeting.meet(self._runtime, hello, shared, until_s)
            finally:
                os.close(shared)
        except BaseException:
            own.close()
            raise
        self._own = own
        its = (self._name, roster.generation, self._rank, roster.sockets, roster.pids)
        self._peers = peers = Peers(*its, self._spin_ns)
        # Not __del__: in a cycle of garbage the sockets may be closed before it is called.
        self._libraries = Libraries(self._runtime, self._gloo_env, roster.token)
        self._forgotten = weakref.finalize(self, starting.leave, os.getpid(), peers, own, self._libraries)
        self._forgotten.atexit = False
        self._completed = {} if max(roster.calls.values()) < 0 else roster.calls
        self._generation, self._calls, self._error = roster.generation, 0, None
        try:
            others = {rank: staging.map_other(fd, self._chunk) for rank, fd in roster.memories.items()}
            self._shared = SharedMemory(self._rank, self._size, peers, own, others)
            self._choices.take(self._exchange_values(self._choices.to_wire(), until_s)[0])
        except BaseException as exc:
            self._break(exc)
            raise

    # --- a call

    def _call(
        self, op: Op, x: Any, out: Any, timeout_s: float | None, backend: str | None, wait: bool, detail: str | int = ""
    ) -> Any:
        with self._lock:
            peers, shared = self._demand_whole()
            start_ns, waited_ns = time.perf_counter_ns(), peers.waited_ns
            until_s = self._until(timeout_s)
            self._calls += 1
            peers.doing = f"call {self._calls}, {op.name}"
            copies: tuple[Copy, ...] = ()
            try:
                given, result, choice, error = self._prepared(op, x, out, backend, detail)
                what: list[Any] = ["refused", str(error)]
                if error is None:
                    what = [op.name, detail, given.dtype, list(given.shape), choice.path]
                head = calls.head(self._generation, self._calls, what)
                call = Call(op, self._rank, self._size, given, result, detail, until_s, wait)
                if error is None and choice.path == choices.SHARED:
                    copies, error = calls.open_in_shared_memory(call, head, shared, peers)
                else:
                    told = calls.opened(
                        call, head, peers, is_said=choice is not None and choice.path == choices.MESSAGES
                    )
                    if error is None:
                        error = calls.disagreement(self._name, self._rank, head, told)
                    if error is None and choice.path in (choices.GLOO, choices.NCCL):
                        where = (choice.path, given.device, peers, until_s)
                        error = self._libraries.start(*where, exchange=self._exchange_values)
                    if error is None:
                        library = self._libraries.get(choice.path)
                        copies = calls.run(call, choice.path, told, len(head), library, peers)
            except BaseException as exc:
                raise self._break(exc) from (None if isinstance(exc, LayerZeroError) else exc)
            if error is not None:
                raise error
            self._note(peers, choice, copies, start_ns, waited_ns)
            return result.value

    def _prepared(
        self, op: Op, x: Any, out: Any, backend: str | None, detail: Any
    ) -> tuple[Any, Any, Any, LayerZeroError | None]:
        """What this rank gives, where the result goes and which way; or why it cannot, which others are told."""
        try:
            choices.demand_backend(backend)
            given = Given(x)
            op.demand(given, detail, self._size)
            choice = self._pick(op, given.nbytes, given.dtype, backend, given.device)
            result = Result(given, op.result_shape(given.shape, self._size), out, may_be_input=op.is_in_place)
            return given, result, choice, None
        except LayerZeroError as exc:
            return None, None, None, exc

    def _pick(self, op: Op, nbytes: int, dtype: str, backend: str | None, device: int = CPU) -> Choice:
        forced, nccl = backend or self._backend, self._libraries.get(choices.NCCL)
        return self._choices.pick_at(op, nbytes, dtype, device, self._size, forced, nccl)

    def _note(self, peers: Peers, choice: Choice, copies: tuple[Copy, ...], start_ns: int, waited_ns: int) -> None:
        """What the report is made of."""
        peers.doing = f"after {peers.doing}"
        waited_us, elapsed_us = (peers.waited_ns - waited_ns) / 1e3, (time.perf_counter_ns() - start_ns) / 1e3
        its = (self._name, self._rank, self._size, self._generation, self._calls)
        self._report = GroupReport(*its, choice, copies, waited_us, elapsed_us)

    def _point(
        self, doing: str, other: int, timeout_s: float | None, wait: bool, work: Callable[[points.Ways], points.Passed]
    ) -> Any:
        with self._lock:
            peers, shared = self._demand_whole()
            if type(other) is not int or other not in peers.ranks:
                raise InvalidArgument(f"the other rank is {other!r:.40}; allowed: {', '.join(map(str, peers.ranks))}")
            start_ns, waited_ns = time.perf_counter_ns(), peers.waited_ns
            peers.doing = doing
            try:
                ways = points.Ways(peers, shared, self._libraries, self._backend, self._until(timeout_s), wait)
                value, choice, copies = work(ways)
            except (InvalidArgument, EnvError) as exc:
                if peers.is_crossed:
                    raise self._break(exc) from None
                raise
            except BaseException as exc:
                raise self._break(exc) from (None if isinstance(exc, LayerZeroError) else exc)
            self._note(peers, choice, copies, start_ns, waited_ns)
            return value

    def _exchange_values(self, value: Any, until_s: float) -> dict[int, Any]:
        """What each rank says, by rank. Raises GroupBroken."""
        peers, _ = self._demand_whole()
        peers.send_all(_VALUE + pack_body(value), until_s)
        found = {self._rank: value}
        for rank, said in peers.take(COLLECTIVE, peers.ranks, until_s).items():
            if not said.startswith(_VALUE):
                raise self._broken(faults.FAILED, f"rank {rank} makes another call", [rank])
            found[rank] = unpack_body(said[len(_VALUE) :])
        return found

    # --- whether it can

    def _demand_own(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgument(f"group {self._name!r} is the process's that made it; call lz.group in this one")

    def _demand_whole(self) -> tuple[Peers, SharedMemory]:
        self._demand_own()
        if self._error is not None:
            raise type(self._error)(self._error.message, **self._error.facts)
        assert self._peers is not None
        assert self._shared is not None
        return self._peers, self._shared

    def _until(self, timeout_s: float | None) -> float:
        if timeout_s is not None:
            starting.demand_seconds(timeout_s)
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _broken(self, reason: str, what: str, ranks: Iterable[int]) -> GroupBroken:
        doing = "between calls" if self._peers is None else self._peers.doing
        its: dict[str, Any] = {"group": self._name, "generation": self._generation, "doing": doing}
        return faults.broken(reason, what, ranks=list(ranks), **its)

    def _break(self, exc: BaseException) -> BaseException:
        """The group ends here: the others are told why. Gives what to raise."""
        error: LayerZeroError
        if isinstance(exc, (GroupBroken, RanksDisagree)):
            error = exc
        else:
            is_stopped = not isinstance(exc, Exception)
            reason = faults.INTERRUPTED if is_stopped else faults.FAILED
            text = "was interrupted" if is_stopped else f"met {exc!r:.300}"
            error = self._broken(reason, f"rank {self._rank} {text}", [self._rank])
        if self._peers is not None:
            self._calls -= self._libraries.void() + self._peers.doing.startswith("call ")  # the one that it was in
            self._peers.tell(error)
            self._error = error
        self._drop()
        return error if isinstance(exc, Exception) else exc

    def _drop(self) -> None:
        """Let go of all that the ranks share."""
        if self._peers is not None:
            self._forgotten.detach()
            self._peers.close()
        if self._own is not None:
            self._own.close()
        self._libraries.drop()
        self._peers = self._own = self._shared = None
