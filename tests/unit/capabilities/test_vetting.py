"""Descriptors from outside: more than the schema is asked of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests import outside

from layerzero.capabilities.descriptor import DescriptorError
from layerzero.capabilities.vetting import MAX_KERNELS, vet

KERNEL = outside.descriptor("theirs")["ops"]["silu"][0]


def test_good_descriptor_passes() -> None:
    """The rest would pass on a reader that refuses everything."""
    assert vet(json.dumps(outside.descriptor("theirs")), "x.json", "theirs").kernel_ids == ("theirs.silu",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ops": {"silo": [KERNEL]}}, "x.json: ops: no op is called 'silo'; did you mean 'silu'?"),
        ({"ops": {"function_on_gpu": [KERNEL]}}, "x.json: ops: no op is called 'function_on_gpu'"),
        ({"backend": "torch"}, "backend is 'torch', its manifest says 'theirs'"),
        ({"ops": {"silu": [{**KERNEL, "kernel_id": "torch.silu"}]}}, "'torch.silu' must begin with 'theirs.'"),
        ({"ops": {}}, "lists 0 kernels; allowed: 1 to 256"),
        (
            {"ops": {"silu": [{**KERNEL, "kernel_id": f"theirs.{i}"} for i in range(MAX_KERNELS + 1)]}},
            "lists 257 kernels; allowed: 1 to 256",
        ),
        ({"schema_version": "9"}, "schema_version"),
        ({"ops": {"silu": [{**KERNEL, "fast": True}]}}, "ops.silu.0.fast"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], says: str) -> None:
    """Its author has nothing else to go by."""
    with pytest.raises(DescriptorError) as refused:
        vet(json.dumps(outside.descriptor("theirs", **changes)), "x.json", "theirs")
    assert says in refused.value.message
