"""Products of matrices with more in them than matmul and linear (ops.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform
from layerzero.client.planning.product_plans import plan_addmm, plan_gated_mlp

if TYPE_CHECKING:
    from layerzero.client.arrays.array_types import AnyArray


def addmm(
    input: ArrayT,
    a: AnyArray,
    b: AnyArray,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """beta * input + alpha * a @ b.

    a: (m, k), b: (k, n), input: what broadcasts to (m, n); one floating-point dtype for all. With beta=0 nothing of
    input counts, not even NaN. Returns (m, n). Source: torch.addmm; GEMM of BLAS, Dongarra et al. 1990.
    """
    params = {"beta": beta, "alpha": alpha}
    return perform(Request("addmm", (input, a, b), params, plan_addmm, out, backend, timeout_s))


def gated_mlp(
    input: ArrayT,
    gate_up: AnyArray,
    down: AnyArray,
    activation: str = "silu",
    *,
    out: ArrayT | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> ArrayT:
    """(activation(input @ gate^T) * (input @ up^T)) @ down^T: the gated block of a transformer's layer.

    input: (..., in_features), gate_up: (2 * hidden, in_features), the rows of gate and then those of up, down:
    (out_features, hidden); one floating-point dtype for all. activation: "silu", "gelu" (by erf), "gelu_tanh" or
    "relu". Returns (..., out_features). Source: Shazeer 2020, eq. 6.
    """
    params = {"activation": activation}
    return perform(Request("gated_mlp", (input, gate_up, down), params, plan_gated_mlp, out, backend, timeout_s))
