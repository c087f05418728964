"""Which calls share a compilation."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.compile_unit import Facet, unit_of
from layerzero.ipc.vocabulary.tensors import TensorSpec


def call(op: str, *inputs: TensorSpec | None, **attrs: Any) -> CallSpec:
    return CallSpec(op, inputs, (inputs[0],) if inputs[0] is not None else (), attrs, "")


def tensor(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def attention(queries: int = 32, head_dim: int = 128, heads: int = 8, dtype: str = "bfloat16") -> CallSpec:
    q, k = tensor(1, heads, queries, head_dim, dtype=dtype), tensor(1, 4, 64, head_dim, dtype=dtype)
    rule = {"is_causal": True, "scale": 0.1, "causal_alignment": "top_left", "layout": "BHSD"}
    return call("attention", q, k, k, None, None, None, **rule)


def norm(rows: int = 32, columns: int = 4096, ndim: int = 1, weight: bool = True) -> CallSpec:
    return call("rms_norm", tensor(rows, columns), tensor(columns) if weight else None, ndim=ndim, eps=1e-6)


@pytest.mark.parametrize(
    ("facets", "spec", "text"),
    [
        ([], norm(), "any call"),
        (["dtypes", "head_dims"], attention(), f"dtypes={'bfloat16,' * 3}-,-,-,bfloat16 head_dims=128,128"),
        (["heads"], attention(), "heads=8,4"),
        (["heads", "head_dims"], norm(), "heads=- head_dims=-"),
        (["row"], norm(), "row=4096"),
        (["row"], norm(ndim=2), "row=131072"),
        (["attrs"], norm(), "attrs=eps:1e-06,ndim:1"),
        (["shapes"], norm(), "shapes=32x4096,4096,32x4096"),
        (["strides"], norm(weight=False), "strides=4096x1,-,4096x1"),
        (["steps"], norm(1, 36), "steps=1xnxnx1,nx1,1xnxnx1"),
        (["steps"], call("silu", TensorSpec("float32", (2, 48), (1 << 31, 0))), "steps=nx16xwidex0,nx16xwidex0"),
        (["dtypes"], call("silu", tensor(0, 3)), "dtypes=bfloat16,bfloat16 empty"),
        (None, call("silu", tensor(3)), "dtypes=bfloat16,bfloat16 shapes=3,3 strides=1,1 attrs="),
    ],
)
def test_a_unit_says_what_its_calls_have_in_common(facets: list[Facet] | None, spec: CallSpec, text: str) -> None:
    """People read it in reports; without facets a compilation is good for this very signature only."""
    assert unit_of("lib.kernel", facets, spec) == ("lib.kernel", text)


def test_a_gpu_is_part_of_the_unit() -> None:
    """What is compiled for one architecture does not run on another."""
    assert unit_of("k", [], norm(), 90).calls == "sm_90"
    assert unit_of("k", ["row"], norm(), 100).calls == "sm_100 row=4096"


@pytest.mark.parametrize(
    ("facets", "one", "other", "is_shared"),
    [
        (["dtypes", "head_dims"], attention(32), attention(33), True),
        (["dtypes", "head_dims"], attention(), attention(head_dim=64), False),
        (["dtypes", "head_dims"], attention(), attention(dtype="float16"), False),
        (["heads"], attention(), attention(heads=4), False),
        (["dtypes"], norm(), norm(weight=False), False),
        (["steps"], norm(32), norm(64), True),
        (["steps"], norm(32), norm(33), False),
        (["steps"], norm(2), norm(1), False),
        (["shapes"], norm(32), norm(33), False),
        (["dtypes", "head_dims"], attention(), attention(0), False),
    ],
)
def test_calls_that_agree_in_the_facets_share_a_unit(
    facets: list[Facet], one: CallSpec, other: CallSpec, is_shared: bool
) -> None:
    """Each unit costs a process and a compiler's time, and its first calls go elsewhere."""
    assert (unit_of("k", facets, one) == unit_of("k", facets, other)) is is_shared
