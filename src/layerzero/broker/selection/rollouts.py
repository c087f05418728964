"""Rollouts: which new versions stand in for their backends, in which calls, and what is known of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from layerzero.broker.selection.rollout import RUNNING, Rollout, pair_of
from layerzero.broker.selection.rollout_evidence import Change, Evidence
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.broker.selection.timings import PerfTable
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason


class Rollouts:
    """By backend, one each; also those that are over, for people."""

    def __init__(self) -> None:
        self.known: dict[str, Rollout] = {}
        self._standing: dict[str, Rollout] = {}  # by the new version
        self._evidence: dict[str, Evidence] = {}  # of those that run, by backend

    def __bool__(self) -> bool:
        """Some stand."""
        return bool(self._standing)

    @property
    def is_watched(self) -> bool:
        """Some run."""
        return bool(self._evidence)

    def put(self, rollout: Rollout, now_s: float) -> None:
        """The rollout as it is from now on: a new one, its next step, its end."""
        self.known[rollout.backend] = rollout
        self._standing = {one.to: one for one in self.known.values() if one.is_standing}
        evidence = self._evidence.get(rollout.backend)
        if not rollout.is_running:
            self._evidence.pop(rollout.backend, None)
        elif evidence is None or evidence.rollout.to != rollout.to:
            self._evidence[rollout.backend] = Evidence(rollout, now_s)
        else:
            evidence.begin_step(rollout, now_s)

    def rolled(
        self, spec: CallSpec, process: int, bucket: Callable[[], str], serves: Callable[[str, str], bool]
    ) -> tuple[str, ...]:
        """The new versions that stand in for their backends in calls like this from a process. `bucket`: the call's
        perf key, which its neighbours share. `serves`: whether a backend has an op."""
        if spec.pinned:
            return ()
        return tuple(
            to
            for to, rollout in sorted(self._standing.items())
            if serves(to, spec.op) and (rollout.share >= 1.0 or rollout.takes(process, bucket()))
        )

    # --- what happens, of those that run

    def note_call(self, spec: CallSpec, kernel_id: str, failed: Iterable[str], now_s: float) -> None:
        if spec.pinned:
            return
        failed = tuple(failed)
        for evidence in self._evidence.values():
            found = pair_of(evidence.rollout, kernel_id)
            if evidence.rollout.to in spec.rolled or (found is not None and not found[1]):
                evidence.note_call(kernel_id, failed, now_s)

    def note_express(self, backend: str, specs: Collection[CallSpec], count: int, now_s: float) -> None:
        """Calls on an express lane, each like one of `specs`: it is not known which. They count for a version where all
        of these do."""
        for evidence in self._evidence.values():
            if backend == evidence.rollout.to and specs and all(backend in spec.rolled for spec in specs):
                evidence.note_express(count, now_s, is_new=True)
            elif backend == evidence.rollout.backend and specs and not any(spec.pinned for spec in specs):
                evidence.note_express(count, now_s, is_new=False)

    def note_death(self, backend: str, why: str) -> None:
        for evidence in self._evidence.values():
            if evidence.rollout.to == backend:
                evidence.note_death(why)

    def note_compared(
        self, kernel_id: str, reference: str, error: float, allowed: float, now_s: float, *, is_beyond: bool
    ) -> bool:
        """Whether the comparison is one of two versions of a rollout, which says nothing else of either kernel."""
        for rollout in self.known.values():
            pair, other = pair_of(rollout, kernel_id), pair_of(rollout, reference)
            if pair is not None and other is not None and pair[1] != other[1]:
                evidence = self._evidence.get(rollout.backend)
                if evidence is not None and pair[0] == other[0]:
                    evidence.note_compared(kernel_id, error, allowed, now_s, is_beyond=is_beyond)
                return True
        return False

    def note_time(self, kernel_id: str, bucket: str, us: float, before: PerfTable) -> None:
        """`before`: the times that the broker had without this one."""
        for evidence in self._evidence.values():
            evidence.note_time(kernel_id, bucket, us, before)

    # --- what follows

    def changes(self, now_s: float) -> list[tuple[Rollout, str]]:
        """Rollouts as their rules want them from now on, each with why."""
        found = []
        for evidence in self._evidence.values():
            if now_s >= evidence.due_s:
                evidence.look(now_s)
            if evidence.change is not None:
                found.append((_next(evidence.rollout, evidence.change), evidence.change.why))
        return found

    def due_s(self, now_s: float) -> float:
        """When a step may end without anything else that happens."""
        due = (evidence.due_s for evidence in self._evidence.values())
        return min((at_s for at_s in due if at_s > now_s), default=math.inf)

    def shadowed(self) -> list[list[Any]]:
        """What clients compare, for the wire: old backend, new version, share of calls."""
        running = (one for one in self._standing.values() if one.is_running and one.shadow_rate)
        return [[one.backend, one.to, one.shadow_rate] for one in running]

    def facts(self, now_s: float) -> list[dict[str, Any]]:
        """All of them as plain values, with the evidence on those that run."""
        return [
            {
                **rollout.to_wire(),
                "share": rollout.share,
                "evidence": None if evidence is None else evidence.facts(now_s),
            }
            for backend, rollout in sorted(self.known.items())
            for evidence in (self._evidence.get(backend),)
        ]

    # --- in a ranking

    def standing(self, spec: CallSpec) -> tuple[str, ...]:
        """Of the versions that stood in for their backends when the call was made, those that still do."""
        return tuple(to for to in spec.rolled if to in self._standing)

    def place(
        self,
        verdicts: list[Verdict],
        spec: CallSpec,
        is_named: Callable[[str, str], bool],
        unavailable: Mapping[str, Rejection],
    ) -> tuple[list[Verdict], dict[str, str]]:
        """The verdicts on a call, those on new versions as their rollouts want them, and by kernel of a new version for
        which one of the old it stands in. A version that the call or the policy names (`is_named`: of kernel and
        backend) is left as it is."""
        by_id = {verdict.kernel_id: verdict for verdict in verdicts}
        stands_for: dict[str, str] = {}
        placed = []
        for verdict in verdicts:
            rollout = self._standing.get(verdict.backend)
            found = None if rollout is None else pair_of(rollout, verdict.kernel_id)
            if rollout is None or found is None or is_named(verdict.kernel_id, verdict.backend):
                placed.append(verdict)
                continue
            old = by_id.get(f"{rollout.backend}.{found[0]}")
            why = _not_for(rollout, spec, old, unavailable)
            if why:
                text = f"{rollout}; {why}"
                others = [one for one in verdict.others if one.code is not Reason.VERSION_NOT_NAMED]
                unnamed = Rejection(Reason.VERSION_NOT_NAMED, text, f"backend={verdict.backend!r}")
                placed.append(replace(verdict, others=(unnamed, *others), uncompiled=None))
            else:
                assert old is not None
                stands_for[verdict.kernel_id] = old.kernel_id
                placed.append(replace(verdict, notes=(*verdict.notes, str(rollout))))
        return placed, stands_for


def in_place_of(verdicts: Iterable[Verdict], stands_for: Mapping[str, str]) -> dict[str, tuple[float, bool, str]]:
    """Where kernels belong among those that are accepted, by their scores: one that stands in for another comes right
    before it, as its terms say from now on."""
    scores = {verdict.kernel_id: verdict.score for verdict in verdicts}
    accepted = {verdict.kernel_id for verdict in verdicts if verdict.is_accepted}
    for verdict in verdicts:
        old = stands_for.get(verdict.kernel_id, "")
        if old in accepted and verdict.is_accepted:
            verdict.terms["rollout"] = scores[old] - verdict.score
            scores[verdict.kernel_id] = scores[old]
    return {name: (-score, name not in stands_for, name) for name, score in scores.items()}


def _next(rollout: Rollout, change: Change) -> Rollout:
    if change.state == RUNNING:
        return replace(rollout, step=rollout.step + 1)
    return rollout.ended(change.state, change.why)


def _not_for(rollout: Rollout, spec: CallSpec, old: Verdict | None, unavailable: Mapping[str, Rejection]) -> str:
    """Why the new version does not stand in for this kernel of the old one in this call; empty when it does."""
    if rollout.to not in spec.rolled:
        return "the call is not of its share"
    if old is None or old.refused_in is not None:
        return f"{rollout.backend} does not take the call"
    down = unavailable.get(rollout.backend)
    others = [one for one in old.others if one is not down and one.code is not Reason.NOT_COMPILED]
    return f"{old.kernel_id} does not serve it either: {others[0].code.value}" if others else ""
