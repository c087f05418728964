"""Plans of products of matrices beyond matmul and linear. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from layerzero.client.planning.checks import finite, fresh, refuse, same_float_dtype
from layerzero.client.planning.plans import Plan, remember
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
