"""The Engine: which kernels may serve a call, in which order, and why not the others. A ranking follows from the call
and from what the engine was told: descriptors, policy, timings, health, certificates. No I/O, no clock.

Three steps, each with a cache of its own:

1. *validity*: which kernels' constraints the call meets. Keyed by every field of the context that can change that.
2. *timings*: how fast each kernel was on calls of this size, bucketed (PerfTable). A `TimingBucket` says when they may
   have changed a ranking.
3. *ranking*: policy, availability, health and memory joined in, scored and sorted. Kept with the call's signature until
   one of them changes (`Engine.epoch`); this is what a call costs in the steady state.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from layerzero.broker.selection.breaker import Health, failure_signature
from layerzero.broker.selection.catalogue import Catalogue
from layerzero.broker.selection.certification import Certification, Subject
from layerzero.broker.selection.compile_queue import Compilation
from layerzero.broker.selection.policy import Policy, PolicyForCall
from layerzero.broker.selection.prices import add_shares, new_length_us, price_of, with_price
from layerzero.broker.selection.rollouts import Rollouts, in_place_of
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.broker.selection.timings import PerfRow, PerfTable
from layerzero.capabilities.compile_unit import Unit, unit_of
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability, KernelCapability
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.fixes import Adaptation, adaptation, copied_bytes
from layerzero.capabilities.match import Rejection, memory_rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class

MAX_VALIDITY = 4096
MAX_CELLS = 4096
MAX_POLICIES = 256  # overlays of clients that were merged with the broker's policy
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DescriptorMatch:
    """A kernel matched with a call by its descriptor alone. `adaptation`: the copies it needs, perhaps none; None: its
    constraints refuse the call, copies or not."""

    kernel: KernelCapability
    backend: str
    adaptation: Adaptation | None


@dataclass(slots=True, eq=False)
class TimingBucket:
    """The calls that share a perf key: how many samples of each kernel there are (`counts`). `generation` grows when
    these samples may have put a ranking out of date."""

    key: str
    generation: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class Table(Protocol):
    """A solved dispatch table (broker/selection/dispatch_table.py)."""

    def lookup(self, context: SelectionContext) -> str | None: ...
    def covers(self, device: DeviceSpec) -> bool: ...


class LiftedKernels(Protocol):
    """What backends serve that have no worker here (broker/lifting/imported.py)."""

    def stands_in(self, backend: str) -> bool: ...
    def rejection(self, kernel_id: str, backend: str, spec: CallSpec) -> Rejection | None: ...


class Engine:
    """Ranks the kernels of each call. `device` is the CPU, which calls without a device run on. `gpus` are those that
    calls may name; `no_gpus` says why there are none. `envs` has the lock hash of each backend's environment. What the
    broker learns later comes by `set_*` and `note_*`; each of them that can change a ranking makes `epoch` grow."""

    def __init__(
        self,
        capabilities: Mapping[str, Capability],
        device: DeviceSpec,
        *,
        gpus: Iterable[DeviceSpec] = (),
        no_gpus: str = "",
        policy: Policy | None = None,
        perf: PerfTable | None = None,
        health: Health | None = None,
        envs: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """`refused`: why the descriptors of further backends cannot be used."""
        self._catalogue = Catalogue(capabilities)
        self.capabilities: Mapping[str, Capability] = self._catalogue.capabilities
        self.refused = dict(refused or {})
        self.device = device
        self.devices = {"": device, **{gpu.device_uuid: gpu for gpu in gpus}}  # by Route.device
        self._no_gpus = no_gpus
        self.policy = policy or Policy.of()
        self.perf = perf or PerfTable()
        self.health = health or Health()
        self.certification = Certification({}, owners=self._catalogue.owners)
        self.compilation = Compilation()
        self.rollouts = Rollouts()
        self.table: Table | None = None
        self.lifted: LiftedKernels | None = None
        self.free_memory_bytes: dict[str, int | None] = {}  # by Route.device
        self._staying: dict[tuple[str, str], str] = {}  # by kernel and perf key, why such calls cannot be lifted
        self.switches: dict[str, float] = {}  # by GPU: microseconds in which it changes to another process, if measured
        self.epoch = 0
        self.hits = self.misses = 0  # of the validity cache
        self._versions: dict[str, Mapping[str, str]] = {}
        self._envs = dict(envs or {})
        self._world = self._hash_world()
        self._valid: OrderedDict[tuple[Any, ...], tuple[DescriptorMatch, ...]] = OrderedDict()
        self._cells: OrderedDict[str, TimingBucket] = OrderedDict()
        self._policies: OrderedDict[bytes, Policy] = OrderedDict()

    # --- what the broker learns ------------------------------------------------------------------------

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy
        self._policies.clear()
        self.epoch += 1

    def set_table(self, table: Table | None) -> None:
        self.table = table
        self.epoch += 1

    def set_certification(self, certification: Certification) -> None:
        self.certification = certification.owned_by(self._catalogue.owners)
        self.epoch += 1

    def set_compilation(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.epoch += 1

    def note_backend(self, backend: str, capability: Capability, env: str) -> None:
        """A backend that there was not before, and the lock hash of its environment."""
        self._catalogue.add(backend, capability)
        self._envs[backend] = env
        self._world = self._hash_world()
        self.epoch += 1

    def note_env(self, backend: str, env: str) -> None:
        """The backend is served by the environment of this lock hash from now on."""
        if self._envs.get(backend, "") != env:
            self._envs[backend] = env
            self._world = self._hash_world()
            self.epoch += 1

    def note_versions(self, backend: str, versions: Mapping[str, str]) -> None:
        """The versions that a worker of the backend has loaded. Decisions and timings made for others count no more."""
        before = self._versions.get(backend)
        if before == versions:
            return
        self._versions[backend] = dict(versions)
        self._world = self._hash_world()
        if before is not None:
            self.perf.forget(frozenset(self.capabilities[backend].kernel_ids))
            self.epoch += 1

    def note_time(self, kernel_id: str, cell: TimingBucket, kernel_ns: int, now_s: float, *, is_clean: bool) -> None:
        """Keep a kernel's time as a sample. Rankings of the cell's calls are due again when the kernel is new there,
        and each time its samples have doubled."""
        count = cell.counts.get(kernel_id, 0) + 1
        cell.counts[kernel_id] = count
        us, key = kernel_ns / 1e3, cell.key
        if self.rollouts.is_watched and is_clean and count > 1 and us:
            self.rollouts.note_time(kernel_id, key, us, self.perf)
        self.perf.note(kernel_id, key, us, now_s, is_warmup=count == 1, is_clean=is_clean)
        if not count & (count - 1):
            cell.generation += 1

    def note_staying(self, kernel_id: str, cell: TimingBucket, reason: str) -> None:
        """Such calls of the kernel cannot be lifted, for this reason code: they stay in its worker."""
        if (kernel_id, cell.key) not in self._staying:
            self._staying[kernel_id, cell.key] = reason
            self.epoch += 1

    @property
    def has_staying(self) -> bool:
        """Whether some calls are known to stay in a worker on a GPU."""
        return bool(self._staying)

    def note_switch(self, device: str, us: float) -> None:
        """What the GPU's change from one process to another takes."""
        self.switches[device] = us
        self.epoch += 1

    def note_free_memory(self, nbytes: int | None, device: str = "") -> None:
        """The bytes free on a device. None: not known, and no candidate is refused for its memory."""
        self.free_memory_bytes[device] = nbytes
        self.epoch += 1

    def load_times(self, rows: Iterable[PerfRow]) -> None:
        """Times that an earlier broker stored."""
        rows = list(rows)
        self.perf.load(rows)
        self.epoch += bool(rows)

    def facts(self) -> dict[str, Any]:
        """For `lz status`: how much is known, and how well the cache of verdicts serves."""
        return {
            "policy": self.policy.hash,
            "times": len(self.perf),
            "verdicts": {"entries": len(self._valid), "hits": self.hits, "misses": self.misses},
            "compiled": {
                "units": self.compilation.count(),
                "running": [unit._asdict() for unit in self.compilation.running()],
                "failed": [{**unit._asdict(), "why": why} for unit, why in self.compilation.failures.items()],
            },
            "quarantined": {str(subject): why for subject, why in self.certification.quarantined.items()},
            "failing": [
                {"backend": backend, "op": op, "kinds": self.health.signatures(backend, op, device)}
                for backend, op, device in self.health.places()
            ],
        }

    def note_success(self, backend: str, op: str, now_s: float, device: str = "") -> None:
        before = self.health.epoch
        self.health.succeeded(backend, op, self.devices[device].device_uuid, now_s)
        if self.health.epoch != before:
            self.epoch += 1

    def note_failure(self, backend: str, op: str, error: LayerZeroError, now_s: float, device: str = "") -> None:
        """A kernel of the backend raised `error`, or its worker died while it ran one."""
        signature = failure_signature(error.code, error.message)
        self.health.failed(backend, op, self.devices[device].device_uuid, signature, now_s)
        self.epoch += 1

    def reserve_trial(self, backend: str, op: str, now_s: float, device: str = "") -> bool:
        """Let the asking call be the one that tries a backend whose breaker is half open. False: another call is."""
        is_reserved = self.health.reserve_probe(backend, op, self.devices[device].device_uuid, now_s)
        self.epoch += is_reserved
        return is_reserved

    def forgive(self, backend: str) -> None:
        """The backend was repaired: its failures, failed compilations and quarantines count no more."""
        self.health.reset(backend)
        self.compilation.forgive(self.capabilities[backend].kernel_ids)
        self.set_certification(self.certification.without_quarantine(self.capabilities[backend].kernel_ids))

    # --- a decision --------------------------------------------------------------------------------------

    def kernels(self, op: str) -> tuple[tuple[str, str], ...]:
        """(kernel id, backend) of all that claim to serve an op."""
        return tuple((kernel.kernel_id, backend) for backend, kernel in self._catalogue.kernels(op))

    def owner(self, kernel_id: str) -> str:
        """The backend of a kernel, "" where none has it."""
        return self._catalogue.owners.get(kernel_id, "")

    def kernel(self, kernel_id: str) -> KernelCapability:
        return self._catalogue.by_id[kernel_id]

    def device_for(self, backend: str) -> DeviceSpec:
        """The device that times of a backend are valid for: the CPU, or for a GPU backend the first GPU."""
        platform = self.capabilities[backend].platform
        return next((spec for spec in self.devices.values() if spec.device_type == platform), self.device)

    def missing(self, device: str) -> InvalidArgument | None:
        """The error for a call on a device that this machine lacks; None when it has it."""
        if device in self.devices:
            return None
        known = ", ".join(f"{uuid} ({spec.device_name})" for uuid, spec in self.devices.items() if uuid)
        there_is = f"it has {known}" if known else f"it has none: {self._no_gpus or 'none was looked for'}"
        return InvalidArgument(f"this broker has no GPU {device!r:.80}; {there_is}", device=device)

    def policy_for(self, spec: CallSpec) -> Policy:
        """The broker's policy with what the caller asked for on top. Raises InvalidArgument for a bad overlay."""
        if not spec.policy:
            return self.policy
        policy = self._policies.get(spec.policy_key)
        if policy is None:
            policy = self._policies[spec.policy_key] = self.policy.with_overlay(spec.policy)
            if len(self._policies) > MAX_POLICIES:
                self._policies.popitem(last=False)
        return policy

    def context(self, spec: CallSpec) -> SelectionContext:
        """What the selection for a call depends on. Raises InvalidArgument for a bad overlay, and for a device that
        this machine lacks."""
        missing = self.missing(spec.device)
        if missing is not None:
            raise missing
        policy = self.policy_for(spec)
        return SelectionContext(
            spec.op,
            spec.inputs,
            spec.outputs,
            spec.attrs,
            self.devices[spec.device],
            policy_hash=policy.hash,
            allow_jit_compile=policy.allow_jit_compile,
            requires_deterministic=policy.requires_deterministic,
            memory_headroom_bytes=policy.memory_headroom_bytes,
            free_memory_bytes=(
                self.free_memory_bytes.get(spec.device) if policy.memory_headroom_bytes is not None else None
            ),
        )

    def thresholds(self, op: str) -> tuple[int, ...]:
        """The op's kernels' limits on sequence length, ascending."""
        return self._catalogue.thresholds(op)

    def cell(self, context: SelectionContext) -> TimingBucket:
        """The cell of the calls that share this call's perf key."""
        key = context.perf_key()
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = TimingBucket(key)
            if len(self._cells) > MAX_CELLS:
                self._cells.popitem(last=False)  # signatures that use it keep it
        return cell

    def rank(
        self, spec: CallSpec, context: SelectionContext, unavailable: Mapping[str, Rejection], now_s: float
    ) -> tuple[Verdict, ...]:
        """Every kernel of the op with its verdict: accepted ones first, best first."""
        policy = self.policy_for(spec)
        statics = self._static(context)
        subject = (
            class_dtype(context.op, context.inputs),
            shape_class(context.op, context.inputs, context.attrs, context.outputs),
        )
        chosen, miss = self._planned(context, policy)
        policy_for_call = policy.policy_for_call(context, spec.pinned, self.rollouts.standing(spec))
        verdicts: list[Verdict] = []
        for static in statics:
            verdict = self._judge(spec, context, policy, policy_for_call, static, unavailable, now_s, subject)
            if miss is not None and (verdict.is_accepted or verdict.uncompiled is not None):
                verdict = replace(verdict, others=(*verdict.others, miss), uncompiled=None)
            elif verdict.kernel_id == chosen:
                verdict.terms["table"] = policy.weights.table
            verdicts.append(verdict)
        switch_us = self.switches.get(spec.device)
        prices = {v.kernel_id: price_of(v, spec, context, policy, self._staying, switch_us) for v in verdicts}
        verdicts = [with_price(verdict, prices[verdict.kernel_id]) for verdict in verdicts]
        stands_for: dict[str, str] = {}
        if self.rollouts:
            verdicts, stands_for = self.rollouts.place(verdicts, spec, policy_for_call.names, unavailable)
        costs_us = {v.kernel_id: v.measured_us + prices[v.kernel_id].us for v in verdicts if v.measured_us}
        add_shares(verdicts, costs_us, policy.weights.perfdb, is_on_gpu=bool(spec.device), but_for=stands_for)
        for pinned in spec.candidates:
            if pinned in self.capabilities and spec.op not in self.capabilities[pinned].ops:
                detail = f"{pinned} serves {', '.join(sorted(self.capabilities[pinned].ops))}"
                unserved = Rejection(Reason.OP_UNSUPPORTED, detail)
                verdicts.append(Verdict(f"{pinned}.{spec.op}", pinned, (unserved,)))
        scores = in_place_of(verdicts, stands_for)
        return tuple(sorted(verdicts, key=lambda v: (not v.is_accepted, v.is_last_resort, *scores[v.kernel_id])))

    def _static(self, context: SelectionContext) -> tuple[DescriptorMatch, ...]:
        """Each kernel of the op matched with the call, from the validity cache."""
        key = (self._world, context.validity_key(self.thresholds(context.op)))
        found = self._valid.get(key)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        statics = []
        for backend, kernel in self._catalogue.kernels(context.op):
            statics.append(DescriptorMatch(kernel, backend, adaptation(context, kernel)))
        self._valid[key] = found = tuple(statics)
        if len(self._valid) > MAX_VALIDITY:
            self._valid.popitem(last=False)
        return found

    def _planned(self, context: SelectionContext, policy: Policy) -> tuple[str | None, Rejection | None]:
        """The dispatch table's choice, and the rejection for all others when the plan must not be left. Of a device
        that it has no calls of it says nothing."""
        if self.table is None or not self.table.covers(context.device):
            return None, None
        kernel_id = self.table.lookup(context)
        if kernel_id is None and policy.plan_mode:
            text = f"plan_mode is on and the dispatch table has no bucket for {context.perf_key()}"
            return None, Rejection(Reason.PLAN_BUCKET_MISS, text)
        return kernel_id, None

    def _judge(
        self,
        spec: CallSpec,
        context: SelectionContext,
        policy: Policy,
        policy_for_call: PolicyForCall,
        static: DescriptorMatch,
        unavailable: Mapping[str, Rejection],
        now_s: float,
        subject: tuple[str, str],
    ) -> Verdict:
        kernel, backend = static.kernel, static.backend
        reasons: list[Rejection] = []
        transforms: tuple[str, ...] = ()
        if spec.pinned and backend not in spec.candidates:
            reasons.append(Rejection(Reason.NOT_PINNED, f"the call is pinned to {spec.pinned!r:.200}"))
        cost_bytes = 0
        refused_in: SelectionContext | None = None
        may_adapt = policy.allow_adaptation and not policy.strict_mode
        if static.adaptation is None or (static.adaptation.transforms and not may_adapt):
            refused_in = context
        elif static.adaptation.transforms:
            transforms = static.adaptation.transforms
            cost_bytes = copied_bytes(context, transforms)
        elif (certificate := self.certification.judge(Subject(kernel.kernel_id, *subject))) is not None:
            reasons.append(certificate)
        said = policy_for_call.judge(kernel.kernel_id, backend)
        reasons += said.rejections
        memory = memory_rejection(context, kernel)
        if memory is not None:
            reasons.append(memory)
        if backend in unavailable:
            reasons.append(unavailable[backend])
        elif self.lifted is not None and (absent := self.lifted.rejection(kernel.kernel_id, backend, spec)) is not None:
            reasons.append(absent)
        unit = None
        if kernel.needs_jit and not transforms and refused_in is None:
            unit = unit_of(kernel.kernel_id, kernel.compiled_for, context, context.device.sm_version)
        compiled = self._compiled(unit)
        if compiled is not None:
            reasons.append(compiled)
        passing = {reason.code for reason in reasons} - {Reason.BACKEND_RESTARTING}
        uncompiled = unit if passing == {Reason.NOT_COMPILED} else None
        if refused_in is not None or (reasons and uncompiled is None):
            return Verdict(kernel.kernel_id, backend, tuple(reasons), refused_in, kernel, transforms=transforms)
        health = self.health.view(backend, context.op, context.device.device_uuid, now_s)
        notes = said.why
        if health.is_open:
            when = (
                "one call may try it now" if health.may_probe else f"until {health.retry_at_s - now_s:.1f} s from now"
            )
            notes = (*notes, f"last resort, {when}: failed {health.failures} times, last: {health.last_signature}")
        is_lifted_only = self.lifted is not None and self.lifted.stands_in(backend)
        if is_lifted_only:
            notes = (*notes, "was imported: its caller launches it, and no worker")
        weights = policy.weights
        stat = self.perf.stat(kernel.kernel_id, context.perf_key())
        terms = {"priority": weights.priority * kernel.priority}
        if spec.candidates.get(backend):  # of equals the one that was named first
            terms["order"] = -spec.candidates[backend]
        if said.bonus:
            terms["policy"] = weights.policy * said.bonus
        if stat is None and kernel.needs_jit and not self.certification.is_known(kernel.kernel_id):
            terms["jit"] = -weights.jit
        if stat is None and spec.device and new_length_us(kernel, context):
            terms["new_length"] = -weights.jit
        if health.penalty:
            terms["reliability"] = -weights.reliability * health.penalty
        cost = kernel.transform_cost_hint + cost_bytes / MIB
        if cost:
            terms["transform"] = -weights.transform * cost
        fused = tuple(op for op in spec.next_ops if op in kernel.fuses_ops)
        if fused:
            terms["fusion"] = weights.fusion * len(fused)
        time_us = stat.median_us if stat is not None else None
        return Verdict(
            kernel.kernel_id,
            backend,
            tuple(reasons),
            None,
            kernel,
            terms,
            time_us,
            transforms,
            notes,
            fused,
            is_on_trial=health.may_probe,
            is_last_resort=health.is_open and not health.may_probe,
            may_run_here=policy.isolation(backend, kernel.kernel_id) in ("in_process", "auto"),
            uncompiled=uncompiled,
            is_lifted_only=is_lifted_only,
        )

    def _compiled(self, unit: Unit | None) -> Rejection | None:
        """The rejection of a kernel that is not compiled for this unit, or None. A kernel that no probe has seen is not
        refused for that: until its probe nobody knows whether it is right, and nothing is compiled for it."""
        if unit is None or not self.certification.is_known(unit.kernel_id):
            return None
        return self.compilation.rejection(unit)

    def _hash_world(self) -> str:
        """The hash of everything besides the call that a cached verdict depends on."""
        digest = hashlib.blake2b(digest_size=16)
        for backend in sorted(self.capabilities):
            digest.update(f"{backend}\0{self.capabilities[backend].hash}\0{self._envs.get(backend, '')}\0".encode())
            digest.update(f"{sorted(self._versions.get(backend, {}).items())}\0".encode())
        digest.update(f"{self.device.driver_version}\0{self.device.device_uuid}".encode())
        return digest.hexdigest()
