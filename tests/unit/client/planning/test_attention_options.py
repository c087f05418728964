"""Windows, soft cap, sinks and slopes of attention, and merges of its parts: how a call of them reaches a kernel, and
which are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.client.planning.attention_plans import plan_attention, plan_attention_forward, plan_merge_attention
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec


def dense(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def attrs(queries: int, keys: int, **options: Any) -> dict[str, Any]:
    q, k = (dense(1, 2, n, 8) for n in (queries, keys))
    return plan_attention(q, k, k, **options).attrs


@pytest.mark.parametrize(
    ("queries", "keys", "options", "sent"),
    [
        (5, 5, {"window_size": (2, 1)}, {"window_left": 2, "window_right": 1}),
        (5, 5, {"window_size": [2, -1], "is_causal": True}, {"window_left": 2, "is_causal": True}),
        (5, 5, {"window_size": (2, 3), "is_causal": True}, {"window_left": 2, "is_causal": True}),
        (5, 5, {"window_size": (2, 0)}, {"window_left": 2, "is_causal": True}),
        (5, 5, {"window_size": (4, 4)}, {}),
        (5, 5, {"window_size": (3, 4)}, {"window_left": 3}),
        (5, 9, {"window_size": (4, 8)}, {}),
        (5, 9, {"window_size": (8, 4), "causal_alignment": "bottom_right"}, {}),
        (5, 9, {"window_size": (7, 3), "causal_alignment": "bottom_right"}, {"window_left": 7, "window_right": 3}),
        (1, 9, {"window_size": (4096, 0), "causal_alignment": "bottom_right"}, {}),
        (5, 5, {"window_size": (1 << 40, 1 << 40)}, {}),
        (5, 5, {"softcap": 0}, {}),
        (5, 5, {"softcap": 30}, {"softcap": 30.0}),
    ],
)
def test_what_hides_nothing_is_not_sent(queries: int, keys: int, options: dict[str, Any], sent: dict[str, Any]) -> None:
    """A short prompt of a model with windows is a call that every kernel takes."""
    found = attrs(queries, keys, **options)
    is_placed = bool(sent) and queries != keys and "softcap" not in sent
    alignment = options.get("causal_alignment", "top_left") if is_placed else "top_left"
    plain = {"is_causal": False, "scale": 1 / math.sqrt(8), "causal_alignment": alignment, "layout": "BHSD"}
    assert found == plain | sent


def test_sinks_and_slopes_are_tensors_of_the_call() -> None:
    q, k = dense(2, 4, 3, 8), dense(2, 4, 5, 8)
    plan = plan_attention_forward(q, k, k, None, dense(4), dense(4), causal_alignment="bottom_right")
    assert plan.inputs[4:] == (dense(4), dense(1, 4))
    assert plan.attrs["causal_alignment"] == "bottom_right"  # distances depend on it


def test_a_mask_may_be_of_blocks() -> None:
    """Of a last block that is shorter, too; with blocks of one it is a mask as ever."""
    q, k = dense(2, 4, 30, 8), dense(2, 4, 70, 8)
    mask = dense(4, 2, 5, dtype="bool")
    plan = plan_attention(q, k, k, mask, mask_block_size=[16, 16])
    assert plan.inputs[3] == dense(1, 4, 2, 5, dtype="bool")
    assert (plan.attrs["mask_block_q"], plan.attrs["mask_block_k"]) == (16, 16)
    whole = plan_attention_forward(q, k, k, dense(30, 70, dtype="bool"), mask_block_size=(1, 1))
    assert "mask_block_q" not in whole.attrs


@pytest.mark.parametrize(
    ("mask", "size", "says"),
    [
        (None, (16, 16), "attn_mask is None with mask_block_size; allowed: a bool mask"),
        (dense(5, 5), (1, 2), "attn_mask is float32 with mask_block_size"),
        (dense(5, 5, dtype="bool"), (2, 2), r"\(batch, heads, blocks of queries, of keys\) = \[1, 2, 3, 3\]"),
        (dense(5, 5, dtype="bool"), 16, r"mask_block_size is 16; allowed: \(queries, keys\)"),
        (dense(5, 5, dtype="bool"), (0, 2), r"mask_block_size is \(0, 2\); allowed: integers from 1 to"),
    ],
)
def test_blocks_that_fit_no_mask_are_refused(mask: TensorSpec | None, size: Any, says: str) -> None:
    q = dense(1, 2, 5, 8)
    with pytest.raises(InvalidArgument, match=says):
        plan_attention(q, q, q, mask, mask_block_size=size)


def test_a_mask_goes_beside_the_causal_rule() -> None:
    q, mask = dense(1, 2, 5, 8), dense(5, 5, dtype="bool")
    plan = plan_attention(q, q, q, mask, is_causal=True)
    assert plan.attrs["is_causal"]
    assert plan.inputs[3] == dense(1, 1, 5, 5, dtype="bool")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window_size": 5}, r"window_size is 5; allowed: \(left, right\); pass two integers, -1 for no limit"),
        ({"window_size": (1,)}, r"window_size is \(1,\); allowed: \(left, right\)"),
        ({"window_size": (1, -2)}, r"window_size is \(1, -2\); allowed: integers from -1 on"),
        ({"window_size": (1.0, 2)}, r"window_size is \(1.0, 2\); allowed: integers from -1 on"),
        ({"window_size": (True, 2)}, r"window_size is \(True, 2\); allowed: integers"),
        ({"softcap": -1.0}, "softcap is -1.0; allowed: 0.0 or more"),
        ({"softcap": float("inf")}, "softcap is inf; allowed: a finite number"),
        ({"sinks": dense(3)}, r"sinks has shape \[3\]; allowed: \[4\], one for each head of q"),
        ({"sinks": dense(4, dtype="float16")}, "sinks is float16; allowed: float32 like q; convert it"),
        ({"alibi_slopes": dense(3, 4)}, r"alibi_slopes has shape \[3, 4\]; allowed: \[4\], or \[1 or 2, 4\]"),
        ({"alibi_slopes": dense(4, dtype="float64")}, "alibi_slopes is float64; allowed: float32"),
    ],
)
def test_what_makes_no_sense_is_named(options: dict[str, Any], says: str) -> None:
    q = dense(2, 4, 3, 8)
    with pytest.raises(InvalidArgument, match=f"attention: {says}"):
        plan_attention(q, q, q, **options)


def test_rows_of_merged_parts_follow_their_outs() -> None:
    """Kernels see a number for each row; users what attention_forward has in either layout."""
    out, lse = dense(2, 5, 3, 8), dense(2, 3, 5)
    plan = plan_merge_attention(out, lse, out, lse, layout="BSHD")
    assert [spec and spec.shape for spec in plan.inputs] == [(2, 5, 3, 8), (2, 5, 3)] * 2 + [None] * 4
    assert [spec.shape for spec in plan.outputs] == [(2, 5, 3, 8), (2, 5, 3)]
    assert plan.results == (out, lse)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"lse1": dense(3, 5, dtype="float64")},
            r"lse1 is float64\[3, 5\]; allowed: float32\[3, 5\], one for each row",
        ),
        ({"lse0": dense(5, 3)}, r"lse0 is float32\[5, 3\]; allowed: float32\[3, 5\]"),
        ({"out1": dense(3, 5, 9)}, r"out1 has shape \[3, 5, 9\] and out0 \[3, 5, 8\]; allowed: equal shapes"),
        ({"out1": dense(3, 5, 8, dtype="float16")}, "out0 is float32, out1 is float16; allowed: one dtype for all"),
        ({"out2": dense(3, 5, 8)}, "out0, lse0, out1, lse1, out2 are given; allowed: parts one after the other"),
        ({"out3": dense(3, 5, 8), "lse3": dense(3, 5)}, "lse3 are given; allowed: parts one after the other"),
        ({"layout": "BSHD"}, r"out0 has shape \[3, 5, 8\]; allowed: \(batch, sequence, heads, value_dim\)"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, Any], says: str) -> None:
    parts: dict[str, Any] = {f"{name}{n}": None for n in range(4) for name in ("out", "lse")}
    parts |= {"out0": dense(3, 5, 8), "lse0": dense(3, 5), "out1": dense(3, 5, 8), "lse1": dense(3, 5), **change}
    layout = parts.pop("layout", "BHSD")
    with pytest.raises(InvalidArgument, match=f"merge_attention: .*{says}"):
        plan_merge_attention(*parts.values(), layout=layout)
