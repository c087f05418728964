"""Shape functions of products by groups and of mixtures of experts. As ipc/vocabulary/shapes.py, which has them all."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.ipc.vocabulary.shape_checks import (
    INDEX_DTYPES,
    Attrs,
    Inputs,
    Output,
    choice,
    flag,
    float_dtype,
    indices,
    integer,
    number,
    of_ndim,
    refuse,
    required,
)
from layerzero.ipc.vocabulary.tensors import TensorSpec

SCORINGS = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2")
MOST_EXPERTS = 1 << 16


def _grouped_linear(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, weight, offsets = required(inputs, 3)
    bias = inputs[3]
    dtype = float_dtype(op, (x, weight, bias), ("x", "weight", "bias"))
    of_ndim(op, "x", x, 2)
    of_ndim(op, "weight", weight, 3)
    indices(op, "offsets", offsets, 1, INDEX_DTYPES)
    groups, n, k = weight.shape
    if x.shape[1] != k:
        refuse(op, f"x has shape {list(x.shape)} and weight {list(weight.shape)}", "equal last extents")
    if offsets.shape[0] != groups:
        refuse(op, f"{offsets.shape[0]} offsets and {groups} weights", "one offset for each")
    if bias is not None and bias.shape != (groups, n):
        refuse(op, f"bias has shape {list(bias.shape)}", str([groups, n]))
    return ((dtype, (x.shape[0], n)),)


def _route(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    (logits,), bias = required(inputs, 1), inputs[1]
    float_dtype(op, (logits,), ("logits",))
    of_ndim(op, "logits", logits, 2)
    tokens, experts = logits.shape
    if not 1 <= experts <= MOST_EXPERTS:
        refuse(op, f"logits has shape {list(logits.shape)}", f"1 to {MOST_EXPERTS} experts")
    top_k = integer(op, attrs, "top_k", 1, experts)
    choice(op, attrs, "scoring", SCORINGS)
    choice(op, attrs, "group_score", GROUP_SCORES)
    flag(op, attrs, "normalize")
    number(op, attrs, "scale")
    groups = integer(op, attrs, "num_groups", 1, experts)
    if experts % groups:
        refuse(op, f"num_groups is {groups} for {experts} experts", "a divisor of them")
    kept = integer(op, attrs, "top_groups", 1, groups)
    if top_k > kept * (experts // groups):
        refuse(op, f"top_k is {top_k} and top_groups {kept} of {experts // groups} experts each", "as many or fewer")
    if bias is not None and (bias.dtype, bias.shape) != ("float32", (experts,)):
        refuse(op, f"correction_bias is {bias}", f"float32[{experts}]")
    return ("float32", (tokens, top_k)), ("int64", (tokens, top_k))


def _ids(op: str, ids: TensorSpec, tokens: int) -> None:
    indices(op, "ids", ids, 2, INDEX_DTYPES)
    if ids.shape[0] != tokens:
        refuse(op, f"ids has shape {list(ids.shape)} for {tokens} tokens", "a row for each")


def _permute(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, ids = required(inputs, 2)
    dtype = float_dtype(op, (x,), ("x",))
    of_ndim(op, "x", x, 2)
    _ids(op, ids, x.shape[0])
    experts = integer(op, attrs, "num_experts", 1, MOST_EXPERTS)
    return (dtype, (ids.numel, x.shape[1])), ("int64", (ids.numel,)), ("int32", (experts,))


def _combine(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    rows, order, weights = required(inputs, 3)
    dtype = float_dtype(op, (rows,), ("rows",))
    of_ndim(op, "rows", rows, 2)
    indices(op, "order", order, 1, INDEX_DTYPES)
    _weights(op, weights)
    for name, count in (("rows", rows.shape[0]), ("order", order.shape[0])):
        if count != weights.numel:
            refuse(op, f"{name} has {count} rows and weights {weights.numel} elements", "as many")
    return ((dtype, (weights.shape[0], rows.shape[1])),)


def _weights(op: str, weights: TensorSpec) -> None:
    if weights.dtype != "float32":
        refuse(op, f"weights is {weights.dtype}", "float32")
    of_ndim(op, "weights", weights, 2)


def _moe_mlp(op: str, inputs: Inputs, attrs: Attrs) -> tuple[Output, ...]:
    x, gate_up, down, ids, weights = required(inputs, 5)
    dtype = float_dtype(op, (x, gate_up, down), ("x", "gate_up", "down"))
    of_ndim(op, "x", x, 2)
    of_ndim(op, "gate_up", gate_up, 3)
    of_ndim(op, "down", down, 3)
    choice(op, attrs, "activation", LINEAR_ACTIVATIONS)
    if x.shape[1] != gate_up.shape[2]:
        refuse(op, f"x has shape {list(x.shape)} and gate_up {list(gate_up.shape)}", "equal last extents")
    if gate_up.shape[0] != down.shape[0] or gate_up.shape[1] != 2 * down.shape[2]:
        allowed = "as many experts, and gate_up's second extent twice down's last"
        refuse(op, f"gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}", allowed)
    _ids(op, ids, x.shape[0])
    _weights(op, weights)
    if weights.shape != ids.shape:
        refuse(op, f"weights has shape {list(weights.shape)} and ids {list(ids.shape)}", "equal ones")
    return ((dtype, (x.shape[0], down.shape[1])),)


EXPERTS: dict[str, Callable[[str, Inputs, Attrs], tuple[Output, ...]]] = {
    "grouped_linear": _grouped_linear,
    "moe_route": _route,
    "moe_permute": _permute,
    "moe_combine": _combine,
    "moe_mlp": _moe_mlp,
}
