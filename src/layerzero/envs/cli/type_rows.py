"""What `lz types` shows: what an op takes and gives, which kernels have that, and what they compute in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability, KernelCapability
from layerzero.capabilities.device import DeviceSpec, holds_tensors_of
from layerzero.capabilities.match import match
from layerzero.capabilities.reasons import Reason
from layerzero.capabilities.type_rules import TYPE_ATTRS, Rule, Sample, TypeTable, computes_in

# What a kernel may refuse about dtypes, and not about shapes or features.
_OF_TYPES = frozenset({Reason.DTYPE_UNSUPPORTED, Reason.DTYPE_MIXED, Reason.KV_CACHE_DTYPE_MISMATCH})


def type_rows(
    table: TypeTable, capabilities: Mapping[str, Capability], certified: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Any]]:
    """A row for each rule and each dtype that kernels compute in; one without kernels where no backend has it.
    `certified`: by kernel id, the dtypes that it has a certificate for on this machine."""
    for rule in table.rules:
        shared = {
            "takes": dict(zip(table.data, rule.data, strict=True)),
            "with": rule.others,
            "attrs": dict(rule.attrs),
            "gives": list(rule.gives),
        }
        by: dict[str, list[dict[str, Any]]] = {}
        refused: dict[str, str] = {}
        for backend, capability in capabilities.items():
            for kernel in capability.ops.get(table.op, ()):
                why = refusal(table.op, kernel, rule)
                if why is not None:
                    refused[kernel.kernel_id] = why
                    continue
                data = _data(rule)
                is_here = data in certified.get(kernel.kernel_id, ())
                one = {"kernel_id": kernel.kernel_id, "backend": backend, "certified": is_here}
                by.setdefault(computes_in(kernel, data, rule.gives[0]), []).append(one)
        for computes, kernels in by.items():
            yield {**shared, "computes_in": computes, "kernels": kernels, "refused": refused}
        if not by:
            yield {**shared, "computes_in": None, "kernels": [], "refused": refused}


def refusal(op: str, kernel: KernelCapability, rule: Rule) -> str | None:
    """What of these dtypes a kernel does not have; None when it has all."""
    found = [_refused(op, kernel, sample) for sample in rule.samples]
    return None if None in found else found[0]


def _refused(op: str, kernel: KernelCapability, sample: Sample) -> str | None:
    device = DeviceSpec(device_type=holds_tensors_of(kernel.platform or "cpu"))
    context = SelectionContext(op, sample.inputs, sample.outputs, sample.attrs, device)
    for one in match(context, kernel):
        if one.code in _OF_TYPES:
            return str(one)
    for name in TYPE_ATTRS:
        if name in sample.attrs and name in kernel.attrs and sample.attrs[name] not in kernel.attrs[name]:
            allowed = ", ".join(map(repr, kernel.attrs[name]))
            return f"{Reason.ATTR_UNSUPPORTED.value}: {name}={sample.attrs[name]!r}; allowed: {allowed}"
    return None


def _data(rule: Rule) -> str:
    """What certificates are by, and what is added up: the dtype of the first input."""
    return rule.data[0]
