"""What a call would have to change for a kernel that refuses it: copies that the client makes unasked (`adaptation`),
and advice for whoever asks (`counterfactual`). Nothing is offered that match() does not accept afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from layerzero.capabilities import transforms
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.match import Rejection, findings, match, memory_rejection
from layerzero.capabilities.reasons import Reason
from layerzero.capabilities.transforms import Transform

MAX_STEPS = 8  # one call is never changed in more ways; one that causes what another mends would go on

_BY_COPY: Mapping[Reason, Transform] = {
    Reason.NOT_CONTIGUOUS: transforms.copy,
    Reason.STRIDE_LAST_DIM: transforms.copy,
}
_BY_CALLER: Mapping[Reason, Transform] = {
    **_BY_COPY,
    Reason.LAYOUT_UNSUPPORTED: transforms.relayout,
    Reason.DTYPE_UNSUPPORTED: transforms.cast,
    Reason.DTYPE_MIXED: transforms.cast,
    Reason.ARG_UNSUPPORTED: transforms.leave_out,
    Reason.ARG_REQUIRED: transforms.pass_neutral,
    Reason.ATTR_UNSUPPORTED: transforms.set_attribute,
    Reason.HEAD_DIM_INVALID: transforms.pad_heads,
    Reason.HEAD_DIM_ALIGNMENT: transforms.pad_heads,
    Reason.GQA_UNSUPPORTED: transforms.repeat_heads,
    Reason.ATTN_MASK_UNSUPPORTED: transforms.convert_mask,
    Reason.ATTN_MASK_INVALID: transforms.convert_mask,
    Reason.CAUSAL_ALIGNMENT_UNSUPPORTED: transforms.spell_out_causal,
    Reason.PACKED_WEIGHTS_REQUIRED: transforms.pack_weights,
    Reason.NON_DETERMINISTIC: transforms.allow_nondeterminism,
    Reason.JIT_DISABLED: transforms.allow_jit,
    Reason.MEMORY_HEADROOM_EXCEEDED: transforms.lower_headroom,
}
# Reasons that lie not in the call: what to do, and the detail says to what.
_BY_OPERATOR: Mapping[Reason, str] = {
    Reason.NOT_PINNED: "leave out backend=",
    Reason.VERSION_NOT_NAMED: "name the version: backend=, or in the policy",
    Reason.NOT_INSTALLED: "build the environment",
    Reason.ENV_CHANGED: "build the environment again",
    Reason.SOURCE_NOT_ALLOWED: "allow its sources",
    Reason.SOURCE_CHANGED: "allow its sources as they are now",
    Reason.NOT_JOINED: "start its worker (python -m layerzero.workers.join)",
    Reason.LIFTED_ONLY: "import a folder that has this call (lz lift import), or build its environment",
    Reason.LIFTED_ELSEWHERE: "import a folder that was exported on such a machine (lz lift import)",
    Reason.BACKEND_DISABLED: "repair the backend",
    Reason.POLICY_LOCKED: "change the policy",
    Reason.POLICY_DENIED: "change the policy",
}


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Copies that the client makes so that a kernel takes the call: `transforms` such as "contiguous q"."""

    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """`change` in words; `codes` are the reasons that it removes; `transforms` the work on tensors, which
    `copied_bytes` counts; `context` the changed call."""

    change: str
    codes: tuple[Reason, ...]
    transforms: tuple[str, ...]
    context: SelectionContext


NOTHING = Adaptation(())


def adaptation(context: SelectionContext, kernel: KernelCapability) -> Adaptation | None:
    """The copies of inputs that make `kernel` accept the call, none if it does so anyway; None when they do not.

    The same for all calls that share a validity key. The values stay what they are.
    """
    is_refused = False
    for code, _ in findings(context, kernel):  # stops at the first that no copy mends: the usual case
        is_refused = True
        if code not in _BY_COPY:
            return None
    if not is_refused:
        return NOTHING
    found = _transformed(context, kernel, _BY_COPY, ())
    if found is None:
        return None
    _, _, transforms = found
    if "contiguous out" in transforms:
        return None  # the caller's own memory is where the result has to be
    return Adaptation(transforms)


def copied_bytes(context: SelectionContext, transforms: Iterable[str]) -> int:
    """What the transforms of an Adaptation or a Fix read of this very call's tensors."""
    tensors = dict(context.given)
    if context.outputs:
        tensors["out"] = context.outputs[0]
    specs = (tensors.get(transform.split()[1]) for transform in transforms)
    return sum(spec.numel * spec.itemsize for spec in specs if spec is not None)


def counterfactual(context: SelectionContext, kernel: KernelCapability, rejections: Sequence[Rejection]) -> Fix | None:
    """The smallest change that removes all `rejections`; None where one of them cannot be removed."""
    codes = tuple(dict.fromkeys(rejection.code for rejection in rejections))
    advice: list[str] = []
    for rejection in rejections:
        if rejection.code in _BY_OPERATOR:
            advice.append(f"{_BY_OPERATOR[rejection.code]} ({rejection.repair or rejection.detail})")
        elif rejection.code not in _BY_CALLER:
            return None
    found = _transformed(context, kernel, _BY_CALLER, codes)
    if found is None:
        return None
    changed, changes, transforms = found
    change = "; ".join(dict.fromkeys([*changes, *advice]))
    return Fix(change, codes, transforms, changed) if change else None


def _transformed(
    context: SelectionContext, kernel: KernelCapability, known: Mapping[Reason, Transform], codes: Sequence[Reason]
) -> tuple[SelectionContext, list[str], tuple[str, ...]] | None:
    """The call after mending one reason after the other until none is left, what was changed, and the transforms.

    None when a reason has no transform, or its transform does not help.
    """
    is_memory_asked = Reason.MEMORY_HEADROOM_EXCEEDED in codes
    changes: list[str] = []
    transforms: list[str] = []
    for _ in range(MAX_STEPS):
        rejections = match(context, kernel)
        if not rejections and is_memory_asked and (memory := memory_rejection(context, kernel)) is not None:
            rejections = [memory]
        if not rejections:
            return context, changes, tuple(dict.fromkeys(transforms))
        if any(rejection.code not in known for rejection in rejections):
            return None
        step = known[rejections[0].code](context, kernel)
        if step is None:
            return None
        context = step.context
        changes.append(step.change)
        transforms += step.transforms
    return None
