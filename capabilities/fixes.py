"""What a call would have to change for a kernel that refuses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.match import findings
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import TensorSpec

_MENDED_BY_COPY = frozenset({Reason.NOT_CONTIGUOUS, Reason.STRIDE_LAST_DIM})


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Copies of inputs that the client makes so that a kernel takes the call: `transforms` such as "contiguous q"."""

    transforms: tuple[str, ...]


NOTHING = Adaptation(())


def adaptation(context: SelectionContext, kernel: KernelCapability) -> Adaptation | None:
    """The copies that make `kernel` accept the call, none if it does so anyway; None when copies alone do not.

    The values stay what they are.
    """
    is_refused = False
    for code, _ in findings(context, kernel):
        is_refused = True
        if code not in _MENDED_BY_COPY:
            return None
    if not is_refused:
        return NOTHING
    strided = [name for name, spec in context.given.items() if not spec.is_contiguous]
    dense = tuple(
        TensorSpec.contiguous(spec.dtype, spec.shape) if name in strided and spec is not None else spec
        for name, spec in zip(OPS[context.op].inputs, context.inputs, strict=True)
    )
    if not strided or any(True for _ in findings(replace(context, inputs=dense), kernel)):
        return None
    return Adaptation(tuple(f"contiguous {name}" for name in strided))


def copied_bytes(context: SelectionContext, transforms: tuple[str, ...]) -> int:
    """What the copies of an Adaptation move for this very call."""
    specs = (context.given[transform.rpartition(" ")[2]] for transform in transforms)
    return sum(spec.numel * spec.itemsize for spec in specs)
