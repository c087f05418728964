"""Products by groups and mixtures of experts, as ipc/vocabulary/ops.py has all ops."""

from __future__ import annotations

from layerzero.ipc.vocabulary.op import Op

EXPERT_OPS = (
    # x (T,K), the rows of one group after those of the other, weight (G,N,K), bias (G,N), floats; offsets
    # int32|int64 (G): the row after the last of each group, never falling, at most T -> (T,N): linear of each row
    # by its group's weight; rows after the last group's are 0.
    Op(
        "grouped_linear",
        ("x", "weight", "offsets", "bias"),
        optional=frozenset({"bias"}),
        indices=frozenset({"offsets"}),
    ),
    # logits (T,E), any float; correction_bias (E) -> float32 and int64 (T,top_k): weights and ids of the experts of
    # each token, the greatest first. scoring: "softmax" or "sigmoid"; of num_groups groups of neighbours the
    # top_groups best are chosen from, by group_score "max" or "top2". docs/ops.md has the formulas.
    Op(
        "moe_route",
        ("logits", "correction_bias"),
        ("weights", "ids"),
        optional=frozenset({"correction_bias"}),
        singles=frozenset({"correction_bias"}),
        attrs=("top_k", "scoring", "normalize", "num_groups", "top_groups", "group_score", "scale"),
    ),
    # x (T,H), ids int32|int64 (T,K) below num_experts, negative for none -> (T K,H): x[order // K]; order int64
    # (T K): of ids in their order, by expert, those of none last; offsets int32 (num_experts), as grouped_linear's.
    Op(
        "moe_permute",
        ("x", "ids"),
        ("rows", "order", "offsets"),
        indices=frozenset({"ids"}),
        attrs=("num_experts",),
    ),
    # rows (T K,H), order int32|int64 (T K), each number once, weights (T,K) -> (T,H): of each token the weighted
    # sum of its rows
    Op(
        "moe_combine",
        ("rows", "order", "weights"),
        indices=frozenset({"order"}),
        singles=frozenset({"weights"}),
    ),
    # x (T,K), gate_up (E,2 I,K), down (E,N,I), floats; ids and weights (T,S) as above -> (T,N): the weighted sum of
    # what gated_mlp makes by each expert of a token; negative ids add nothing
    Op(
        "moe_mlp",
        ("x", "gate_up", "down", "ids", "weights"),
        indices=frozenset({"ids"}),
        singles=frozenset({"weights"}),
        attrs=("activation",),
    ),
)
