"""Products by groups and mixtures of experts: their entries, fake functions and gradient formulas, as table.py,
fakes.py and gradients.py have them of others."""

from __future__ import annotations

import itertools
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

import layerzero as lz
from layerzero.torch import autocasting
from layerzero.torch.gradients import Call, Gradients
from layerzero.torch.op_entry import ANY, OpEntry

# --- fake functions


def grouped_linear_fake(input: Tensor, weight: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """(rows, out_features)."""
    _dims("grouped_linear", input=(input, 2), weight=(weight, 3), offsets=(offsets, 1))
    return input.new_empty((input.shape[0], weight.shape[1]))


def route_fake(logits: Tensor, *_: Any, top_k: int, **__: Any) -> tuple[Tensor, Tensor]:
    """Weights and ids."""
    _dims("moe_route", logits=(logits, 2))
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def permute_fake(x: Tensor, ids: Tensor, *, num_experts: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their order and the ends of experts'."""
    _dims("moe_permute", x=(x, 2), ids=(ids, 2))
    count = ids.shape[0] * ids.shape[1]
    order = x.new_empty((count,), dtype=torch.int64)
    return x.new_empty((count, x.shape[1])), order, x.new_empty((num_experts,), dtype=torch.int32)


def combine_fake(rows: Tensor, order: Tensor, weights: Tensor, **_: Any) -> Tensor:
    """(tokens, features)."""
    _dims("moe_combine", rows=(rows, 2), order=(order, 1), weights=(weights, 2))
    return rows.new_empty((weights.shape[0], rows.shape[1]))


def mlp_fake(input: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
    """(tokens, out_features)."""
    _dims("moe_mlp", input=(input, 2), gate_up=(gate_up, 3), down=(down, 3), ids=(ids, 2), weights=(weights, 2))
    return input.new_empty((input.shape[0], down.shape[1]))


def _dims(op: str, **tensors: tuple[Tensor, int]) -> None:
    for name, (tensor, wanted) in tensors.items():
        if tensor.dim() != wanted:
            found = f"{name} has shape {list(tensor.shape)}"
            raise lz.InvalidArgument(f"{op}: {found}; allowed: {wanted} dimensions; reshape it")


# --- gradients


def grouped_linear_gradients(grad: Tensor, call: Call) -> Gradients:
    """Those of linear, of each group. While it is traced, when nobody knows where groups end, each group has all rows,
    those of others as 0."""
    groups, rows = int(call.shape["weight"][0]), call.shape["input"][0]
    parts = _parts(call["offsets"], groups, rows)
    x, weight = call["input"], call["weight"]
    found: Gradients = {}
    if "input" in call.needs:
        found["input"] = _joined(
            [torch.matmul(_of(grad, part), weight[g]) for g, part in enumerate(parts)], parts, grad
        )
        if not groups:
            found["input"] = grad.new_zeros(call.shape["input"])
    if "weight" in call.needs:
        each = [torch.matmul(_of(grad, part).t(), _of(x, part)) for part in parts]
        found["weight"] = torch.stack(each) if each else grad.new_zeros(call.shape["weight"])
    if "bias" in call.needs and "bias" in call.shape:
        sums = [_of(grad, part).sum(0) for part in parts]
        found["bias"] = torch.stack(sums) if sums else grad.new_zeros(call.shape["bias"])
    return found


Part: TypeAlias = slice | Tensor  # rows of a group; or 1 for each of its rows and 0 for others, as a column


def _parts(offsets: Tensor, groups: int, rows: Any) -> list[Part]:
    if type(offsets) is Tensor and not is_functorch_wrapped_tensor(offsets):
        return [slice(*pair) for pair in itertools.pairwise((0, *offsets.tolist()))]
    places = torch.arange(rows, device=offsets.device)
    starts = torch.nn.functional.pad(offsets, (1, 0))
    return [((places >= starts[g]) & (places < starts[g + 1])).unsqueeze(-1) for g in range(groups)]


def _of(rows: Tensor, part: Part) -> Tensor:
    return rows[part] if isinstance(part, slice) else rows * part


def _joined(made: list[Tensor], parts: list[Part], grad: Tensor) -> Tensor | None:
    """Of all rows; those of no group have 0."""
    if not made:
        return None
    if not isinstance(parts[0], slice):
        return torch.stack(made).sum(0)
    whole = torch.cat(made)
    return torch.nn.functional.pad(whole, (0, 0, 0, grad.shape[0] - whole.shape[0]))


def permute_gradients(grads: Any, call: Call) -> Gradients:
    """Of each token the sum of its rows, in float32 of half precision."""
    if "x" not in call.needs:
        return {}
    each = _by_token(grads[0], call["order"], call.shape["ids"])
    return {"x": each.sum(1).to(grads[0].dtype)}


def combine_gradients(grad: Tensor, call: Call) -> Gradients:
    """Of a row its token's, times its weight; of a weight that times the row, summed."""
    order, shape = call["order"], call.shape["weights"]
    found: Gradients = {}
    if "rows" in call.needs:
        places = order.long()
        rows = grad[places // max(shape[1], 1)]
        found["rows"] = (_wide(rows) * call["weights"].reshape(-1)[places].unsqueeze(-1)).to(rows.dtype)
    if "weights" in call.needs:
        each = _by_token(call["rows"], order, shape)
        found["weights"] = (each * _wide(grad).unsqueeze(1)).sum(-1).to(torch.float32)
    return found


def _by_token(rows: Tensor, order: Tensor, shape: Any) -> Tensor:
    """(tokens, experts of each, features)."""
    return _wide(rows[torch.argsort(order)]).unflatten(0, tuple(shape))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


ENTRIES = (
    OpEntry(
        "grouped_linear",
        "Tensor input, Tensor weight, Tensor offsets, Tensor? bias=None",
        grouped_linear_fake,
        grouped_linear_gradients,
        {"input": frozenset({"weight"}), "weight": frozenset({"input"}), "offsets": ANY},
        autocasting.lower,
    ),
    OpEntry(
        "moe_route",
        'Tensor logits, Tensor? correction_bias=None, *, int top_k, str scoring="softmax", bool normalize=True, '
        'int num_groups=1, int top_groups=1, str group_score="top2", float scale=1.0',
        route_fake,
        results=2,
    ),
    OpEntry(
        "moe_permute",
        "Tensor x, Tensor ids, *, int num_experts",
        permute_fake,
        permute_gradients,
        {"order": ANY},
        results=3,
        also_saved="order",
    ),
    OpEntry(
        "moe_combine",
        "Tensor rows, Tensor order, Tensor weights",
        combine_fake,
        combine_gradients,
        {"rows": frozenset({"weights"}), "order": ANY, "weights": frozenset({"rows"})},
    ),
    OpEntry(
        "moe_mlp",
        'Tensor input, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, str activation="silu"',
        mlp_fake,
        autocast=autocasting.lower,
        singles=frozenset({"weights"}),
    ),
)
