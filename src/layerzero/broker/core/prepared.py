"""Call signatures that routes and open calls use, their candidates in order, and the plans workers have for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from layerzero.broker.core import actions as act
from layerzero.broker.core.compile_waits import to_compile
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Worker
from layerzero.broker.core.worker_lifecycle import WorkerLifecycle
from layerzero.broker.selection.neighbours import neighbourhood
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Signature, Verdict
from layerzero.capabilities.descriptor import Capability
from layerzero.ipc.vocabulary.neighbours import Neighbourhood

Place: TypeAlias = tuple[bytes, tuple[str, ...]]  # the encoded Route message, and Signature.place


@dataclass(eq=False, kw_only=True)
class PreparedCalls:
    engine: Engine
    lifecycle: WorkerLifecycle
    effects: Effects
    known: dict[Place, Signature] = field(init=False, default_factory=dict)
    plans: dict[tuple[Place, str], int] = field(init=False, default_factory=dict)  # number by (signature, kernel)
    _numbers: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))

    def add(self, body: bytes, spec: CallSpec) -> Signature:
        """Nobody uses it yet. Raises LayerZeroError for a bad one."""
        context = self.engine.context(spec)
        signature = Signature(body, spec, context, self.engine.cell(context), self.engine.kernels(spec.op))
        self.known[signature.place] = signature
        return signature

    def note_backend(self, capability: Capability) -> None:
        """There are more candidates from now on."""
        for signature in self.known.values():
            if signature.spec.op in capability.ops:
                signature.kernels = self.engine.kernels(signature.spec.op)

    def release(self, signature: Signature) -> None:
        """One route or open call less uses it; with the last one its plans go."""
        signature.users -= 1
        if signature.users:
            return
        del self.known[signature.place]
        for kernel_id, backend in signature.kernels:
            plan = self.plans.pop((signature.place, kernel_id), None)
            for worker in self.lifecycle.succession.of(backend) if plan is not None else ():
                if plan in worker.plans:
                    worker.plans.discard(plan)
                    self.effects.emit(act.SendDrop(worker.identity, plan))

    def order(self, signature: Signature) -> tuple[Verdict, ...]:
        """Accepted candidates, best first; kept until something that could change them does."""
        engine, cell = self.engine, signature.cell
        if signature.seen != (engine.epoch, cell.generation):
            if signature.seen[0] != engine.epoch:  # the policy may be another
                signature.context = engine.context(signature.spec)
            unavailable = self.lifecycle.unavailable
            signature.ranked = engine.rank(signature.spec, signature.context, unavailable, self.effects.now_s)
            signature.order = tuple(v for v in signature.ranked if v.is_accepted)
            signature.to_compile = to_compile(signature.ranked)
            rejections = self.effects.tally.rejections
            for verdict in signature.ranked:
                if not verdict.is_accepted:
                    first = (verdict.others or verdict.reasons)[0]
                    rejections[signature.spec.op, verdict.backend, first.code.value] += 1
            signature.seen = (engine.epoch, cell.generation)
        return signature.order

    def neighbours(self, signature: Signature) -> Neighbourhood | None:
        """Calls that the same kernel serves, found once for each ranking."""
        self.order(signature)
        if signature.neighbours_seen != signature.seen:
            signature.neighbours_seen = signature.seen
            spec, context = signature.spec, signature.context
            signature.neighbours = neighbourhood(self.engine, spec, context, signature.ranked)
        return signature.neighbours

    def prepare(self, worker: Worker, call: Call) -> int:
        """The plan for a call's kernel, which the worker has from now on."""
        signature = call.route.signature
        key = (signature.place, call.kernel_id)
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = next(self._numbers)
        if plan not in worker.plans:
            worker.plans.add(plan)
            is_graph_safe = self.engine.kernel(call.kernel_id).is_cuda_graph_safe
            body = signature.spec.prepare(call.kernel_id, is_graph_safe=is_graph_safe)
            self.effects.emit(act.SendPrepare(worker.identity, plan, body))
        return plan

    def plan_of(self, call: Call) -> int:
        """Of a call that a worker has or has just answered."""
        return self.plans[call.route.signature.place, call.kernel_id]
