"""Products by groups, and mixtures of experts: which experts each token has, and what they make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning import expert_plans

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def grouped_linear(
    input: ArrayT,
    weight: AnyArray,
    offsets: AnyArray,
    bias: AnyArray | None = None,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """input[r] @ weight[g]^T + bias[g] for each row r of each group g.

    input: (rows, in_features), the rows of group 0, then those of 1, and so on. weight: (groups, out_features,
    in_features), bias: (groups, out_features); one floating-point dtype for all. offsets: int32 or int64 (groups,), the
    number of the row after the last of each group: they never fall, and are 0 to rows. Groups may be empty; rows after
    the last group's are 0. Returns (rows, out_features). Source: torch.nn.functional.grouped_mm, of a weight that is
    transposed, as those of torch.nn.Linear are.
    """
    args = (input, weight, offsets, bias)
    return perform(Request("grouped_linear", args, {}, expert_plans.plan_grouped_linear, out, backend, timeout_s))


def moe_route(
    logits: ArrayT,
    correction_bias: AnyArray | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    scale: float = 1.0,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[Any, Any]:
    """The experts of each token and their weights: (weights, ids), the greatest first.

    logits: (tokens, experts), any floating-point dtype, finite; what the gate gives. scoring: "softmax" over all
    experts or "sigmoid" of each. correction_bias: float32 (experts,), added to scores where experts are chosen, and not
    to weights. num_groups: so many groups of neighbouring experts, of which the best top_groups are chosen from; by
    group_score, a group's best expert ("max") or the sum of its best two ("top2"). normalize: the weights of a token
    add up to 1, before they are multiplied by `scale`. Of equal experts the first is taken. Returns float32 and int64,
    both (tokens, top_k). Mixtral is the default; Qwen2-MoE normalize=False; DeepSeek-V2 normalize=False and
    group_score="max"; DeepSeek-V3 scoring="sigmoid" and a correction_bias. Sources: Jiang et al. 2024, 2.1;
    DeepSeek-V2, eq. 20-22 and 2.2.2; DeepSeek-V3, eq. 12-16.
    """
    params = {
        **{"top_k": top_k, "scoring": scoring, "normalize": normalize, "num_groups": num_groups},
        **{"top_groups": top_groups, "group_score": group_score, "scale": scale},
    }
    args, plan = (logits, correction_bias), expert_plans.plan_moe_route
    return perform(Request("moe_route", args, params, plan, None, backend, timeout_s))


def moe_permute(
    x: ArrayT,
    ids: AnyArray,
    *,
    num_experts: int,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> tuple[ArrayT, Any, Any]:
    """A row of x for each expert of each token, sorted by expert: (rows, order, offsets).

    x: (tokens, features), any floating-point dtype. ids: int32 or int64 (tokens, k), below num_experts; a negative one
    is an expert that is not here, whose rows come last and belong to no group. Returns rows (tokens * k, features);
    order, int64 (tokens * k,): row r is that of ids.reshape(-1)[order[r]], equal ones in their order, so it is
    x[order // k]; offsets, int32 (num_experts,), as grouped_linear takes them. Source: vLLM's moe_permute.
    """
    params, plan = {"num_experts": num_experts}, expert_plans.plan_moe_permute
    return perform(Request("moe_permute", (x, ids), params, plan, None, backend, timeout_s))


def moe_combine(
    rows: ArrayT,
    order: AnyArray,
    weights: AnyArray,
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The weighted sum of each token's rows, which moe_permute has sorted.

    rows: (tokens * k, features), any floating-point dtype. order: as moe_permute gives it. weights: float32
    (tokens, k), as moe_route gives them. Sums are in float32, of float64 in float64. Returns (tokens, features).
    Source: vLLM's moe_unpermute.
    """
    args, plan = (rows, order, weights), expert_plans.plan_moe_combine
    return perform(Request("moe_combine", args, {}, plan, out, backend, timeout_s))


def moe_mlp(
    input: ArrayT,
    gate_up: AnyArray,
    down: AnyArray,
    ids: AnyArray,
    weights: AnyArray,
    activation: str = "silu",
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """The sum over each token's experts of weight * gated_mlp(input, gate_up[expert], down[expert], activation).

    input: (tokens, in_features), gate_up: (experts, 2 * hidden, in_features), the rows of gates and then those of
    others, down: (experts, out_features, hidden); one floating-point dtype for all. ids: int32 or int64 (tokens, k),
    weights: float32 (tokens, k), as moe_route gives them; a negative id is an expert that is not here, and adds
    nothing. activation: "silu", "gelu" (by erf), "gelu_tanh" or "relu". Returns (tokens, out_features). It is
    moe_permute, grouped_linear, the gate, grouped_linear and moe_combine in one call. Source: Jiang et al. 2024, 2.1.
    """
    args, params = (input, gate_up, down, ids, weights), {"activation": activation}
    return perform(Request("moe_mlp", args, params, expert_plans.plan_moe_mlp, out, backend, timeout_s))
