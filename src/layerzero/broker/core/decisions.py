"""Decisions as clients hear of them: each route's has a number, and is sent when it is a new one."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.broker.core import actions as act
from layerzero.broker.core.effects import Effects
from layerzero.broker.core.model import Call, Worker
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.policy_rules import op_names
from layerzero.broker.selection.ranking import Engine
from layerzero.ipc.transport.messages import Decision, encode


@dataclass(eq=False, kw_only=True)
class Decisions:
    engine: Engine
    effects: Effects

    def number(self, call: Call, worker: Worker) -> int:
        """Of the decision that the worker's answer to this call follows."""
        route, signature = call.route, call.route.signature
        decided_for = (call.kernel_id, worker.generation, signature.seen[0])
        if route.decided_for != decided_for:
            route.decided_for = decided_for
            route.served_by.add(call.kernel_id)
            route.backends.add(worker.backend)
            route.decision = call.client.next_decision
            call.client.next_decision += 1
            kernel = self.engine.kernel(call.kernel_id)
            policy = self.engine.policy_for(signature.spec)
            body = encode(
                Decision(
                    kernel_id=call.kernel_id,
                    backend=worker.backend,
                    worker_pid=worker.pid,
                    copies_inputs=kernel.copies_inputs,
                    copies_outputs=kernel.copies_outputs,
                    candidates=[v.to_wire() for v in signature.ranked],
                    shadow_rate=policy.shadow_rate,
                    offers_samples=self.engine.policy.tune_budget > 0,
                    shadowed=self.engine.rollouts.shadowed(),
                    traced=_traced(policy, call) if policy.traces else 0.0,
                    slot=worker.slot if signature.spec.device else 0,
                )
            )
            self.effects.emit(act.SendDecision(call.client.identity, route.number, route.decision, body))
        return route.decision


def _traced(policy: Policy, call: Call) -> float:
    """The share of such calls that the client is to record."""
    spec, client = call.route.signature.spec, call.client
    names = op_names(spec.op, is_causal=bool(spec.attrs.get("is_causal")))
    return policy.traced(call.kernel_id, names, client.process, client.program)
