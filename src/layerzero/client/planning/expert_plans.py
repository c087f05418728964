"""Plans of products by groups and of mixtures of experts. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from numbers import Integral

from layerzero.client.planning.checks import choice, finite, flag, floating, fresh, refuse, same_float_dtype
from layerzero.client.planning.plans import Plan, Scalar, remember
from layerzero.ipc.vocabulary.expert_shapes import GROUP_SCORES, MOST_EXPERTS, SCORINGS
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.ipc.vocabulary.shapes import INDEX_DTYPES
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_grouped_linear(x: TensorSpec, weight: TensorSpec, offsets: TensorSpec, bias: TensorSpec | None = None) -> Plan:
    """Rows of a group by the weight of that group."""
    op = "grouped_linear"
    same_float_dtype(op, x=x, weight=weight, bias=bias)
    _matrix(op, "x", x, "(rows, in_features)")
    _cube(op, "weight", weight, "(groups, out_features, in_features)")
    groups, made, taken = weight.shape
    if x.shape[1] != taken:
        found = f"x has shape {list(x.shape)} and weight {list(weight.shape)}"
        allowed = f"{x.shape[1]} in_features in both last dimensions"
        refuse(op, found, allowed, "pass the weight as (groups, out_features, in_features)")
    _index(op, "offsets", offsets)
    if offsets.shape != (groups,):
        found = f"offsets has shape {list(offsets.shape)} for {groups} groups"
        refuse(op, found, f"[{groups}]", "pass the number of the row after the last of each group")
    if bias is not None and bias.shape != (groups, made):
        refuse(op, f"bias has shape {list(bias.shape)}", f"[{groups}, {made}]", "pass a row for each group")
    result = fresh(op, x.dtype, (x.shape[0], made))
    return Plan(op, (x, weight, offsets, bias), {}, (result,), (result,))


@remember
def plan_moe_route(
    logits: TensorSpec,
    correction_bias: TensorSpec | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize: bool = True,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    scale: float = 1.0,
) -> Plan:
    """The experts of each token, and their weights."""
    op = "moe_route"
    floating(op, "logits", logits)
    _matrix(op, "logits", logits, "(tokens, experts)")
    tokens, experts = logits.shape
    if not 1 <= experts <= MOST_EXPERTS:
        refuse(op, f"logits has shape {list(logits.shape)}", f"1 to {MOST_EXPERTS} experts", "pass all of them")
    if correction_bias is not None and (correction_bias.dtype, correction_bias.shape) != ("float32", (experts,)):
        refuse(op, f"correction_bias is {correction_bias}", f"float32[{experts}]", "pass a number for each expert")
    choice(op, "scoring", scoring, SCORINGS)
    choice(op, "group_score", group_score, GROUP_SCORES)
    groups = _count(op, "num_groups", num_groups, experts)
    if experts % groups:
        refuse(op, f"num_groups is {groups}", f"a divisor of {experts}, the experts", "pass 1 for no groups")
    kept = _count(op, "top_groups", top_groups, groups)
    attrs: dict[str, Scalar] = {
        "top_k": _count(op, "top_k", top_k, kept * (experts // groups)),
        "scoring": scoring,
        "normalize": flag(op, "normalize", normalize),
        "num_groups": groups,
        "top_groups": kept,
        "group_score": group_score,
        "scale": finite(op, "scale", scale, "leave it out"),
    }
    outputs = tuple(TensorSpec.contiguous(dtype, (tokens, int(top_k))) for dtype in ("float32", "int64"))
    return Plan(op, (logits, correction_bias), attrs, outputs, outputs)


@remember
def plan_moe_permute(x: TensorSpec, ids: TensorSpec, *, num_experts: int) -> Plan:
    """A row for each expert of each token, sorted by expert."""
    op = "moe_permute"
    floating(op, "x", x)
    _matrix(op, "x", x, "(tokens, features)")
    _ids(op, ids, x.shape[0])
    experts = _count(op, "num_experts", num_experts, MOST_EXPERTS)
    outputs = (
        fresh(op, x.dtype, (ids.numel, x.shape[1])),
        TensorSpec.contiguous("int64", (ids.numel,)),
        TensorSpec.contiguous("int32", (experts,)),
    )
    return Plan(op, (x, ids), {"num_experts": experts}, outputs, outputs)


@remember
def plan_moe_combine(rows: TensorSpec, order: TensorSpec, weights: TensorSpec) -> Plan:
    """Weighted sums of a token's rows."""
    op = "moe_combine"
    floating(op, "rows", rows)
    _matrix(op, "rows", rows, "(tokens * experts of each, features)")
    _index(op, "order", order)
    _weights(op, weights)
    for name, spec, count in (("rows", rows, rows.shape[0]), ("order", order, order.numel)):
        if count != weights.numel:
            found = f"{name} has shape {list(spec.shape)} for weights of shape {list(weights.shape)}"
            refuse(op, found, f"{weights.numel} rows", "pass what moe_permute has given")
    result = fresh(op, rows.dtype, (weights.shape[0], rows.shape[1]))
    return Plan(op, (rows, order, weights), {}, (result,), (result,))


@remember
def plan_moe_mlp(
    x: TensorSpec,
    gate_up: TensorSpec,
    down: TensorSpec,
    ids: TensorSpec,
    weights: TensorSpec,
    *,
    activation: str = "silu",
) -> Plan:
    """gated_mlp by the experts of each token."""
    op = "moe_mlp"
    same_float_dtype(op, x=x, gate_up=gate_up, down=down)
    choice(op, "activation", activation, LINEAR_ACTIVATIONS)
    _matrix(op, "x", x, "(tokens, in_features)")
    _cube(op, "gate_up", gate_up, "(experts, 2 * hidden, in_features)")
    _cube(op, "down", down, "(experts, out_features, hidden)")
    if gate_up.shape[2] != x.shape[1]:
        found = f"x has shape {list(x.shape)} and gate_up {list(gate_up.shape)}"
        allowed = f"{x.shape[1]} in_features in both last dimensions"
        refuse(op, found, allowed, "pass gate_up as (experts, 2 * hidden, in_features)")
    if gate_up.shape[:2] != (down.shape[0], 2 * down.shape[2]):
        found = f"gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}"
        allowed = f"[{down.shape[0]}, {2 * down.shape[2]}, {x.shape[1]}] of gate_up"
        refuse(op, found, allowed, "lay the rows of gates above those of others, as torch.cat((gate, up), 1) does")
    _ids(op, ids, x.shape[0])
    _weights(op, weights)
    if weights.shape != ids.shape:
        found = f"weights has shape {list(weights.shape)} and ids {list(ids.shape)}"
        refuse(op, found, "equal ones", "pass what moe_route has given")
    result = fresh(op, x.dtype, (x.shape[0], down.shape[1]))
    return Plan(op, (x, gate_up, down, ids, weights), {"activation": activation}, (result,), (result,))


def _matrix(op: str, name: str, spec: TensorSpec, wanted: str) -> None:
    if spec.ndim != 2:
        refuse(op, f"{name} has shape {list(spec.shape)}", wanted, "flatten its leading dimensions into one")


def _cube(op: str, name: str, spec: TensorSpec, wanted: str) -> None:
    if spec.ndim != 3:
        refuse(op, f"{name} has shape {list(spec.shape)}", wanted, "stack the weights of all groups")


def _index(op: str, name: str, spec: TensorSpec) -> None:
    if spec.dtype not in INDEX_DTYPES:
        refuse(op, f"{name} is {spec.dtype}", " or ".join(INDEX_DTYPES), "convert it to int32")
    if spec.ndim != 1:
        refuse(op, f"{name} has shape {list(spec.shape)}", "one dimension", "flatten it")


def _ids(op: str, ids: TensorSpec, tokens: int) -> None:
    if ids.dtype not in INDEX_DTYPES:
        refuse(op, f"ids is {ids.dtype}", " or ".join(INDEX_DTYPES), "convert it to int64")
    if ids.ndim != 2 or ids.shape[0] != tokens:
        refuse(op, f"ids has shape {list(ids.shape)}", f"({tokens}, experts of each token)", "pass moe_route's")


def _weights(op: str, weights: TensorSpec) -> None:
    if weights.dtype != "float32" or weights.ndim != 2:
        refuse(op, f"weights is {weights}", "float32 (tokens, experts of each token)", "pass moe_route's")


def _count(op: str, name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= most:
        refuse(op, f"{name} is {value!r:.80}", f"an integer from 1 to {most}", "pass one of these")
    return int(value)
