"""Calls on GPUs, of all ranks and from one to another, by NCCL: the process's own torch has the tensors, and makes the
calls.

A call is enqueued on the caller's stream. One that is waited for returns when the GPU has done it. A kernel of NCCL
waits for the other ranks, and does not see that one is gone: whoever waits for it sees that, and aborts it; of calls
that nobody waits for a thread does, which looks now and then whether a rank goes.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerzero.client.connection.report import Copy
from layerzero.groups import calls, faults
from layerzero.groups.choices import START_S
from layerzero.groups.nccl_watch import GRACE_S, Watch
from layerzero.groups.peers import Peers
from layerzero.ipc.errors import GroupBroken, LayerZeroError, OutOfMemory
from layerzero.ipc.vocabulary.tensors import ITEMSIZE

if TYPE_CHECKING:
    from layerzero.groups.one_shot import OneShot

SPIN_S = 0.002  # so long is asked again and again whether the GPU is through
NAP_S, MAX_NAP_S = 0.0001, 0.001  # then with so much time between; and where that may take long
ABORT_S = 1.0  # so long is waited for the end of what is let go on
_BLAME_S = 0.5  # so long a rank whose NCCL failed waits for the one that knows why
_ALL = -1  # in the place of a rank: the communicator of all
_END_S = 5.0  # so long the end of the process waits for that
_teardowns: list[threading.Thread] = []  # of what was aborted: the driver takes half a second for each
_made: weakref.WeakSet[Nccl] = weakref.WeakSet()


class Nccl:
    """This rank's part of a group's NCCL, on GPU `device` of its torch."""

    def __init__(self, runtime: Path, group: str, generation: int, rank: int, device: int) -> None:
        self._path = runtime / "groups" / f"{group}.{generation}.nccl"
        self._rank, self.device = rank, device
        self._group: Any = None
        _made.add(self)
        self._reach: tuple[str, str] | None = None
        self._connected: set[tuple[int, bool]] = set()  # with all or one, and whether this rank sends to it
        self._latest: Any = None  # an event behind the last call
        self._open: dict[Any, tuple[Any, int]] = {}  # by stream, of those not waited for: that, how many of all ranks
        self._left: list[Any] = []  # events of those that were given up
        self._watch: Watch | None = None
        self._held: list[weakref.WeakMethod[Callable[[], None]]] = []  # let go of graphs with its calls in them
        self._one_shots: list[OneShot] = []  # in such graphs, also closed ones: what was void stays so

    def why_not(self) -> str:
        """Why it cannot be started here; empty where it can."""
        torch = sys.modules.get("torch")
        if torch is None:
            return "import torch on this rank: a tensor of a GPU is the process's own torch's"
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            return f"install a torch with NCCL on this rank: torch {torch.__version__} here has none"
        return "" if torch.cuda.is_available() else "give this rank a GPU: its torch sees none"

    def place(self) -> str:
        """The GPU, as all processes of the machine name it."""
        properties = sys.modules["torch"].cuda.get_device_properties(self.device)
        return f"{properties.name} {getattr(properties, 'uuid', self.device)}"

    def reach(self) -> tuple[str, str]:
        """`why_not`, or the place."""
        if self._reach is None:
            why = self.why_not()
            self._reach = (why, "" if why else self.place())
        return self._reach

    def start(self, peers: Peers, size: int, until_s: float) -> None:
        """With all other ranks; connections are made with the first call."""
        finish_teardowns(until_s)
        self._group = self._made(size)

    def started(self) -> None:
        """By all ranks."""

    def run(self, peers: Peers, call: calls.Call) -> tuple[Copy, ...]:
        """Raises GroupBroken."""
        work = (lambda: self._enqueue(call)) if call.given.nbytes else None
        self._go(peers, (_ALL, True), work, call.until_s, is_waited=call.is_waited)
        return self._copies(call)

    def send(self, peers: Peers, tensor: Any, to: int, until_s: float, *, is_waited: bool) -> None:
        """A contiguous one, to a rank that takes it. Raises GroupBroken."""
        peers.look(until_s)  # the other has agreed, and a third one may be gone
        work = (lambda: self._live().send([_bytes_of(tensor)], to, 0).wait()) if tensor.numel() else None
        self._go(peers, (to, True), work, until_s, is_waited=is_waited)

    def receive(self, peers: Peers, tensor: Any, source: int, until_s: float, *, is_waited: bool) -> None:
        """Into a contiguous one, from a rank that sends as many bytes. Raises GroupBroken."""
        peers.look(until_s)
        work = (lambda: self._live().recv([_bytes_of(tensor)], source, 0).wait()) if tensor.numel() else None
        self._go(peers, (source, False), work, until_s, is_waited=is_waited)

    def _live(self) -> Any:
        """Raises RuntimeError once it was aborted, as another thread may do."""
        group = self._group
        if group is None:
            raise RuntimeError("a rank has gone")
        return group

    def _go(
        self,
        peers: Peers,
        way: tuple[int, bool],
        work: Callable[[], object] | None,
        until_s: float,
        *,
        is_waited: bool,
    ) -> None:
        """`work` enqueues; the first time by a way, with a rank or _ALL, it waits for those within. None: there is
        nothing to do. Raises GroupBroken."""
        try:
            if work is not None and way in self._connected:
                work()
            elif work is not None:
                self._in_thread(peers, work, until_s)
                self._connected.add(way)
            event = self._latest = self._recorded()
            if is_waited:
                self._wait_for(event, peers, until_s)
                self._open.pop(self._stream(), None)  # what was enqueued there before is done, too
            else:
                self._leave_open(event, peers, is_of_all=way[0] == _ALL)
        except RuntimeError as exc:  # torch's, and NCCL's
            raise self._failed(peers, exc) from exc

    def launch(self, peers: Peers, work: Callable[[], None], *, is_counted: bool = True) -> None:
        """What enqueues calls of all ranks by itself: a CUDA graph with them. `is_counted`: as one call. Raises
        GroupBroken."""
        try:
            try:
                work()
            except BaseException:  # what was enqueued until then may wait for a rank that does not come
                with contextlib.suppress(RuntimeError):
                    self._note(peers, is_counted=is_counted)
                raise
            self._note(peers, is_counted=is_counted)
        except RuntimeError as exc:  # such as of a graph that was destroyed a moment ago, since a rank has gone
            raise self._failed(peers, exc) from exc

    def _note(self, peers: Peers, *, is_counted: bool) -> None:
        self._latest = self._recorded()
        self._leave_open(self._latest, peers, is_of_all=is_counted)

    def hold(self, let_go: weakref.WeakMethod[Callable[[], None]]) -> None:
        """`let_go` destroys a graph with its calls, before which NCCL cannot be taken down."""
        self._held = [one for one in self._held if one() is not None] + [let_go]

    def release_by(self, one_shot: OneShot) -> None:
        """When a rank has gone, let the GPU go on past what that waits for."""
        self._one_shots.append(one_shot)

    def forget(self, one_shot: OneShot) -> None:
        """Its sums are nobody's. Its GPU, which may wait for what the other rank does not say, is let go on."""
        self._one_shots.remove(one_shot)
        self._releasing([one_shot])

    def is_done(self) -> bool:
        """Whether the GPU has done all that was launched. False where it tells an error."""
        return all(map(_has_ended_well, self._events()))

    def _events(self) -> list[Any]:
        """Behind all that may be under way, also once it was given up."""
        latest = [] if self._latest is None else [self._latest]
        return [*latest, *self._left, *(event for event, _ in list(self._open.values()))]

    def _leave_open(self, event: Any, peers: Peers, *, is_of_all: bool) -> None:
        stream, watch = self._stream(), self._watch
        _, count = self._open.get(stream, (None, 0))
        self._open[stream] = event, count + is_of_all
        if watch is not None and watch.is_over:
            watch.join()
            if watch.has_aborted:
                raise RuntimeError("a rank has gone")
            watch.close()
            watch = None
        self._watch = watch or Watch(peers.ends(), self._is_done, self._abort, peers.is_ending)

    def wait(self, peers: Peers, until_s: float) -> None:
        """Until the GPU has done all calls. Raises GroupBroken."""
        try:
            for event, _ in list(self._open.values()):
                self._wait_for(event, peers, until_s)
        except RuntimeError as exc:
            raise self._failed(peers, exc) from exc
        self._open.clear()

    def void(self) -> int:
        """Of how many calls that nobody has waited for there is no result, as they ended or will end with others."""
        has_aborted = (self._watch is not None and self._watch.has_aborted) or self._is_void()
        return sum(count for event, count in self._open.values() if has_aborted or not _has_ended_well(event))

    def drop(self) -> None:
        """End it: kernels that wait for other ranks, too."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._abort()
        self._let_go()
        self._left = self._events()
        self._open.clear()

    def close(self) -> None:
        """As `drop`, once the GPU has done what nobody has waited for."""
        end_s = time.monotonic() + START_S
        with contextlib.suppress(RuntimeError):
            while not self._is_done() and time.monotonic() < end_s:
                time.sleep(NAP_S)
        self.drop()
        finish_teardowns()

    def _wait_for(self, event: Any, peers: Peers, until_s: float) -> None:
        spin_s = time.monotonic() + SPIN_S
        try:
            while not event.query():
                peers.look(until_s)
                if time.monotonic() > spin_s:
                    time.sleep(NAP_S)
        except GroupBroken:  # a rank may have gone as soon as its own part was done
            end_s = time.monotonic() + GRACE_S
            while not event.query():
                if time.monotonic() > end_s:
                    raise
                time.sleep(NAP_S)
        if (self._watch is not None and self._watch.has_aborted) or self._is_void():
            peers.look(until_s)
            raise RuntimeError("a rank went while it ran")

    def _is_void(self) -> bool:
        """Whether a rank, which may live, has let its GPU go on past what it waited for, and so the others' too."""
        return any(one.is_void() for one in self._one_shots)

    def _in_thread(self, peers: Peers, work: Callable[[], object], until_s: float) -> None:
        """It may wait for other ranks in C++, while this thread sees whether they are there. Raises GroupBroken, and
        what the work raises."""
        ended: list[BaseException | None] = []
        stream, torch = self._stream(), sys.modules["torch"]
        is_inference = torch.is_inference_mode_enabled()  # of this thread: what it made nobody else writes
        reader, writer = os.pipe2(os.O_CLOEXEC)

        def run() -> None:
            try:
                with torch.inference_mode(is_inference), self._on(stream):
                    work()
                ended.append(None)
            except BaseException as exc:
                ended.append(exc)
            finally:
                os.close(writer)

        threading.Thread(target=run, name="nccl", daemon=True).start()
        try:
            peers.wait_for([reader], max(until_s, time.monotonic()))
        finally:
            os.close(reader)
        if ended[0] is not None:
            raise ended[0]

    def _failed(self, peers: Peers, exc: RuntimeError) -> LayerZeroError:
        """What has become of the group: another rank may know, whose end is what was met here."""
        known = peers.hear_fault(_BLAME_S)
        if known is not None:
            return known
        try:
            peers.look(math.inf)
        except GroupBroken as gone:
            return gone
        what: dict[str, Any] = {"group": peers.name, "generation": peers.generation, "doing": peers.doing}
        told = str(exc).partition("\n")[0]
        return faults.broken(faults.FAILED, f"nccl of rank {self._rank} failed: {told}", ranks=[self._rank], **what)

    def _is_done(self) -> bool:
        return all(event.query() for event, _ in list(self._open.values()))

    def _abort(self) -> None:
        """Until its kernels have ended, some milliseconds; by any thread. What else there is of it is taken down behind
        that, once its graphs are gone, which may go on for half a second: the next one that is started waits for that,
        and the end of the process."""
        releasing = self._releasing(self._one_shots)  # also of what was launched after another thread had aborted it
        group, self._group = self._group, None
        if group is None:
            return
        teardown = threading.Thread(target=_take_down, args=(group, self._path), name="nccl-teardown", daemon=True)
        _teardowns.append(teardown)
        teardown.start()
        if self._latest is None:  # its first call may be about to be enqueued
            teardown.join()
        end_s = time.monotonic() + ABORT_S
        with contextlib.suppress(RuntimeError):
            while teardown.is_alive() and (not releasing or time.monotonic() < end_s):
                if all(event.query() for event in self._events()):
                    break
                time.sleep(NAP_S)

    def _releasing(self, one_shots: list[OneShot]) -> list[threading.Thread]:
        """Who lets the GPU go on until it is through, however long something else keeps it."""

        def release() -> None:
            nap_s = NAP_S
            with contextlib.suppress(RuntimeError):
                while not all(event.query() for event in self._events()):
                    for one in list(one_shots):
                        one.release()
                    time.sleep(nap_s)
                    nap_s = min(1.01 * nap_s, MAX_NAP_S)

        threads = [threading.Thread(target=release, name="nccl-release", daemon=True)] if one_shots else []
        for thread in threads:
            thread.start()
        return threads

    def _let_go(self) -> None:
        """Destroy the graphs. By the thread that would launch them."""
        held, self._held = self._held, []
        for one in held:
            let_go = one()
            if let_go is not None:
                let_go()

    # --- torch's

    def _made(self, size: int) -> Any:
        from torch.distributed import FileStore, ProcessGroupNCCL

        store = FileStore(str(self._path), size)
        store.set_timeout(timedelta(seconds=START_S))
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # calls end by this process's deadline
        return ProcessGroupNCCL(store, self._rank, size, options)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        """A new tensor there. Raises OutOfMemory."""
        torch = sys.modules["torch"]
        try:
            return torch.empty(shape, dtype=getattr(torch, dtype), device=torch.device("cuda", self.device))
        except RuntimeError as exc:
            nbytes, told = math.prod(shape) * ITEMSIZE[dtype], str(exc).partition("\n")[0]
            text = f"free memory of GPU {self.device}, or pass out: {nbytes:,} bytes of a tensor: {told:.200}"
            raise OutOfMemory(text, nbytes=nbytes) from exc

    def _stream(self) -> Any:
        return sys.modules["torch"].cuda.current_stream(self.device)

    def _on(self, stream: Any) -> Any:
        return sys.modules["torch"].cuda.stream(stream)

    def _recorded(self) -> Any:
        event = sys.modules["torch"].cuda.Event()
        event.record(self._stream())
        return event

    def _enqueue(self, call: calls.Call) -> None:
        """On the current stream of this thread."""
        from torch.distributed import distributed_c10d as kinds

        group = self._live()
        x, out = call.given.keep.detach(), call.result.value.detach()
        if call.op.reduces:
            flat, result = x.reshape(-1), out.view(-1)
        else:
            flat, result = _bytes_of(x), _bytes_of(out)
        if call.op in (calls.ALL_REDUCE, calls.BROADCAST) and flat.data_ptr() != result.data_ptr():
            result.copy_(flat)
        match call.op.name:
            case "all_reduce":
                options = kinds.AllreduceOptions()
                options.reduceOp = _op(kinds, call.detail)
                group.allreduce([result], options).wait()
            case "reduce_scatter":
                options = kinds.ReduceScatterOptions()
                options.reduceOp = _op(kinds, call.detail)
                group._reduce_scatter_base(result, flat, options).wait()
            case "all_gather":
                group._allgather_base(result, flat, kinds.AllgatherOptions()).wait()
            case "all_to_all":
                group.alltoall_base(result, flat, [], [], kinds.AllToAllOptions()).wait()
            case "broadcast":
                options = kinds.BroadcastOptions()
                options.rootRank, options.rootTensor = call.detail, 0
                group.broadcast([result], options).wait()
        if call.op.reduces and call.detail == "mean":
            result /= call.size

    def add_up(self, x: Any) -> None:
        """Over all ranks, in place, of contiguous memory. While the current stream is captured."""
        from torch.distributed import distributed_c10d as kinds

        self._live().allreduce([x.view(-1)], kinds.AllreduceOptions()).wait()

    def gather(self, x: Any) -> Any:
        """Of all ranks, along the first dimension. While the current stream is captured."""
        from torch.distributed import distributed_c10d as kinds

        torch, group = sys.modules["torch"], self._live()
        size = group.size()
        out, x = x.new_empty((size * x.shape[0], *x.shape[1:])), x.contiguous()
        flat, result = (one.view(-1).view(torch.uint8) for one in (x, out))
        group._allgather_base(result, flat, kinds.AllgatherOptions()).wait()
        return out

    @staticmethod
    def _copies(call: calls.Call) -> tuple[Copy, ...]:
        is_copied = call.op in (calls.ALL_REDUCE, calls.BROADCAST) and call.result.value is not call.given.keep
        return (Copy("x", call.given.nbytes, "client", "nccl works in place"),) if is_copied else ()


def _end() -> None:
    """The process's: it may have heard of no death, and have graphs that NCCL's teardown waits for."""
    if any(teardown.is_alive() for teardown in _teardowns):
        for one in list(_made):
            one._let_go()
        finish_teardowns(time.monotonic() + _END_S)


atexit.register(_end)


def _take_down(group: Any, store: Path) -> None:
    try:
        with contextlib.suppress(RuntimeError):
            group.abort()
    finally:
        store.unlink(missing_ok=True)  # torch looks there until then


def _has_ended_well(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the GPU's, or a kernel's, which other ranks are to hear of
        return False


def finish_teardowns(until_s: float = math.inf) -> None:
    """Of what was aborted before, in this process."""
    for teardown in list(_teardowns):
        teardown.join(None if until_s == math.inf else max(until_s - time.monotonic(), 0.0))
        if not teardown.is_alive():
            with contextlib.suppress(ValueError):  # another thread has
                _teardowns.remove(teardown)


def current_device() -> int:
    """The GPU that torch makes tensors on where none is named; 0 where it sees none."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else 0


def _bytes_of(tensor: Any) -> Any:
    """Of a contiguous one: those of any dtype are sent alike."""
    return tensor.detach().reshape(-1).view(sys.modules["torch"].uint8)


def _op(kinds: Any, name: str) -> Any:
    ops = kinds.ReduceOp
    return {"sum": ops.SUM, "mean": ops.SUM, "prod": ops.PRODUCT, "min": ops.MIN, "max": ops.MAX}[name]
