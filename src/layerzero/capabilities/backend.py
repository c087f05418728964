"""BackendSpec: one backend as a whole, from its descriptor and its manifest (spec 5.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from layerzero.capabilities.descriptor import Capability, Platform

ENTRY_POINT_GROUP = "layerzero.backends"


@dataclass(frozen=True)
class BackendSpec:
    """`requires` are the requirements of its environment; `init_cost_ms` is the largest that a kernel declares."""

    name: str
    version: str
    platform: Platform
    import_name: str  # module of the provider, or the path of its file
    plugin_origin: Literal["builtin", "entry_point", "hub"]
    requires: tuple[str, ...]
    provides_ops: tuple[str, ...]
    supports_graphs: bool  # every kernel may be captured
    init_cost_ms: float | None
    capabilities_hash: str
    capabilities_schema_version: str
    entry_point_group: str = ENTRY_POINT_GROUP

    @classmethod
    def of(
        cls,
        capability: Capability,
        *,
        import_name: str,
        requires: Iterable[str] = (),
        plugin_origin: Literal["builtin", "entry_point", "hub"] = "builtin",
    ) -> BackendSpec:
        """The keyword arguments are the manifest's: provider and requirements, and where it was found."""
        kernels = [kernel for listed in capability.ops.values() for kernel in listed]
        return cls(
            name=capability.backend,
            version=capability.backend_version,
            platform=capability.platform,
            import_name=import_name,
            plugin_origin=plugin_origin,
            requires=tuple(requires),
            provides_ops=tuple(sorted(capability.ops)),
            supports_graphs=all(kernel.is_cuda_graph_safe for kernel in kernels),
            init_cost_ms=max((k.init_cost_ms for k in kernels if k.init_cost_ms is not None), default=None),
            capabilities_hash=capability.hash,
            capabilities_schema_version=capability.schema_version,
        )
