"""The explanation of a call: which kernel would serve it, why not the others, and what would have to change for those.
Nothing changes by asking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.fixes import counterfactual
from layerzero.capabilities.match import Rejection


def explain(
    engine: Engine, spec: CallSpec, unavailable: Mapping[str, Rejection], now_s: float
) -> tuple[tuple[Verdict, ...], list[dict[str, Any]]]:
    """The ranking, and its candidates as plain values: for a rejected one with `fix`, the smallest change that would
    make it eligible, and with `fix_saves_us`, what that would save by the times that are known."""
    context = engine.context(spec)
    ranked = engine.rank(spec, context, unavailable, now_s)
    best_us = next((v.measured_us for v in ranked if v.is_accepted), None)
    return ranked, [{**v.to_wire(), **_fix(engine, context, v, best_us)} for v in ranked]


def _fix(engine: Engine, context: SelectionContext, verdict: Verdict, best_us: float | None) -> dict[str, Any]:
    """The fix of a rejected candidate and what it would save against the time `best_us`; empty when there is none."""
    if verdict.is_accepted or verdict.kernel is None:
        return {}
    fix = counterfactual(context, verdict.kernel, verdict.reasons)
    if fix is None:
        return {}
    stat = engine.perf.stat(verdict.kernel_id, fix.context.perf_key())
    saves_us = best_us - stat.median_us if stat is not None and best_us is not None else None
    return {"fix": fix.change, "fix_saves_us": saves_us}
