"""The pass that makes an activation of lz.linear's result part of that call, and says which other chains no kernel does
as one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from layerzero.client.connection.call import Request
from layerzero.client.planning.plans import plan_linear
from layerzero.client.plans.dataflow import Flow, kind_of, number_of
from layerzero.client.plans.fusing import Fusing
from layerzero.client.plans.passes import Program, choose_chained, may_be_chained
from layerzero.client.plans.recording import Step, Use
from layerzero.client.session.session import Session
from layerzero.ipc.vocabulary.ops import ACTIVATIONS

NAME = "activation fusion"
_OF_LINEAR = {"relu", "gelu", "silu"}
_OPS = {*_OF_LINEAR, *ACTIVATIONS}
_ELEMENTWISE = ("add", "sub", "mul", "truediv", "exp", "tanh", "maximum", "minimum", "negative", "sqrt")


def fuse_activations(session: Session, program: Program) -> None:
    fusing = Fusing(session, program, NAME)
    for step in list(program.steps):
        activation = _activation(program, step)
        if activation:
            flow = Flow(program)
            product = flow.source(step.args[0], step)
            if product is not None and kind_of(product) == "lz.linear" and not _params(product)["activation"]:
                _replace(fusing, flow, product, step, activation)
    fusing.close()
    _tell_others(program)


def _activation(program: Program, step: Step) -> str:
    """What linear calls it, if it is one of linear's: by our ops, torch's functions, or NumPy's maximum."""
    kind, kwargs = kind_of(step).removeprefix("lz."), dict(step.kwargs)
    if kind == "maximum" and len(step.args) == 2 and not kwargs:
        return "relu" if number_of(program, step.args[1]) == 0.0 else ""
    if kind == "gelu":
        approximate = _params(step)["approximate"] if step.request else kwargs.pop("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate, "") if _is_plain(step, kwargs) else ""
    return kind if kind in ("relu", "silu") and _is_plain(step, kwargs) else ""


def _is_plain(step: Step, kwargs: dict[str, Any]) -> bool:
    """Of one tensor, and nothing else is asked for."""
    return step.request is not None or (len(step.args) == 1 and kwargs in ({}, {"inplace": False}))


def _params(step: Step) -> dict[str, Any]:
    assert step.request is not None
    return step.request.params


def _replace(fusing: Fusing, flow: Flow, product: Step, step: Step, activation: str) -> None:
    """The call stands where the activation was made."""
    program, asked = fusing.program, product.request
    assert asked is not None
    for request in (asked, step.request):
        if request is not None and (request.backend or request.timeout_s):
            return fusing.refuse("its call names a backend or a time limit")
    taken = [program.value(arg) if isinstance(arg, Use) else None for arg in product.args]
    given = [value for value in taken if value is not None]
    before, made = program.value(product.made[0]), program.value(step.made[0])
    if step.writes or len(step.fresh) != 1 or not flow.is_inside([product], step):
        return fusing.refuse("linear's result is used elsewhere, too")
    if made.obj.shape != before.obj.shape or str(made.obj.dtype) != str(before.obj.dtype):
        return fusing.refuse("the activation has another dtype")
    if not flow.is_steady(given, [product, step]):
        return fusing.refuse("what it takes is written to meanwhile")
    arrays = tuple(None if value is None else value.obj for value in taken)
    request = Request("linear", arrays, {"activation": activation}, plan_linear)
    uses = tuple(None if value is None else Use(value.number) for value in taken)
    one = replace(step, name="linear", args=uses, kwargs={}, reads=tuple(v.number for v in given), function=None)
    one.request = replace(request, args=())
    if not may_be_chained(program, one):
        return fusing.refuse("its arrays do not lie where a worker reaches them")
    tried = fusing.tried(request, [] if made.storage.writers else [made.obj])
    if tried is None:
        return None
    one.kernel, one.kernel_us, _ = tried
    program.steps = [one if other is step else other for other in program.steps if other is not product]
    program.recording.steps[step.number] = one
    choose_chained(program)
    at = f"{product.number} linear, {step.number} {step.name} at {step.where}"
    fusing.done.append(f"{at} are lz.linear with {activation}, tried with {one.kernel}")
    return None


def _tell_others(program: Program) -> None:
    """Chains that other systems have fused kernels for: no backend here has one as an op."""
    flow, seen = Flow(program), Counter[str]()
    for step in program.steps:
        kind = kind_of(step)
        sources = [kind_of(source) for arg in step.args if (source := flow.source(arg, step)) is not None]
        if kind.removeprefix("lz.") in _OPS and "lz.matmul" in sources:
            seen["matmul + activation"] += 1
        elif kind.removeprefix("lz.") in _OPS - _OF_LINEAR and "lz.linear" in sources:
            seen["linear + another activation"] += 1
        elif kind == "lz.layer_norm" and "add" in sources:
            seen["residual + layer_norm"] += 1
        elif kind in _ELEMENTWISE and any(name in _ELEMENTWISE for name in sources):
            seen["elementwise + elementwise"] += 1
    program.done += [
        f"{what}: {count} seen, no backend has a certified kernel for them" for what, count in seen.items()
    ]
