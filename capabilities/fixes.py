"""What a call would have to change for a kernel that refuses it."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.match import match
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.ops import OPS
from layerzero.ipc.tensors import TensorSpec

_MENDED_BY_COPY = frozenset({Reason.NOT_CONTIGUOUS, Reason.STRIDE_LAST_DIM})


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Copies of inputs that the client makes so that a kernel takes the call: `transforms` such as "contiguous q"."""

    transforms: tuple[str, ...]


def adaptations(context: SelectionContext, kernel: KernelCapability) -> Adaptation | None:
    """The copies that make `kernel` accept the call; None when copies alone do not. The values stay what they are."""
    rejections = match(context, kernel)
    if not rejections or not all(rejection.code in _MENDED_BY_COPY for rejection in rejections):
        return None
    strided = [name for name, spec in context.given.items() if not spec.is_contiguous]
    dense = tuple(
        TensorSpec.contiguous(spec.dtype, spec.shape) if name in strided and spec is not None else spec
        for name, spec in zip(OPS[context.op].inputs, context.inputs, strict=True)
    )
    changed = SelectionContext.of(context.op, dense, context.outputs, context.attrs, context.device)
    if not strided or match(changed, kernel):
        return None
    return Adaptation(tuple(f"contiguous {name}" for name in strided))


def copied_bytes(context: SelectionContext, transforms: tuple[str, ...]) -> int:
    """What the copies of an Adaptation move for this very call."""
    specs = (context.given[transform.rpartition(" ")[2]] for transform in transforms)
    return sum(spec.numel * spec.itemsize for spec in specs)
