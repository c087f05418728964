"""What kernels backends claim: their descriptors, read by the broker and by `lz env` alike, so that none is built and
probed that no broker would take."""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.capabilities import vetting
from layerzero.capabilities.descriptor import Capability, DescriptorError, read_text
from layerzero.capabilities.reasons import Reason
from layerzero.envs.manifest import EnvManifest


def read_all(
    manifests: Mapping[str, EnvManifest],
) -> tuple[dict[str, Capability], dict[str, DescriptorError]]:
    """By name: the descriptors that can be used, and why the others are refused."""
    found: dict[str, Capability] = {}
    refused: dict[str, DescriptorError] = {}
    owners: dict[str, str] = {}  # kernel id -> backend
    # Those from outside come last: none of them can take a kernel id of ours.
    for name, manifest in sorted(manifests.items(), key=lambda one: (one[1].source is not None, one[0])):
        path = manifest.descriptor_path
        try:
            read = vetting.check if manifest.source is None else vetting.vet
            capability = read(read_text(path), str(path), name)
            taken = sorted(kernel_id for kernel_id in capability.kernel_ids if kernel_id in owners)
            if taken:
                text = f"{path}: kernel id {taken[0]!r} belongs to backend {owners[taken[0]]!r}"
                raise DescriptorError(text, Reason.CAPABILITIES_INVALID)
        except DescriptorError as exc:
            refused[name] = exc
            continue
        owners.update(dict.fromkeys(capability.kernel_ids, name))
        found[name] = capability
    return found, refused
