"""What `lz ops` shows: the kernels that are claimed, and what this machine's probes have certified of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.profiles import ALL, Profile
from layerzero.envs import accelerators
from layerzero.envs.build.build import find
from layerzero.envs.cli.rows import never_run, row_of
from layerzero.envs.descriptors import read_all
from layerzero.envs.manifest import EnvManifest, VariantName
from layerzero.envs.probe.probe import cached_probe
from layerzero.ipc.vocabulary.shape_class import ANY

_HERE = ("host", "built")  # states of environments that calls may run in
NOT_PROBED = "not probed"


class _Here(NamedTuple):
    """An environment on this machine: its state as `lz env list` has it, why it is so, and its last verdict."""

    state: str
    cause: str
    record: ProbeRecord | None


def kernel_rows(
    manifests: Mapping[str, EnvManifest], variant: VariantName, store: Path, profile: Profile = ALL
) -> Iterator[dict[str, Any]]:
    """A row for each kernel of each descriptor. `state`: certified (for some class), refused (probed, for none), not
    probed, or why it is not run here: not built, other variant, outdated, changed, unavailable, refused; not run: on no
    machine of this project, this one among them. `outside`: its dtypes that do not belong to the profile; what is
    certified of those does not count."""
    devices = accelerators.detect()
    for name, capability in read_all(manifests)[0].items():
        here = _here(manifests[name], variant, store, profile)
        if capability.not_run and (here.record is None or not here.record.ok):
            row = never_run({"state": here.state, "cause": here.cause}, capability, devices)
            here = _Here(row["state"], row["cause"], None)
        for op, kernels in capability.ops.items():
            for kernel in kernels:
                dtypes = kernel.dtypes or (ANY,)
                outside = [dtype for dtype in dtypes if not profile.has(op, dtype)]
                shared = {"op": op, "kernel_id": kernel.kernel_id, "backend": name, "outside": outside}
                if here.state in (*_HERE, NOT_PROBED) and len(outside) == len(dtypes):
                    cause = f"profile {profile.name}"
                    yield {**shared, "state": NOT_PROBED, "cause": cause, "certified": {}, "refused": {}}
                    continue
                yield {**shared, **_verdict(kernel.kernel_id, here, outside)}


def _here(manifest: EnvManifest, variant: VariantName, store: Path, profile: Profile) -> _Here:
    row = row_of(manifest, variant, store, None, profile)
    state, cause = row["state"], row.get("cause", "")
    if state not in _HERE:
        return _Here(state, cause, None)
    record = cached_probe(find(manifest, variant=variant, store=store), manifest, profile)
    return _Here(state if record is not None else NOT_PROBED, cause, record)


def _verdict(kernel_id: str, here: _Here, outside: Collection[str]) -> dict[str, Any]:
    if here.record is None:
        return {"state": here.state, "cause": here.cause, "certified": {}, "refused": {}}
    certified = {
        dtype: sorted(classes)
        for dtype, classes in here.record.certified.get(kernel_id, {}).items()
        if classes and dtype not in outside
    }
    refused: dict[str, list[str]] = {}
    for one in here.record.failures:
        if one["kernel_id"] == kernel_id and one["dtype"] not in outside:
            refused.setdefault(one["dtype"], []).append(one["shape_class"])
    state = "certified" if certified else "refused"
    return {"state": state, "cause": here.cause, "certified": certified, "refused": refused}
