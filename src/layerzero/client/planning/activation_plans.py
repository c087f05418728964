"""Plans of activations, element by element. As client/planning/plans.py, whose rules hold here too."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.client.planning.checks import choice, floating, refuse, same_float_dtype
from layerzero.client.planning.plans import Plan, remember, same_shape
from layerzero.ipc.vocabulary.ops import ACTIVATIONS
from layerzero.ipc.vocabulary.shapes import GELU_APPROXIMATIONS
from layerzero.ipc.vocabulary.tensors import TensorSpec


def _each(op: str) -> Callable[[TensorSpec], Plan]:
    """The plan of an op of one tensor."""

    @remember
    def plan(x: TensorSpec) -> Plan:
        floating(op, "x", x)
        return same_shape(op, (x,), {})

    return plan


PLANS = {op: _each(op) for op in ACTIVATIONS}


@remember
def plan_geglu(gate: TensorSpec, up: TensorSpec, approximate: str = "none") -> Plan:
    """gelu(gate) * up."""
    choice("geglu", "approximate", approximate, GELU_APPROXIMATIONS)
    _equal("geglu", gate, up)
    return same_shape("geglu", (gate, up), {"approximate": approximate})


@remember
def plan_reglu(gate: TensorSpec, up: TensorSpec) -> Plan:
    """relu(gate) * up."""
    _equal("reglu", gate, up)
    return same_shape("reglu", (gate, up), {})


def _equal(op: str, gate: TensorSpec, up: TensorSpec) -> None:
    same_float_dtype(op, gate=gate, up=up)
    if gate.shape != up.shape:
        refuse(op, f"gate has shape {list(gate.shape)} and up {list(up.shape)}", "equal shapes", "expand the smaller")
