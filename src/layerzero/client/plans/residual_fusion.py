"""The pass that makes lz.rms_norm(x + residual) one call of lz.add_rms_norm, which gives the sum, too. The sum may be
lz.add's."""

from __future__ import annotations

from dataclasses import replace

from layerzero.client.connection.call import Request
from layerzero.client.planning.norm_plans import plan_add_rms_norm
from layerzero.client.plans.dataflow import Flow, is_whole, kind_of
from layerzero.client.plans.fusing import Fusing
from layerzero.client.plans.passes import Program, choose_chained, may_be_chained
from layerzero.client.plans.recording import STEP, Step, Use
from layerzero.client.session.session import Session

NAME = "residual fusion"


def fuse_residuals(session: Session, program: Program) -> None:
    fusing = Fusing(session, program, NAME)
    for norm in list(program.steps):
        if kind_of(norm) == "lz.rms_norm" and not norm.kwargs and not norm.writes:
            flow = Flow(program)
            added = flow.source(norm.args[0], norm)
            is_sum = added is not None and kind_of(added) in ("add", "lz.add")
            if added is not None and is_sum and len(added.args) == 2 and not added.kwargs:
                _replace(fusing, flow, added, norm)
    fusing.close()


def _replace(fusing: Fusing, flow: Flow, added: Step, norm: Step) -> None:
    """The call stands where the sum was made: what reads that may do so before the norm was."""
    program, asked = fusing.program, norm.request
    assert asked is not None
    out, summed = program.value(norm.made[0]), program.value(added.made[0])
    if not all(isinstance(arg, Use) for arg in added.args):
        return fusing.refuse("a number is added")
    terms = [program.value(arg) for arg in added.args]
    weight = program.value(norm.args[1]) if isinstance(norm.args[1], Use) else None
    taken = [*terms, *([] if weight is None else [weight])]
    shape, dtype = summed.obj.shape, str(summed.obj.dtype)
    if any(one.obj.shape != shape or str(one.obj.dtype) != dtype or one.array is None for one in terms):
        return fusing.refuse("what is added has several shapes or dtypes")
    if any(one is not None and (one.backend or one.timeout_s) for one in (asked, added.request)):
        return fusing.refuse("its call names a backend or a time limit")
    if added.writes or len(added.fresh) != 1 or summed.storage.writers or out.storage.writers:
        return fusing.refuse("the sum or its norm is written to")
    if weight is not None and weight.storage.origin == STEP:
        return fusing.refuse("its weight is another step's result")
    if not flow.is_steady(taken, [added, norm]) or not is_whole(out):
        return fusing.refuse("what it takes is written to meanwhile")
    arrays = (*(one.obj for one in terms), None if weight is None else weight.obj)
    request = Request("add_rms_norm", arrays, asked.params, plan_add_rms_norm)
    uses = tuple(Use(one.number) for one in terms) + ((None,) if weight is None else (Use(weight.number),))
    step = replace(norm, name="add_rms_norm", args=uses, reads=tuple(one.number for one in taken))
    step.made, step.fresh = (out.number, summed.number), (out.storage, summed.storage)
    step.result = (Use(out.number), Use(summed.number))
    step.request = replace(request, args=())
    if not may_be_chained(program, step):
        return fusing.refuse("its arrays do not lie where a worker reaches them")
    tried = fusing.tried(request, (out.obj, summed.obj))
    if tried is None:
        return None
    step.kernel, step.kernel_us, _ = tried
    summed.storage.made_by = norm.number
    program.steps = [step if one is added else one for one in program.steps if one is not norm]
    program.recording.steps[norm.number] = step
    choose_chained(program)
    at = f"{added.number} {added.name}, {norm.number} rms_norm at {norm.where}"
    fusing.done.append(f"{at} are lz.add_rms_norm, tried with {step.kernel}")
    return None
