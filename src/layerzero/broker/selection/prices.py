"""What a call on a GPU takes besides its kernel, and how times become shares of a score."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability

# Times that differ by less are equal: the rest is noise, and priority decides. A GPU's are told by its own clock.
TIE_SHARE, TIE_US = 0.02, 3.0
GPU_TIE_SHARE, GPU_TIE_US = 0.005, 0.25
# In which a GPU changes from one process to another, until that is measured (H200, driver 580: docs/gpu.md)
SWITCH_US = 150.0
LAYERS = 32  # of a model: so many calls have each length in common


class Price(NamedTuple):
    """Microseconds a call, and what they are for."""

    us: float = 0.0
    why: tuple[str, ...] = ()


def price_of(
    verdict: Verdict,
    spec: CallSpec,
    context: SelectionContext,
    policy: Policy,
    staying: Mapping[tuple[str, str], str],
    switch_us: float | None = None,
) -> Price:
    """`staying`: by kernel and perf key, why such calls cannot be lifted. Where all are lifted, or none, the GPU's
    change of processes is the same for each kernel. `switch_us`: of one change, None where it was not measured."""
    us, why = 0.0, list[str]()
    if spec.device and (plan_us := new_length_us(verdict.kernel, context)):
        us += plan_us
        why.append(f"plans each length anew: {plan_us:g} us more a call, since a decoder's lengths grow")
    if spec.device and staying:
        may_be_lifted = policy.isolation(verdict.backend, verdict.kernel_id) != "subprocess"
        reason = staying.get((verdict.kernel_id, context.perf_key())) if may_be_lifted else "NOT_ALLOWED"
        if reason is not None:
            both_us = 2 * (SWITCH_US if switch_us is None else switch_us)
            whence = "by default, not measured here" if switch_us is None else "measured on this GPU"
            us += both_us
            text = f"is not lifted ({reason}): {both_us:g} us more, in which the GPU changes to its worker and back"
            why.append(f"{text} ({whence})")
    return Price(us, tuple(why))


def new_length_us(kernel: KernelCapability | None, context: SelectionContext) -> float:
    """The price of planning for each length, shared by the layers that have it: of attention of one query, whose keys
    are one more at each step. One that has a mask is on a static cache, whose length stays."""
    if kernel is None or not kernel.new_shape_us or context.op != "attention":
        return 0.0
    is_decoding = context.seq_len_q == 1 and (len(context.inputs) < 4 or context.inputs[3] is None)
    return kernel.new_shape_us / LAYERS if is_decoding else 0.0


def with_price(verdict: Verdict, price: Price) -> Verdict:
    """The verdict, with a note of what is added."""
    return replace(verdict, notes=(*verdict.notes, *price.why)) if price.why and verdict.is_accepted else verdict


def share(time_us: float, fastest_us: float, tie_us: float) -> float:
    """The fastest kernel's time as a share of this kernel's: 1 for the fastest and its ties, 1/2 for twice the time.

    The caller gives a kernel that was never measured the time of the fastest: else the first kernel that ever ran would
    win for ever.
    """
    return 1.0 if time_us - fastest_us <= tie_us else fastest_us / time_us


def add_shares(
    verdicts: Sequence[Verdict],
    costs_us: Mapping[str, float],
    weight: float,
    *,
    is_on_gpu: bool,
    but_for: Collection[str] = (),
) -> None:
    """Give each kernel that may serve the call the term of its time. `costs_us`: of those that were measured; kernels
    of `but_for` are not what others are measured by."""
    measured = costs_us.keys() - but_for
    times = (costs_us[v.kernel_id] for v in verdicts if v.is_accepted and v.kernel_id in measured)
    fastest_us = min(times, default=None)
    if fastest_us is None:
        return
    ties = (GPU_TIE_SHARE * fastest_us, GPU_TIE_US) if is_on_gpu else (TIE_SHARE * fastest_us, TIE_US)
    for verdict in verdicts:
        if verdict.is_accepted or verdict.uncompiled is not None:
            part = share(costs_us.get(verdict.kernel_id, fastest_us), fastest_us, max(ties))
            verdict.terms["perfdb"] = weight * part
