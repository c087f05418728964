"""Plans of products of matrices beyond matmul and linear. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from layerzero.client.planning.checks import choice, finite, fresh, refuse, same_float_dtype
from layerzero.client.planning.plans import Plan, remember
from layerzero.ipc.vocabulary.ops import LINEAR_ACTIVATIONS
from layerzero.ipc.vocabulary.tensors import TensorSpec


@remember
def plan_addmm(x: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: float = 1.0, alpha: float = 1.0) -> Plan:
    """torch.addmm: beta * x + alpha * a @ b."""
    op = "addmm"
    same_float_dtype(op, x=x, a=a, b=b)
    for name, spec in (("a", a), ("b", b)):
        if spec.ndim != 2:
            refuse(op, f"{name} has shape {list(spec.shape)}", "2 dimensions", "use matmul for batches and vectors")
    if a.shape[1] != b.shape[0]:
        refuse(
            op,
            f"a has shape {list(a.shape)} and b {list(b.shape)}",
            f"a's last dimension ({a.shape[1]}) equal to b's first ({b.shape[0]})",
            "transpose one of them",
        )
    shape = (a.shape[0], b.shape[1])
    x2 = x
    while x2.ndim < 2:
        x2 = x2.unsqueeze(0)
    if x2.ndim > 2 or any(n not in (1, wanted) for n, wanted in zip(x2.shape, shape, strict=True)):
        refuse(op, f"x has shape {list(x.shape)}", f"what broadcasts to {list(shape)}", "reshape or index it")
    attrs = {name: finite(op, name, value, "leave it out") for name, value in (("beta", beta), ("alpha", alpha))}
    result = fresh(op, x.dtype, shape)
    return Plan(op, (x2, a, b), {**attrs}, (result,), (result,))


@remember
def plan_gated_mlp(x: TensorSpec, gate_up: TensorSpec, down: TensorSpec, activation: str = "silu") -> Plan:
    """The gated block between two norms of a transformer."""
    op = "gated_mlp"
    same_float_dtype(op, x=x, gate_up=gate_up, down=down)
    choice(op, "activation", activation, LINEAR_ACTIVATIONS)
    if x.ndim == 0:
        refuse(op, "x has no dimensions", "(..., in_features)", "unsqueeze it")
    for name, spec, wanted in (
        ("gate_up", gate_up, "(2 * hidden, in_features)"),
        ("down", down, "(out_features, hidden)"),
    ):
        if spec.ndim != 2:
            refuse(op, f"{name} has shape {list(spec.shape)}", wanted, "reshape it")
    if gate_up.shape[1] != x.shape[-1]:
        refuse(
            op,
            f"x has shape {list(x.shape)} and gate_up {list(gate_up.shape)}",
            f"{x.shape[-1]} in_features in both last dimensions",
            "pass gate_up as (2 * hidden, in_features)",
        )
    if gate_up.shape[0] != 2 * down.shape[1]:
        refuse(
            op,
            f"gate_up has shape {list(gate_up.shape)} and down {list(down.shape)}",
            f"{2 * down.shape[1]} rows of gate_up, the gates and then as many others",
            "lay the two weights one below the other, as torch.cat((gate, up)) does",
        )
    x2 = x.unsqueeze(0) if x.ndim == 1 else x
    output = TensorSpec.contiguous(x.dtype, (*x2.shape[:-1], down.shape[0]))
    result = fresh(op, x.dtype, (*x.shape[:-1], down.shape[0]))
    return Plan(op, (x2, gate_up, down), {"activation": activation}, (output,), (result,))
