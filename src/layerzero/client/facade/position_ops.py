"""Ops of positions that rope, which is in ops.py, is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import token_plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def rope_qk(
    q: ArrayT,
    k: AnyArray,
    cos: AnyArray,
    sin: AnyArray,
    *,
    interleaved: bool = False,
    out: tuple[ArrayT, ArrayT] | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, ArrayT]:
    """rope of queries and of keys in one call: (rotated q, rotated k), of their shapes and dtype.

    q: (batch, sequence, heads, head_dim) or (sequence, heads, head_dim); k: the same, with heads of its own. cos, sin,
    interleaved: as rope. out=(a, b) writes the queries to a and the keys to b, which may be q and k: the call then
    works on memory of its own and its results are copied, as the report says. Raises InvalidArgument.
    Source: rope's; Transformers' apply_rotary_pos_emb, whose tables have each column twice.
    """
    params = {"interleaved": interleaved}
    return perform(Request("rope_qk", (q, k, cos, sin), params, token_plans.plan_rope_qk, out, backend, timeout_s))
