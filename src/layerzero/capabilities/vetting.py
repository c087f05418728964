"""What a descriptor must satisfy beyond the schema: the name of its backend and our ops; one from outside, kernels that
bear its name, too."""

from __future__ import annotations

from layerzero.capabilities.descriptor import Capability, DescriptorError, parse
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.names import unknown_name
from layerzero.ipc.vocabulary.ops import CALLED_OPS

MAX_KERNELS = 256


def check(text: str, origin: str, backend: str) -> Capability:
    """The capability of the backend `backend`. Raises DescriptorError naming the value and what is allowed."""
    found = parse(text, origin)
    if found.backend != backend:
        raise _wrong(origin, f"backend is {found.backend!r}, its manifest says {backend!r}")
    for op in found.ops:
        if op not in CALLED_OPS:
            raise _wrong(origin, f"ops: {unknown_name('op', op, CALLED_OPS)}")
    return found


def vet(text: str, origin: str, backend: str) -> Capability:
    """As `check`, of a backend from outside."""
    found = check(text, origin, backend)
    if not 1 <= len(found.kernel_ids) <= MAX_KERNELS:
        raise _wrong(origin, f"lists {len(found.kernel_ids)} kernels; allowed: 1 to {MAX_KERNELS}")
    for kernel_id in found.kernel_ids:
        if not kernel_id.startswith(f"{backend}."):
            raise _wrong(origin, f"kernel id {kernel_id!r} must begin with {backend + '.'!r}")
    return found


def _wrong(origin: str, what: str) -> DescriptorError:
    return DescriptorError(f"{origin}: {what}", Reason.CAPABILITIES_INVALID)
