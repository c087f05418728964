"""The kernels that there are, by op and by id, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.capabilities.descriptor import Capability, KernelCapability


class Catalogue:
    """Of the descriptors of all backends. It may grow."""

    def __init__(self, capabilities: Mapping[str, Capability]) -> None:
        self.capabilities: dict[str, Capability] = {}
        self.owners: dict[str, str] = {}  # kernel id -> backend
        self.by_id: dict[str, KernelCapability] = {}
        self._of_op: dict[str, list[tuple[str, KernelCapability]]] = {}
        self._thresholds: dict[str, tuple[int, ...]] = {}
        for backend, capability in capabilities.items():
            self.add(backend, capability)

    def add(self, backend: str, capability: Capability) -> None:
        self.capabilities[backend] = capability
        for op, kernels in capability.ops.items():
            found = self._of_op.setdefault(op, [])
            found += [(backend, kernel) for kernel in kernels]
            limits = {kernel.max_seq_len for _, kernel in found if kernel.max_seq_len is not None}
            self._thresholds[op] = tuple(sorted(limits))
            for kernel in kernels:
                self.owners[kernel.kernel_id] = backend
                self.by_id[kernel.kernel_id] = kernel

    def kernels(self, op: str) -> list[tuple[str, KernelCapability]]:
        """(backend, kernel) of all that claim to serve an op."""
        return self._of_op.get(op, [])

    def thresholds(self, op: str) -> tuple[int, ...]:
        """The op's kernels' limits on sequence length, ascending: validity keys tell lengths apart by these alone."""
        return self._thresholds.get(op, ())
