"""Which calls clients may launch themselves: those whose kernel was lifted by its worker, proved in a process of its
own, and never at fault. Decides no kernel: it follows the ranking, and the word of the epoch takes leave back."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.core.leases import SETTLED_CALLS
from layerzero.broker.core.model import Client, Route
from layerzero.broker.core.state import BrokerState
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.io.peers import Peer
from layerzero.broker.io.timeline_pages import TimelinePages
from layerzero.broker.io.worker_links import WorkerLinks
from layerzero.broker.lifting import answers, functions, here
from layerzero.broker.lifting.answers import bytes_of, is_digest, later, reason_of, refused, specimen_of
from layerzero.broker.lifting.grown import grown, numbers_of
from layerzero.broker.lifting.imported import ImportedCalls
from layerzero.broker.lifting.known import Known, asked_of, forget_due, what_of
from layerzero.broker.lifting.proofs import Proofs
from layerzero.broker.lifting.shown import Shown
from layerzero.broker.lifting.spared import Spared
from layerzero.broker.lifting.staying import not_now, refused_by_policy
from layerzero.broker.lifting.store import SUSPICION, Entry, LiftStore
from layerzero.broker.lifting.switches import Switches
from layerzero.broker.processes.imported import ImportedBackend
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.broker.storage.perf_rows import Identity
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.reasons import Reason
from layerzero.envs.lifted.imports import ImportedCall
from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError
from layerzero.ipc.lifting.form import Lifted as LiftedCall
from layerzero.ipc.lifting.keys import call_key
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.logs import log
from layerzero.ipc.transport import control, unwanted
from layerzero.ipc.transport.messages import GetLifted, Lift, Lifted, Refused

MAX_KNOWN = 4096
_LIFTED = ("lifted", "auto")  # values of backend_isolation
_WORKER_IS_GONE = (Reason.BACKEND_RESTARTING, Reason.BACKEND_DISABLED, Reason.LIFTED_ONLY)
WORKER_S = 60.0  # a worker that has not answered by then has other things to do
RETRY_S, MAX_RETRIES = 30.0, 4  # when what came too late is tried again, doubling; how often


class Lifts:
    """For the broker's own thread. `wake_up` is called from others, and makes the loop call `take_proved`."""

    def __init__(
        self,
        state: BrokerState,
        identities: Mapping[str, Identity],
        links: WorkerLinks,
        pages: TimelinePages,
        store: LiftStore,
        wake_up: Callable[[], None],
        handle: Callable[[ev.Event], None],
        *,
        imported: Mapping[str, ImportedBackend] = MappingProxyType({}),
        outsiders: Collection[str] = (),
        rest_s: float = 60.0,
    ) -> None:
        """`handle` takes what the core must hear. `imported`: backends that have no environment here. `outsiders`:
        those that did not come with LayerZero, and are not the operator's own. `rest_s`: as in the settings."""
        self._state, self._identities, self._links, self._pages = state, identities, links, pages
        self.store, self._handle = store, handle
        self.switches = Switches(store.folder.parent / "gpus" / "switches.json", state.engine)
        self._imports = state.engine.lifted = ImportedCalls(state, imported, store, self._what)
        self._outsiders = frozenset(outsiders)
        self._spared = Spared(state, handle, rest_s)
        self._proofs = Proofs(wake_up)
        self._known: dict[str, Known] = {}
        self._asked: dict[int, Known] = {}  # by number: workers and proofs are at it
        self._by_digest: dict[str, bytes] = {}  # forms that were granted
        self._shown, self._functions = Shown(), functions.LiftedFunctions()
        self._ahead: dict[Hashable, tuple[object, CallSpec, Known]] = {}  # of `ask_ahead`, as long as rankings stay
        self._numbers = itertools.count(1)
        self._seen: tuple[object, ...] = ()

    # --- what clients ask ------------------------------------------------------------------------------

    def ask(self, identity: bytes, params: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a route's calls are lifted, for tensors of these alignments, or run by their provider in the client's
        process, where it can do that (`here`); of a function's route, one `call`. Starts what is missing. Raises
        InvalidArgument."""
        client, route, alignments = asked_of(self._state.clients.get(identity), params)
        spec, signature = route.signature.spec, route.signature
        best = self._best(spec, signature.context, alignments)
        policy = self._state.engine.policy_for(spec)
        if params.get("here") is True and best is not None and here.is_wanted(policy, best):
            return self._answer_here(client, route, best, alignments)
        refusal = self._refusal(spec, best)
        if best is None or refusal is not None:
            return refusal or later(answers.NO_KERNEL)
        worker = self._state.workers[best.backend]
        lifted = self._functions.told_call(spec, params, worker)
        if refusal := self._functions.refusal(lifted, worker, self._asked.values()):
            return refusal
        known = self._find(lifted, best, alignments)
        if known.entry is None and known.number not in self._asked:
            self._start_for(known, route, best, lifted, alignments)
        answer = self._answer(client, known, spec)
        if known.imported is not None and self._is_alone(spec, signature.context):
            answer["alone"] = True
        return answer

    def ask_ahead(self, identity: bytes, params: Mapping[str, Any]) -> Generator[None, None, dict[str, Any]]:
        """The answers to `ask` for the next calls of a route whose tensors grow, `calls`: the n-th has n times `grows`
        added to them, [shape, strides] of each input and output. What is missing is started, as the route itself is
        lifted. Raises InvalidArgument."""
        client, route, alignments = asked_of(self._state.clients.get(identity), params)
        numbers, grows, with_forms = numbers_of(params), params.get("grows"), params.get("forms") is True
        base = route.signature.spec
        best = self._best(base, route.signature.context, alignments)
        found: list[dict[str, Any]] = []
        own = None if best is None else self._find(base, best, alignments)
        if best is None or own is None or own.entry is None or not own.entry.form:
            return {"calls": found}
        if not self._shown.has(own.family):  # it is from the store
            self._shown.add(own.family, LiftedCall.unpack(own.entry.form))
        family = (client.number, route.number, tuple(alignments), repr(grows))
        for n in numbers:
            yield
            engine = self._state.engine
            ranked_in = (engine.epoch, engine.policy.hash, tuple(sorted(self._state.unavailable)))
            seen_in, spec, known = self._ahead.get((family, n), (None, base, None))
            if known is not None and seen_in == ranked_in and (known.entry is not None or known.number in self._asked):
                found.append(self._answer(client, known, spec, with_form=with_forms))
                continue
            try:
                spec = grown(base, grows, n)
                context = self._state.engine.context(spec)
            except LayerZeroError as exc:
                raise InvalidArgument(f"lift_ahead: {exc.message}") from exc
            its = self._best(spec, context, alignments)
            refusal = self._refusal(spec, its)
            if its is None or refusal is not None:
                found.append(refusal or later(answers.NO_KERNEL))
                continue
            known = self._find(spec, its, alignments)
            if known.entry is None and known.number not in self._asked and its.kernel_id == best.kernel_id:
                if known.imported is not None:
                    self._try(known, known.imported)
                else:
                    known.is_compared = True
                    self._start(known, spec, alignments)
            if len(self._ahead) >= MAX_KNOWN:
                self._ahead.clear()
            self._ahead[family, n] = ranked_in, spec, known
            found.append(self._answer(client, known, spec, with_form=with_forms))
        return {"calls": found}

    def _answer(self, client: Client, known: Known, spec: CallSpec, *, with_form: bool = False) -> dict[str, Any]:
        if fault := SUSPICION if self.store.is_suspect(known.lasting_key) else self.store.fault_of(known.what):
            return refused(LiftReason.FAULTED, fault)
        if known.number in self._asked:
            return {"state": "pending"}
        if known.entry is None:
            return later(
                f"{known.kernel_id} has served too few of these calls in a row, or {known.backend} is not ready"
            )
        if not known.entry.form:
            return {"state": "refused", "reason": known.entry.reason, "detail": known.entry.detail}
        held = self._pages.get(client.number, spec.device)
        if held is None:
            return later(answers.NO_PAGE)
        known.granted[spec.device] = spec
        known.codes = known.codes or LiftedCall.unpack(known.entry.form).codes
        digest = known.entry.digest
        if self._by_digest.pop(digest, None) is None and len(self._by_digest) >= MAX_KNOWN:
            del self._by_digest[next(iter(self._by_digest))]
        self._by_digest[digest] = known.entry.form
        epoch = held.page.lift_epoch
        ready = {"state": "ready", "number": known.number, "backend": known.backend, "digest": digest, "epoch": epoch}
        return {**ready, "form": known.entry.form} if with_form else ready

    def _answer_here(self, client: Client, route: Route, best: Verdict, alignments: list[int]) -> dict[str, Any]:
        """Leave to run the kernel's provider in the caller's process, as long as the page has the epoch."""
        spec = route.signature.spec
        refusal, held = self._refusal(spec, best, here.VALUES), self._pages.get(client.number, spec.device)
        if refusal is not None or held is None:
            return {**(refusal or later(answers.NO_PAGE)), "here": True, "backend": best.backend}
        known = self._find(spec, best, alignments)
        if self.store.is_suspect(known.key):
            return {**refused(LiftReason.FAULTED, SUSPICION), "here": True, "backend": best.backend}
        known.granted_here[spec.device], known.was_here = spec, True
        here.note_grant(route, best.kernel_id, time.monotonic())
        return here.leave(known.number, self._state.engine.kernel(best.kernel_id), best.backend, held.page.lift_epoch)

    def _best(self, spec: CallSpec, context: SelectionContext, alignments: Sequence[int]) -> Verdict | None:
        """What serves the call, counting backends whose worker is just not running, has died too often, or never was
        here: a lifted call needs none."""
        unavailable = {name: why for name, why in self._state.unavailable.items() if why.code not in _WORKER_IS_GONE}
        for verdict in self._state.engine.rank(spec, context, unavailable, time.monotonic()):
            if not verdict.is_accepted:
                break
            imported = self._imports.find(verdict.kernel_id, verdict.backend, spec, alignments)
            if not verdict.is_lifted_only or imported is not None:
                return verdict
        return None

    def _is_alone(self, spec: CallSpec, context: SelectionContext) -> bool:
        """No worker can serve the call: who asks waits for a proof, as there is nothing else to do."""
        ranked = self._state.engine.rank(spec, context, self._state.unavailable, time.monotonic())
        return not any({reason.code for reason in v.reasons} <= {Reason.BACKEND_RESTARTING} for v in ranked)

    def _refusal(
        self, spec: CallSpec, best: Verdict | None, allowed: Collection[str] = _LIFTED
    ) -> dict[str, Any] | None:
        """Why this kernel stays in its worker; "later" where that may change by itself."""
        engine = self._state.engine
        policy = engine.policy_for(spec)
        if not spec.device:
            return refused(LiftReason.NOT_ALLOWED, "it runs on the CPU")
        if best is None or best.backend not in self._identities:
            return later(answers.NO_KERNEL)
        if self._state.workers[best.backend].is_joined:
            return refused(LiftReason.NOT_ALLOWED, f"the worker of {best.backend} is self-registered")
        if refusal := refused_by_policy(policy, best, allowed, is_outsider=best.backend in self._outsiders):
            return refusal
        if fault := self.store.fault_of(self._what(spec, best.kernel_id, best.backend)):
            return refused(LiftReason.FAULTED, fault)
        return not_now(policy, best, is_tuned=engine.policy.tune_budget > 0)

    def _find(self, spec: CallSpec, best: Verdict, alignments: list[int]) -> Known:
        what = self._what(spec, best.kernel_id, best.backend)
        key = call_key(spec, alignments, what)
        known, imported = self._known.get(key), self._imports.find(best.kernel_id, best.backend, spec, alignments)
        if known is None or known.imported != imported:
            if len(self._known) >= MAX_KNOWN:
                if functions.have_leave(self._known.values()):  # it ends with a process, which is seen of these alone
                    self.take_back()
                self._known = {one.key: one for one in self._known.values() if one.number in self._asked}
            its = (best.kernel_id, best.backend, what, tuple(alignments), self._state.workers[best.backend].generation)
            self._known[key] = known = Known(next(self._numbers) & 0xFFFF_FFFF, key, spec, *its)
            known.imported, entry = imported, self.store.find(key)
            if entry is not None and entry.imported == ("" if imported is None else imported.file):
                known.entry = entry
                if entry.reason and imported is None:
                    self._note_staying(known, entry.reason)
        return known

    def _what(self, spec: CallSpec, kernel_id: str, backend: str) -> dict[str, str]:
        """All that the machine code depends on besides the call."""
        device = self._state.engine.devices[spec.device].device_name
        return what_of(kernel_id, backend, device, self._identities.get(backend), spec)

    def _start_for(self, known: Known, route: Route, best: Verdict, spec: CallSpec, alignments: list[int]) -> None:
        """As `_start`, if its worker has answered the route's last calls. What was imported is tried at once."""
        if known.imported is not None:
            self._try(known, known.imported)
            return
        worker = self._state.workers[best.backend]
        if route.settled >= SETTLED_CALLS and route.settled_on == (best.kernel_id, worker.generation):
            # On other shapes it may be the same, but for functions, of which a family has many.
            known.is_compared = self._shown.has(known.family) and not functions.is_function(spec)
            self._start(known, spec, alignments)

    def _start(self, known: Known, spec: CallSpec, alignments: list[int]) -> None:
        """Have its worker lift it."""
        worker = self._state.workers[known.backend]
        if worker.is_joined or worker.state is not WorkerState.READY:
            return
        known.generation, known.asked_s, known.is_answered = worker.generation, time.monotonic(), False
        known.begun_s = math.inf
        self._asked[known.number] = known
        is_safe, repeats = functions.traits(spec, self._state.engine.kernel(known.kernel_id))
        call, seeds = spec.prepare(known.kernel_id, is_graph_safe=is_safe), list(known.seeds)
        message = Lift(number=known.number, call=call, alignments=alignments, seeds=seeds, is_repeatable=repeats)
        self._links.tell(known.backend, worker.generation, message)

    def _try(self, known: Known, call: ImportedCall) -> None:
        """Show that an imported call works here, too."""
        self._asked[known.number] = known
        try:
            _, proof = self._imports.specimen(known.backend, call)
        except InvalidArgument as exc:
            self._refuse(known, LiftReason.IMPORT_DAMAGED, exc.message)
            return
        self._proofs.start(known.number, known.spec.device, proof.pack())

    def give(self, peer: Peer, message: GetLifted) -> None:
        """Hand over a form that was granted, or machine code."""
        data = self._by_digest.get(message.digest) or (
            self.store.code(message.digest) if is_digest(message.digest) else None
        )
        if not data:  # nothing is wrong with the client: it goes on without this
            self._note_missing(message.digest)
            text = f"no lifted call or machine code is known as {message.digest!r:.80}"
            control.send(peer.sock, Refused(error=InvalidArgument(text).to_wire()))
            return
        answers.give(peer, message.digest, data)

    def _note_missing(self, code: str) -> None:
        """Machine code is not in the store any more, or does not hold: what needs it is to be lifted anew."""
        lost = [known for known in self._known.values() if code in known.codes]
        for known in lost:
            del self._known[known.key]
            self.store.remove(known.key)
        if lost:
            self.take_back()

    def note_fault(self, identity: bytes, params: Mapping[str, Any]) -> dict[str, Any]:
        """A client has lost its GPU; these were the last that it launched there. They run in their workers from now on,
        also in later brokers, until `lz cache forgive`."""
        numbers = answers.numbers_in(params)
        if identity not in self._state.clients:
            return {"kernels": []}
        found = [one for one in self._known.values() if one.number in numbers and (one.entry or one.was_here)]
        for known in found:
            self.store.note_fault(known.what, "a process that had just launched it lost its GPU; lz cache forgive")
            log("lifted.faulted", kernel=known.kernel_id, number=known.number)
        if found:
            self.take_back()
        return {"kernels": sorted({known.kernel_id for known in found})}

    def on_client_left(self, client: int) -> None:
        """To be called while its pages are here. One that closes its session clears what it launched last."""
        launched = self._pages.last_lifted(client)
        for known in self._known.values() if launched else ():
            if known.number in launched and not self.store.fault_of(known.what):
                self.store.note_suspect(known.lasting_key, known.what)
                log("lifted.suspect", kernel=known.kernel_id, number=known.number, client=client)

    # --- what workers and proofs say ---------------------------------------------------------------------

    def take(self, peer: Peer, message: Lifted, fds: list[int]) -> None:
        """A worker's answer. Raises ProtocolError."""
        try:
            if self._functions.have_changed(peer.backend, message):
                self.take_back()
                return
            if self._functions.has_begun(peer.backend, peer.generation, message, self._asked.values()):
                return
            known = self._asked.get(message.number)
            if known is None or (known.backend, known.generation) != (peer.backend, peer.generation):
                return  # it took too long
            if self._proofs.has(known.number):
                return  # it has answered already
            known.is_answered = True
            if message.reason:
                self._refuse(known, reason_of(message.reason), message.detail[:2000])
                return
            if len(fds) != 1:
                raise ProtocolError(f"lifted carries one descriptor, got {len(fds)}")
            data = bytes_of(fds[0])
            _, is_repeatable = functions.traits(known.spec, self._state.engine.kernel(known.kernel_id))
            specimen = specimen_of(known, data, is_repeatable=is_repeatable)
            if self._is_like_another(known, specimen):
                return
            if known.is_compared:
                self._start_anew(known, specimen.lifted)
            else:
                known.tried = specimen.lifted
                self._proofs.start(known.number, known.spec.device, data)
        except ProtocolError as exc:
            self._asked.pop(message.number, None)
            what = known.kernel_id if known else "a call"
            raise ProtocolError(f"{what} was lifted in a way that is none: {exc}") from exc
        finally:
            unwanted.close_all(fds)

    def _is_like_another(self, known: Known, specimen: Specimen) -> bool:
        """Whether it needs no proof of its own: it is kept where one that it is like was proved, and waits where one is
        being proved."""
        has_code = bool(specimen.codes) or self.store.has(specimen.lifted.codes)
        if has_code and self._shown.covers(known.family, specimen.lifted):
            self._keep(known, specimen)
            return True
        return self._shown.wait(known, specimen, self._asked.values())

    def _start_anew(self, known: Known, form: LiftedCall) -> None:
        """Have its worker lift it with all that a proof needs."""
        known.is_compared, known.tried = False, form
        self._start(known, known.spec, list(known.alignments))

    def _keep(self, known: Known, specimen: Specimen) -> None:
        self._asked.pop(known.number, None)
        known.tried = None
        form, trials = specimen.lifted.pack(), specimen.trials
        source = "" if known.imported is None else known.imported.file
        known.entry = Entry(known.kernel_id, known.backend, known.what, form=form, trials=trials, imported=source)
        functions.keep(self.store, known, specimen)
        self._shown.add(known.family, specimen.lifted)
        log("lifted.proved", kernel=known.kernel_id, number=known.number, steps=len(specimen.lifted.steps))
        for other, its in self._shown.ended(known.number):
            if other.number in self._asked and not self._is_like_another(other, its):
                self._start_anew(other, its.lifted)

    def take_proved(self) -> None:
        """What proofs have found since the last time."""
        for number, data, verdict in self._proofs.ended():
            known = self._asked.get(number)
            if known is None:
                continue
            if verdict.reason is not None:
                self._refuse(known, verdict.reason, verdict.detail)
                continue
            try:
                specimen = Specimen.unpack(data)
                if known.imported is not None:  # perhaps a neighbour was tried
                    specimen, _ = self._imports.specimen(known.backend, known.imported)
            except InvalidArgument as exc:
                self._refuse(known, LiftReason.IMPORT_DAMAGED, exc.message)
            else:
                self._keep(known, specimen)

    def _refuse(self, known: Known, reason: LiftReason, detail: str) -> None:
        self._asked.pop(known.number, None)
        known.tried = None
        for other, _ in self._shown.ended(known.number):  # what holds of one holds of those that are like it
            if other.number in self._asked:
                self._refuse(other, reason, detail)
        source = "" if known.imported is None else known.imported.file
        about, is_final = (known.kernel_id, known.backend, known.what), known.retries >= MAX_RETRIES
        is_final |= reason not in answers.BUSY
        detail = functions.told(known.spec, known.backend, detail, is_final=is_final)
        known.entry = Entry(*about, reason=reason.value, detail=detail, imported=source)
        if reason not in answers.PASSING:
            functions.keep(self.store, known, None)
        if known.imported is not None:
            self._imports.note_refused(known.imported, known.entry)
        elif reason not in answers.PASSING:
            self._note_staying(known, reason.value)
        elif not is_final:
            known.retry_at_s = time.monotonic() + RETRY_S * 2**known.retries
            known.retries += 1
        log("lifted.refused", kernel=known.kernel_id, reason=reason.value, detail=detail[:200])

    def _note_staying(self, known: Known, reason: str) -> None:
        engine = self._state.engine
        if not functions.is_function(known.spec):
            engine.note_staying(known.kernel_id, engine.cell(engine.context(known.spec)), reason)

    def note_restart(self, backend: str) -> None:
        """Somebody has asked for another worker."""
        self._functions.forgive(self._state.workers[backend])

    # --- leave, and its end ------------------------------------------------------------------------------

    def look(self) -> None:
        """Once a second or so: workers that are gone answer no more, and rankings may be others by now."""
        now_s, asked = time.monotonic(), list(self._asked.values())
        for known in asked:
            is_gone = self._links.get(known.backend, known.generation) is None
            if not is_gone and (late := self._functions.late(known, now_s)) is not None:
                self._handle(late)
            is_due = now_s > known.asked_s + WORKER_S and not functions.is_function(known.spec)  # which may still begin
            if not self._proofs.has(known.number) and (is_gone or is_due):
                self._functions.note_ended(known, asked, self._state.workers[known.backend])
                del self._asked[known.number]
                known.tried = None
                self._shown.ended(known.number)  # who waited has waited as long
        self._spared.look(functions.spared(self._known.values(), {one.backend for one in self._asked.values()}), now_s)
        if forget_due(self._known.values(), now_s):
            self.take_back()
        if self._functions.look(self._known, self._state.workers):
            self.take_back()
        self.switches.look(self._pages.uuids())
        engine = self._state.engine
        if self._seen == (engine.epoch, engine.policy.hash):
            return
        was, self._seen = self._seen, (engine.epoch, engine.policy.hash)
        if was and was[1:] != self._seen[1:]:  # what was not allowed may be now
            self.take_back()
            return
        for known in self._known.values():
            granted = [(spec, _LIFTED) for spec in known.granted.values()]
            for spec, allowed in (*granted, *((spec, here.VALUES) for spec in known.granted_here.values())):
                best = self._best(spec, engine.context(spec), known.alignments)  # the policy may be another
                if best is None or best.kernel_id != known.kernel_id or self._refusal(spec, best, allowed) is not None:
                    self.take_back()
                    return

    def take_back(self) -> None:
        """All leave ends, then all leases: calls on rings, too, come by the way on which clients see that what was
        refused may be asked for again."""
        for known in self._known.values():
            known.granted.clear()
            known.granted_here.clear()
        self._ahead.clear()
        self._pages.bump_lift_epochs()
        self._state.engine.epoch += 1
        self._handle(ev.Tick())

    def facts(self) -> list[dict[str, Any]]:
        """For `lz status`: each call that somebody has asked for."""
        return [known.facts(is_pending=known.number in self._asked) for known in self._known.values()]

    def close(self) -> None:
        self._proofs.close()
        self.switches.close()
