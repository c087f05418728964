"""Which calls are lifted, and launching them: the broker is asked once for each call that settles, on a thread of its
own, and from then on no worker and no message has a part in it.

A lifted call holds as long as the GPU's page has the epoch that the broker named. In another one the call goes the
ordinary way, and the broker is asked again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from layerzero.client.connection import arena
from layerzero.client.connection.call import Request
from layerzero.client.connection.link import Link
from layerzero.client.gpu.calls import READ_EVERY, GpuCalls
from layerzero.client.gpu.device import Gpu
from layerzero.client.gpu.fastpath import MISS, learn
from layerzero.client.gpu.lifting.background import Background
from layerzero.client.gpu.lifting.compiled import compile_site, compiled_calls
from layerzero.client.gpu.lifting.faults import Faults
from layerzero.client.gpu.lifting.growth import Growth
from layerzero.client.gpu.lifting.here import LOOK_S, RETRY_S, Here, HereSite
from layerzero.client.gpu.lifting.keys import Key, addresses_of, described_key, key_of
from layerzero.client.gpu.lifting.lent import DESCRIBED, KINDS, Lent, unsupported
from layerzero.client.gpu.lifting.loaded import LoadedLift, fetch_from, load, load_form, relaxed
from layerzero.client.gpu.lifting.prefetch import Prefetch
from layerzero.client.gpu.lifting.scratch import ScratchRooms
from layerzero.client.gpu.lifting.sites import Asked, Caller, Given, Leave, Site, lent_by_torch
from layerzero.client.gpu.results import layout_of
from layerzero.client.gpu.session_view import Placed, SessionView
from layerzero.ipc.cuda.streams import PER_THREAD, stream_key
from layerzero.ipc.errors import (
    BackendError,
    BrokerLost,
    Busy,
    Cancelled,
    CudaError,
    InvalidArgument,
    LayerZeroError,
    NotConnected,
)
from layerzero.ipc.lifting.form import alignment_class
from layerzero.ipc.vocabulary.ops import OPS

MAX_KNOWN = 4096
ALONE_S = 120.0  # so long a call waits for the proof of an imported kernel when no worker can serve it
MAX_LATER_CALLS = 64  # until a call is asked for again that had too little evidence
LOAD_FAILED, NOT_LAUNCHED = "LOAD_FAILED", "NOT_LAUNCHED"  # beside LiftReason: found here


class Lifts:
    """Of one connection. Threads may share it. `known`: lifted calls by key; a number: calls to go until the broker is
    asked again."""

    def __init__(self, session: SessionView, link: Link, calls: GpuCalls) -> None:
        self._session, self._calls = session, calls
        self.known: dict[Key, Site | HereSite | int] = {}
        self._asked: dict[Key, Asked] = {}
        self.forgotten = 0  # how often all that was known was
        self._rooms: dict[str, ScratchRooms] = {}
        self._lock = threading.Lock()
        self._fetch = fetch_from(link)
        self._background, self._growth = Background(), Growth()
        self._prefetch = Prefetch(session.ask, self._hold_ahead)
        self._faults = Faults(session.ask, lambda: link.forks == arena.forks and link.is_alive)
        self._here = Here(session, self._faults, self._stop_here)
        self._learned: set[str] = set()  # kinds of arrays
        self._lent = Lent()
        self._is_unknown = self._is_closing = False  # lifting, to the broker; the session
        self._compiled = compiled_calls(self, calls.outcomes.failed, calls.run_again, session.last)
        self.run_again = calls.run_again  # until there are lifted calls

    # --- a call that was made before

    def run(self, request: Request, start_ns: int) -> Any:
        """The result of a call that is lifted; of others what `GpuCalls.run_again` gives. `run_again` is this, in C
        where that was compiled."""
        result = self._run(request, start_ns)
        return self._calls.run_again(request, start_ns) if result is MISS else result

    run_otherwise = run  # by which the C hands over

    def _run(self, request: Request, start_ns: int) -> Any:
        if self._is_closing:
            return MISS
        try:
            key = self._key(request)
            if key is None or key not in self.known:
                return MISS
        except (TypeError, RuntimeError):  # what cannot be hashed, a tensor without memory: what checks it names it
            return MISS
        found = self._usable(key)
        if found is None:
            return MISS
        site, gpu, caller = found, found.gpu, found.asked.caller
        stream = caller.stream()
        self._calls.glance(gpu, stream, READ_EVERY)
        *inputs, out_at = addresses_of(request)
        context = gpu.memory.context
        is_pushed = not caller.is_here()
        if is_pushed:
            context.__enter__()
        try:
            result, result_at = request.out, out_at
            if request.out is None and caller.make is not None:
                with relaxed(gpu.memory):
                    result, result_at = caller.make(request.args[0])
            memory = site.tensors.memory(inputs, result_at)
            return result if self._launch(site, memory, stream, start_ns) else MISS
        finally:
            if is_pushed:
                context.__exit__()

    def _key(self, request: Request) -> Key | None:
        return key_of(request) if self._compiled is None else self._compiled.key(request)

    def _usable(self, key: Key) -> Site | HereSite | None:
        """The call that may be launched now; of another one it is counted that it was made."""
        found = self.known.get(key)
        if isinstance(found, int):
            self.known[key] = found - 1
            if found <= 1:
                self.count_down(key)
        elif found is not None and found.gpu.order.page.lift_epoch != found.epoch:
            self.renew(key, found)
        return self._held(key)

    def count_down(self, key: Key) -> None:
        """There may be more evidence by now for a call that was not lifted."""
        self._ask_again(key, self.known.pop(key, None))

    def renew(self, key: Key, site: Site | HereSite) -> None:
        """What was allowed in an earlier epoch is allowed no longer."""
        if self.known.get(key) is site:
            self._ask_again(key, self.known.pop(key, None))

    def look(self, gpu: Gpu) -> None:
        """Raises the error of a call that failed after it had returned."""
        self._calls.look(gpu)

    # --- a call that is new

    def serve(self, call: Placed, *, waits: bool = False) -> bool:
        """Launch a call, if it is lifted; says whether it was. One that is new is asked for, so that later ones are: at
        once where its route is new, too, since the broker may have it from earlier processes. `waits`: so is one whose
        leave has ended.

        Raises what launching ends in. Needs the GPU's context to be current.
        """
        results = call.route.plan.results
        if self._is_unknown or self._is_closing or any(not spec.numel for spec in results):
            return False
        if call.like.kind not in KINDS:
            call.route.not_lifted = unsupported(call.like.kind)
            return False
        if any(array is not None and array.needs_copy for array in call.arrays):
            return False
        is_described = call.like.kind == DESCRIBED
        if self._compiled is not None and not is_described and call.like.kind not in self._learned:
            learn(self._compiled, call.like)
            self._learned.add(call.like.kind)
        key = described_key(call.request, call.arrays) if is_described else self._key(call.request)
        if key is None or not call.has_its_policy:
            return False
        if is_described:  # else counted by `run`, which does not know such calls
            self._usable(key)
        asked = self._asked.get(key)
        if asked is not None and asked.route is not call.route and self._held(key) is None:
            self._asked.pop(key, None)  # it was held ahead, or its route is of old: the broker knows the call's own
            asked = None
        if asked is None:
            self._begin(key, call)
        elif asked.refused_at not in (None, asked.gpu.order.page.lift_epoch):
            if asked.is_alone:
                asked.refused_at = None
            else:
                self._ask_again(key, asked)
        site = self._held(key)
        if site is None and asked is not None and asked.is_alone and asked.refused_at is None:
            self._ask_patiently(asked)
            site = self._held(key)
        if site is None and waits and asked is not None:
            self._ask_once(asked)
            site = self._held(key)
        if site is None:
            return False
        inputs = [0 if array is None else array.address for array in call.arrays]
        is_done = self._launch(site, site.tensors.memory(inputs, call.address), call.stream, call.start_ns)
        if is_done and is_described:
            self._lent.keep(call.gpu, call.stream, call.arrays)
        return is_done

    def _held(self, key: Key) -> Site | HereSite | None:
        """The call that may be launched now."""
        site = self.known.get(key)
        return site if site and not isinstance(site, int) and site.gpu.order.page.lift_epoch == site.epoch else None

    def _begin(self, key: Key, call: Placed) -> None:
        plan, op = call.route.plan, OPS[call.request.op]
        inputs = [0 if array is None else alignment_class(array.address) for array in call.arrays]
        outputs = [inputs[op.inputs.index(name)] for name in op.in_place] or [
            alignment_class(call.address + at) for at in layout_of(tuple(plan.outputs)).offsets
        ]
        caller = Caller.of(call.like, call.gpu, plan.results)
        has_out, backend = call.out is not None, call.request.backend
        asked = Asked(key, call.route, call.gpu, caller, has_out, inputs + outputs, backend, given=Given.of(call))
        with self._lock:
            if len(self._asked) >= MAX_KNOWN:
                self._asked.clear()
                self.known.clear()
                self.forgotten += 1
            if self._asked.setdefault(key, asked) is not asked:
                return  # another thread's
        if call.like.kind == DESCRIBED or call.route.beside:
            asked.not_here_until_s = math.inf  # libraries in this process go by streams that are shown
        asked.is_waiting = True
        self._growth.note(asked)
        self._look_ahead(asked)
        again_s = 0.0 if call.route.is_armed else self._ask(asked)
        if asked.is_alone and again_s is not None:
            again_s = self._ask_patiently(asked)
        if again_s is not None:
            self._background.put(call.gpu.memory.context.driver, partial(self._ask, asked), again_s)

    def _ask_patiently(self, asked: Asked) -> float | None:
        """As `_ask`, until the broker knows: no worker can serve the call meanwhile."""
        due_s = time.monotonic() + ALONE_S
        while True:
            again_s = self._ask(asked)
            if again_s is None or time.monotonic() >= due_s:
                return again_s
            time.sleep(again_s)

    def _ask_again(self, key: Key, was: object) -> None:
        asked = self._asked.get(key)
        if asked is None or was is None:
            return
        if asked.is_ahead:  # the broker does not know its route: the next call tells it
            self._asked.pop(key, None)
            return
        with self._lock:
            if asked.is_waiting:
                asked.is_overtaken = True
                return
            asked.is_waiting, asked.refused_at = True, None
        self._background.put(asked.gpu.memory.context.driver, partial(self._ask, asked))

    def _ask(self, asked: Asked) -> float | None:
        """In how many seconds to ask again; None: not of its own accord."""
        again_s = None
        try:
            if asked.is_probed is not None and not asked.is_probed() and not self._is_closing:
                again_s = LOOK_S
            elif not (self._is_closing or self._is_unknown):
                again_s = self._ask_once(asked)
        finally:
            with self._lock:
                if asked.is_overtaken:
                    asked.is_overtaken, again_s = False, again_s or 0.0
                asked.is_waiting = again_s is not None
        return again_s

    def _ask_once(self, asked: Asked) -> float | None:
        epoch = asked.gpu.order.page.lift_epoch  # what is answered may change before it is here
        try:
            answer = self._question(asked, here=time.monotonic() >= asked.not_here_until_s)
        except InvalidArgument as exc:  # a broker of an earlier version, or a function's own
            self._is_unknown |= asked.is_unknown(exc)
            return None
        except (Busy, NotConnected, BrokerLost, Cancelled) as exc:
            return asked.pause() if isinstance(exc, Busy) else None
        try:
            return self._take(asked, answer, epoch)
        except Busy:
            return asked.pause()
        except (NotConnected, BrokerLost, Cancelled):
            return None
        except CudaError as exc:
            if exc.is_sticky:
                self._faults.tell(asked.gpu)
            self._refuse(asked, f"{LOAD_FAILED}: {exc.message}", epoch)
        except (LayerZeroError, KeyError, TypeError, ValueError, AttributeError) as exc:
            self._refuse(asked, f"{LOAD_FAILED}: {type(exc).__name__}: {exc}"[:500], epoch)
        return None

    def _question(self, asked: Asked, *, here: bool) -> Mapping[str, Any]:
        """`here`: whether its provider may be able to run it in this process."""
        answer = self._session.ask("lift", **asked.question, here=here)
        if here and answer["state"] != "here" and not answer.get("here"):
            asked.route.stays_out = ""  # nobody wants it here
        return answer  # type: ignore[no-any-return]

    def _take(self, asked: Asked, answer: Mapping[str, Any], asked_in: int) -> float | None:
        state, gpu = answer["state"], asked.gpu
        asked.is_alone = asked.is_alone or answer.get("alone") is True
        if state == "pending":
            return asked.pause()
        if state == "later":
            asked.route.awaits = why = str(answer.get("why", ""))[:500]
            if answer.get("here"):
                asked.stay_out(answer["backend"], f"no leave yet: {why}")
            self._remember(asked, asked.later_calls)
            asked.later_calls = min(2 * asked.later_calls, MAX_LATER_CALLS)
        elif state == "refused":
            why, is_here = f"{answer['reason']}: {answer['detail']}", answer.get("here")
            self._refuse(asked, "" if is_here else why, asked_in)
            if is_here:
                asked.stay_out(answer["backend"], why)
        elif state == "here":
            return self._take_here(asked, answer, asked_in)
        elif state == "ready":
            leave = Leave.of(answer)
            if gpu.order.page.lift_epoch != leave.epoch:
                return asked.pause()  # it has changed since
            self._hold(asked, load(gpu.memory, str(answer["digest"]), self._fetch), leave)
        else:
            raise ValueError(f"the broker answers {state!r:.40}")
        return None

    def _take_here(self, asked: Asked, answer: Mapping[str, Any], asked_in: int) -> float | None:
        """Its provider may run it in this process; where that cannot, it may be lifted."""
        asked.is_probed = None
        site = self._here.site(asked, answer)
        if isinstance(site, HereSite):
            if asked.gpu.order.page.lift_epoch != site.epoch:
                return asked.pause()
            asked.route.not_lifted = asked.route.stays_out = ""
            self._faults.watch(asked.gpu)
            self._remember(asked, site)
            return None
        asked.route.stays_out = site.why
        again_s = self._take(asked, self._question(asked, here=False), asked_in)
        if site.is_final:
            return again_s
        asked.is_probed = partial(self._session.local.is_settled, str(answer["backend"]), asked.gpu.uuid)
        return LOOK_S

    def _stop_here(self, asked: Asked) -> None:
        """Its provider has failed in this process."""
        asked.not_here_until_s = time.monotonic() + RETRY_S
        with self._lock:
            self.known.pop(asked.key, None)
            if asked.is_waiting:
                asked.is_overtaken = True
                return
            asked.is_waiting = True
        self._background.put(asked.gpu.memory.context.driver, partial(self._ask, asked), RETRY_S)

    def _hold(self, asked: Asked, loaded: LoadedLift, leave: Leave) -> None:
        """Launch these calls from now on, as long as the page has the epoch."""
        site = self._site(asked, loaded, leave)
        asked.route.not_lifted = ""
        self._faults.watch(asked.gpu)
        self._remember(asked, site)
        self._growth.note_lifted(asked)
        self._look_ahead(asked)

    def _site(self, asked: Asked, loaded: LoadedLift, leave: Leave, *, is_ahead: bool = False) -> Site:
        with self._lock:
            if asked.gpu.uuid not in self._rooms:
                self._rooms[asked.gpu.uuid] = ScratchRooms(asked.gpu.memory)
        site = Site.of(asked, loaded, leave, self._rooms[asked.gpu.uuid])
        site.is_ahead = is_ahead
        if self._compiled is not None and asked.caller.kind != DESCRIBED:
            site.compiled = compile_site(site)
        return site

    def _look_ahead(self, asked: Asked) -> None:
        """Where calls grow, the next ones are held before they come."""
        ahead = self._growth.due(asked)
        if ahead is not None:
            loads = partial(load_form, asked.gpu.memory, self._fetch)
            self._background.put(asked.gpu.memory.context.driver, self._prefetch.work(ahead, loads))

    def _hold_ahead(self, asked: Asked, loaded: LoadedLift, leave: Leave) -> None:
        """As `_hold`, of a call that was not made yet."""
        if leave.epoch != asked.gpu.order.page.lift_epoch:
            return
        site = self._site(asked, loaded, leave, is_ahead=True)
        with self._lock:
            if len(self._asked) < MAX_KNOWN and self._asked.setdefault(asked.key, asked) is asked:
                self.known[asked.key] = site

    def arrive(self, site: Site) -> None:
        """The first call of those that are launched at this site, which was held ahead, has been made."""
        with self._lock:
            is_first, site.is_ahead = site.is_ahead, False
        if is_first:
            self._growth.note(site.asked)
            self._look_ahead(site.asked)

    def _remember(self, asked: Asked, found: Site | HereSite | int) -> None:
        with self._lock:
            if self._asked.get(asked.key) is asked:
                self.known[asked.key] = found
                self.run_again = self.run if self._compiled is None else self._compiled.run

    def _refuse(self, asked: Asked, why: str, epoch: int) -> None:
        self.known.pop(asked.key, None)
        if not self._is_closing:
            asked.refused_at, asked.route.not_lifted = epoch, why

    # --- launching, in Python. The GPU's context is current.

    def _launch(self, site: Site | HereSite, memory: Sequence[int], stream: int, start_ns: int) -> bool:
        """False: nothing of it is to be waited for, and the call goes the ordinary way."""
        if not site.may_lie(memory):
            return False
        if isinstance(site, HereSite):
            if stream == PER_THREAD:  # what a library keeps for a stream is one thread's
                return False
            is_captured = site.driver.is_capturing(stream)
            if is_captured and not (site.is_graph_safe and site.runner.has_run):
                return False
            if not self._note(site, stream, is_captured=is_captured):
                return False
            return self._here.run(site, memory, stream, start_ns, is_captured=is_captured)
        (offsets, nbytes), rooms, key = site.loaded.scratch, site.rooms, stream_key(stream)
        is_captured, base, lent = site.driver.is_capturing(stream), 0, None
        try:
            if nbytes and not is_captured:
                base = rooms.take(key, stream, nbytes)
            elif nbytes and site.asked.caller.kind == "torch":  # of the graph's own memory, as torch's own kernels have
                lent, base = lent_by_torch(site, nbytes)
            elif nbytes:
                base = rooms.captured(site.driver.capture_id(stream), stream, nbytes)
        except CudaError as exc:
            if not exc.is_out_of_memory:
                raise self._failure(site, exc, is_captured=is_captured) from exc
            return False
        failed: CudaError | None = None
        try:
            if not self._note(site, stream, is_captured=is_captured):
                return False
            site.launch(memory, [base + offset for offset in offsets], stream)
        except CudaError as exc:
            failed = exc
        finally:
            if nbytes and not is_captured:
                rooms.release(key)
        if failed is not None:
            raise self._failure(site, failed, is_captured=is_captured) from failed
        del lent  # its allocator has it back, for what the stream does later
        self._session.last.record = site.record(start_ns, time.perf_counter_ns())
        if site.is_ahead:
            self.arrive(site)
        return True

    def _note(self, site: Site | HereSite, stream: int, *, is_captured: bool) -> bool:
        """Whether it may be launched now. The page says so before it is."""
        gpu = site.gpu
        with gpu.lock:
            if self._is_closing or gpu.order.page.lift_epoch != site.epoch:
                return False
            try:
                timeline = gpu.order.take_timeline(stream)
            except Busy:
                return False
            gpu.order.page.note_lifted(timeline, site.number)
        if is_captured:
            self._faults.note_captured(gpu, site.number)
        return True

    def fail(self, site: Site, number: int, step: int) -> NoReturn:
        """Raises what the driver's error at a step is to the caller; for the C."""
        exc = site.error_at(step, number)
        raise self._failure(site, exc, is_captured=False) from exc

    def _failure(self, site: Site, exc: CudaError, *, is_captured: bool) -> BackendError:
        if exc.is_sticky:
            self._faults.tell(site.gpu)
        elif not is_captured:  # another may have broken the capture
            self._refuse(site.asked, f"{NOT_LAUNCHED}: {exc.message}", site.gpu.order.page.lift_epoch)
        error = site.failure(exc)
        self._session.note(error.report)
        return error

    # --- the end

    def finish(self) -> None:
        """Before the link is closed. Nothing is launched any more; a GPU that is lost is told of."""
        self._is_closing = True
        self._background.end()
        if self._compiled is not None:
            self._compiled.close()
        self._faults.look()

    def close(self) -> None:
        """The link must have been closed, and the GPUs not."""
        self._background.join()
        self._lent.close()
        self.known.clear()
        self._asked.clear()
        for rooms in self._rooms.values():
            rooms.close()
