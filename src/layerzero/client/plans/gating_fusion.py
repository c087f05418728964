"""The pass that makes silu(gate) * up one call of lz.swiglu. The product may be lz.mul's."""

from __future__ import annotations

from dataclasses import replace

from layerzero.client.connection.call import Request
from layerzero.client.planning.token_plans import plan_swiglu
from layerzero.client.plans.dataflow import Flow, kind_of
from layerzero.client.plans.fusing import Fusing
from layerzero.client.plans.passes import Program, choose_chained, may_be_chained
from layerzero.client.plans.recording import Step, Use
from layerzero.client.session.session import Session

NAME = "gating fusion"


def fuse_gating(session: Session, program: Program) -> None:
    fusing = Fusing(session, program, NAME)
    for step in list(program.steps):
        if kind_of(step) in ("mul", "lz.mul") and len(step.args) == 2 and not step.kwargs:
            flow = Flow(program)
            for gate, up in (step.args, step.args[::-1]):
                source = flow.source(gate, step)
                if source is not None and kind_of(source) == "lz.silu" and isinstance(up, Use):
                    _replace(fusing, flow, source, step, up)
                    break
    fusing.close()


def _replace(fusing: Fusing, flow: Flow, silu: Step, product: Step, up: Use) -> None:
    program, made = fusing.program, fusing.program.value(product.made[0])
    assert silu.request is not None
    x, y = program.value(silu.args[0]), program.value(up)
    if y.obj.shape != x.obj.shape or str(y.obj.dtype) != str(x.obj.dtype) or y.array is None or x.array is None:
        return fusing.refuse("gate and up are of several shapes or dtypes")
    if any(one is not None and (one.backend or one.timeout_s) for one in (silu.request, product.request)):
        return fusing.refuse("its call names a backend or a time limit")
    is_in_place = not product.fresh and [w.writers for w in product.writes] == [[product.number]]
    if not is_in_place and (product.writes or not flow.is_inside([silu], product)):
        return fusing.refuse("silu's result is used elsewhere, too")
    if not flow.is_steady([x, y], [silu, product]) or y.storage is made.storage:
        return fusing.refuse("what it takes is written to meanwhile")
    request = Request("swiglu", (x.obj, y.obj), {}, plan_swiglu)
    uses = (Use(x.number), Use(y.number))
    step = replace(product, name="swiglu", args=uses, reads=(x.number, y.number), function=None, writes=())
    step.request = replace(request, args=())
    if is_in_place:
        begin, end = flow.place[silu.number], flow.place[product.number]
        others = [one for one in flow.readers(made.storage) if begin < flow.place[one.number] < end]
        if others:
            return fusing.refuse("silu's result is used elsewhere, too")
        step.fresh = product.writes
    if not may_be_chained(program, step):
        return fusing.refuse("its arrays do not lie where a worker reaches them")
    tried = fusing.tried(request, [made.obj] if made.storage.writers in ([], [product.number]) else [])
    if tried is None:
        return None
    step.kernel, step.kernel_us, _ = tried
    if is_in_place:
        made.storage.writers.remove(product.number)
        made.storage.made_by = product.number
    program.steps = [step if one is product else one for one in program.steps if one is not silu]
    program.recording.steps[product.number] = step
    choose_chained(program)
    at = f"{silu.number} silu, {product.number} at {product.where}"
    fusing.done.append(f"{at} are lz.swiglu, tried with {step.kernel}")
    return None
