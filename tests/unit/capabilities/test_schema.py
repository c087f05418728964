"""What is published about descriptors is what the reader does."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.capabilities.test_descriptor import GOOD, first

from layerzero.capabilities import descriptor, schema
from layerzero.capabilities.descriptor import Capability, DescriptorError, KernelCapability
from layerzero.capabilities.reasons import Reason

DOCUMENT = Path(__file__).parents[3] / "docs" / "capabilities.md"


def test_published_schema_is_that_of_the_model() -> None:
    """Authors of descriptors check against the file."""
    text = schema.PATH.read_text(encoding="utf-8")
    assert text == schema.schema_text(), "out of date; run: python -m layerzero.capabilities.schema"


def test_schema_refuses_unknown_fields_and_versions() -> None:
    """A schema that lets pass what the reader refuses helps nobody."""
    published = json.loads(schema.schema_text())
    assert published["additionalProperties"] is False
    assert published["properties"]["schema_version"]["const"] == descriptor.SCHEMA_VERSION
    kernel = published["$defs"]["KernelCapability"]
    assert kernel["additionalProperties"] is False
    assert set(kernel["required"]) == {"kernel_id", "priority", "source", "deterministic"}
    assert set(kernel["properties"]) == set(KernelCapability.model_fields)


def test_documentation_lists_every_field_and_no_other() -> None:
    """A field without a line is a field that nobody uses right."""
    rows = re.findall(r"^\| (`[^|]*`) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {*KernelCapability.model_fields, *Capability.model_fields}


def test_documentation_names_only_codes_that_exist() -> None:
    """A reader who searches a log for a code must find it."""
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z0-9]+)+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert named <= {reason.value for reason in Reason}


@pytest.mark.parametrize(
    ("op", "change", "text"),
    [
        ("silu", {"platform": "cuda"}, "lib.silu: platform is not the backend's 'cpu'"),
        ("silu", {"min_sm": 90, "max_sm": 80}, "max_sm 80 is below min_sm 90"),
        ("silu", {"min_ndim": 3, "max_ndim": 2}, "max_ndim 2 is below min_ndim 3"),
        ("silu", {"rng": "global"}, 'deterministic is true and rng is "global"'),
        ("silu", {"requires_dtype": "float16"}, "requires_dtype 'float16' is not among dtypes ['float32']"),
        ("silu", {"produces_dtype": "float8"}, "unknown dtypes ['float8']"),
        ("silu", {"compute_dtype": "tf32"}, "unknown dtypes ['tf32']"),
        ("silu", {"supported_quant_dtypes": ["int8"]}, "needs quantization_scale_granularities"),
        ("silu", {"supported_quant_dtypes": ["int3"]}, "supported_quant_dtypes"),
        ("silu", {"workspace_bytes": -1}, "greater than or equal to 0"),
        ("attention", {"supports_kv_cache_dtypes": ["fp9"]}, "unknown dtypes ['fp9']"),
        ("attention", {"lse_base": "10"}, "lse_base"),
    ],
)  # fmt: skip
def test_claims_that_contradict_are_refused(op: str, change: dict[str, Any], text: str) -> None:
    """Which of two claims holds is not ours to guess."""
    data = copy.deepcopy(GOOD)
    first(data, op).update(change)
    with pytest.raises(DescriptorError, match=re.escape(text)) as caught:
        descriptor.parse(json.dumps(data), "lib.json")
    assert caught.value.reason is Reason.CAPABILITIES_INVALID


@pytest.mark.parametrize("ops", [[], {"silu": {}}, {"silu": [None]}, {"silu": "all"}, None])
def test_ops_of_another_shape_are_refused(ops: object) -> None:
    """The platform is handed down before anything is checked."""
    with pytest.raises(DescriptorError, match=r"lib.json: ops"):
        descriptor.parse(json.dumps({**GOOD, "ops": ops}), "lib.json")


def test_kernel_has_the_platform_of_its_backend() -> None:
    """match() sees the kernel alone."""
    capability = descriptor.parse(json.dumps(GOOD), "")
    assert {kernel.platform for kernels in capability.ops.values() for kernel in kernels} == {"cpu"}
    assert capability.kernel_ids == ("lib.silu", "lib.attention", "lib.tokenize")
