"""The pass that makes softmax(q @ k^T * scale + mask) @ v one call of lz.attention, however it is written: by lz ops,
by NumPy's or torch's functions, or with a softmax of max, exp and sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from layerzero.client.arrays.recognition import describe
from layerzero.client.connection.call import Request
from layerzero.client.planning.attention_plans import plan_attention
from layerzero.client.plans.dataflow import Flow, is_same, kind_of, number_of
from layerzero.client.plans.fusing import Fusing
from layerzero.client.plans.passes import Program, choose_chained, may_be_chained
from layerzero.client.plans.recording import Step, Use, Value
from layerzero.client.session.session import Session

NAME = "attention fusion"
_PRODUCTS = ("matmul", "lz.matmul")


@dataclass
class _Found:
    """`steps` are those before the last product, `keys` the transposed ones."""

    last: Step
    values: Use
    queries: Use | None = None
    keys: Use | None = None
    mask: Any = None
    scale: float = 1.0
    steps: list[Step] = field(default_factory=list)


def fuse_attention(session: Session, program: Program) -> None:
    fusing = Fusing(session, program, NAME)
    for step in list(program.steps):
        if kind_of(step) in _PRODUCTS:
            flow = Flow(program)
            found = _find(flow, step)
            if found is not None:
                _replace(fusing, flow, found)
    fusing.close()


def _replace(fusing: Fusing, flow: Flow, found: _Found) -> None:
    program, last = fusing.program, found.last
    q, k, v = (program.value(use) for use in (found.queries, found.keys, found.values) if use is not None)
    mask = None if found.mask is None else program.value(found.mask)
    taken = [value for value in (q, k, v, mask) if value is not None]
    inner = [*found.steps, last]
    pinned = [step.request for step in inner if step.request is not None]
    if any(request.backend or request.timeout_s for request in pinned):
        return fusing.refuse("its calls name a backend or a time limit")
    if not flow.is_inside(found.steps, last):
        return fusing.refuse("its scores or weights are used elsewhere, too")
    if not flow.is_steady(taken, inner):
        return fusing.refuse("what it takes is written to meanwhile")
    made = program.value(last.made[0])
    kinds = {str(value.obj.dtype) for step in inner for value in map(program.value, step.made)}
    if kinds != {str(q.obj.dtype)}:
        return fusing.refuse("its steps have several dtypes")
    keys = _transposed(program, k)
    params: dict[str, Any] = {"dropout_p": 0.0, "is_causal": False, "scale": found.scale, "enable_gqa": False}
    params |= {"layout": "BHSD", "causal_alignment": "top_left"}
    params |= {"window_size": (-1, -1), "softcap": 0.0}
    arrays = [value.obj for value in (q, keys, v)] + [None if mask is None else mask.obj, None, None]
    request = Request("attention", tuple(arrays), params, plan_attention)
    uses = tuple(None if value is None else Use(value.number) for value in (q, keys, v, mask, None, None))
    step = replace(last, name="attention", args=uses, kwargs={}, function=None)
    step.reads = tuple(use.value for use in uses if use is not None)
    step.request = replace(request, args=())
    if not may_be_chained(program, step):
        return fusing.refuse("its arrays do not lie where a worker reaches them")
    tried = fusing.tried(request, () if made.storage.writers else (made.obj,))
    if tried is None:
        return None
    step.kernel, step.kernel_us, _ = tried
    gone = {one.number for one in found.steps}
    program.steps = [step if one is last else one for one in program.steps if one.number not in gone]
    program.recording.steps[last.number] = step
    choose_chained(program)
    names = ", ".join(f"{one.number} {one.name}" for one in inner)
    fusing.done.append(f"{names} at {last.where} are lz.attention, tried with {step.kernel}")
    return None


def _transposed(program: Program, keys: Value) -> Value:
    """The value whose last two dimensions are those of the keys, exchanged: one that there is, or a new view."""
    obj = keys.obj
    turned = obj.transpose(-1, -2) if hasattr(obj, "data_ptr") else obj.swapaxes(-1, -2)
    value = Value(len(program.recording.values), turned, describe(turned), keys.storage, keys.offset)
    for known in program.recording.values:
        if is_same(known, value):
            return known
    program.recording.values.append(value)
    return value


# --- how it may be written


def _find(flow: Flow, last: Step) -> _Found | None:
    """From the last product back to the first one."""
    if len(last.args) != 2 or last.writes or last.kwargs or len(last.made) != 1:
        return None
    weights, values = last.args
    if not isinstance(values, Use) or flow.program.value(values).obj.ndim < 2:
        return None
    found = _Found(last, values)
    scores = _before_softmax(flow, weights, last, found)
    return found if scores is not None and _scores(flow, *scores, found) else None


def _before_softmax(flow: Flow, weights: Any, reader: Step, found: _Found) -> tuple[Any, Step] | None:
    """What the softmax is of, and the step that takes it there."""
    step = flow.source(weights, reader)
    if step is None:
        return None
    kind = kind_of(step)
    ndim = flow.program.value(step.made[0]).obj.ndim
    if kind == "lz.softmax" and step.request is not None:
        found.steps.append(step)
        params = step.request.params
        is_plain = params["dim"] in (-1, ndim - 1) and params.get("dtype") is None
        return (step.args[0], step) if is_plain else None
    if kind == "softmax":
        found.steps.append(step)
        return (step.args[0], step) if _dimension(step) in (-1, ndim - 1) else None
    if kind != "truediv" or len(step.args) != 2:
        return None
    powers, total = (flow.source(arg, step) for arg in step.args)
    if powers is None or total is None or kind_of(powers) != "exp" or not _is_reduced(flow, total, "sum"):
        return None
    if flow.source(total.args[0], total) is not powers:
        return None
    found.steps += [step, total, powers]
    shifted = flow.source(powers.args[0], powers)
    if shifted is None or kind_of(shifted) != "sub" or len(shifted.args) != 2:
        return powers.args[0], powers
    largest = flow.source(shifted.args[1], shifted)
    is_shift = largest is not None and _is_reduced(flow, largest, "max")
    if largest is None or not is_shift or not _is_read_alike(flow, shifted, largest):
        return None
    found.steps += [shifted, largest]
    return shifted.args[0], shifted


def _is_read_alike(flow: Flow, shifted: Step, largest: Step) -> bool:
    """Whether both take the same scores."""
    one, other = flow.source(shifted.args[0], shifted), flow.source(largest.args[0], largest)
    return one is not None and one is other


def _scores(flow: Flow, use: Any, reader: Step, found: _Found) -> bool:
    """From what the softmax is of to the first product: scale and mask on the way."""
    is_scaled = False
    while True:
        step = flow.source(use, reader)
        if step is None or step in found.steps:
            return False
        found.steps.append(step)
        kind = kind_of(step)
        if kind in _PRODUCTS and len(step.args) == 2 and not step.kwargs:
            found.queries, found.keys = step.args
            return all(isinstance(arg, Use) and flow.program.value(arg).obj.ndim >= 2 for arg in step.args)
        scaled = _scaled(flow.program, step) if kind in ("mul", "truediv") else None
        if scaled is not None:
            use, factor = scaled
            found.scale, is_scaled = found.scale * factor, True
        elif found.mask is None and not is_scaled:  # what is scaled afterwards would scale the mask, too
            masked = next(_masked(flow, step), None)
            if masked is None:
                return False
            use, found.mask = masked
        else:
            return False
        reader = step


def _scaled(program: Program, step: Step) -> tuple[Any, float] | None:
    if len(step.args) != 2 or step.kwargs:
        return None
    first, second = step.args
    number = number_of(program, second)
    if number is not None:
        return (first, number if kind_of(step) == "mul" else 1 / number) if number else None
    number = number_of(program, first)
    return (second, number) if number is not None and kind_of(step) == "mul" else None


def _masked(flow: Flow, step: Step) -> Iterator[tuple[Any, Any]]:
    """The scores and the mask: an array that is added, or one of bool where others become -inf."""
    if kind_of(step) == "add" and len(step.args) == 2 and not step.kwargs:
        for scores, mask in (step.args, step.args[::-1]):
            source = flow.source(scores, step)
            is_mask = isinstance(mask, Use) and flow.program.value(mask).obj.shape
            if source is not None and is_mask and kind_of(source) in (*_PRODUCTS, "mul", "truediv"):
                yield scores, mask
    if kind_of(step) == "where" and len(step.args) == 3 and isinstance(step.args[0], Use):
        mask, scores, other = step.args
        if number_of(flow.program, other) == -math.inf and "bool" in str(flow.program.value(mask).obj.dtype):
            yield scores, mask


def _dimension(step: Step) -> Any:
    """Of a reduction or softmax, where nothing else was asked for."""
    named = [step.kwargs[name] for name in ("dim", "axis") if name in step.kwargs]
    rest = {k: v for k, v in step.kwargs.items() if k not in ("dim", "axis", "keepdim", "keepdims") and v is not None}
    rest.pop("_stacklevel", None)
    if rest or len(step.args) + len(named) != 2:
        return None
    return named[0] if named else step.args[1]


def _is_reduced(flow: Flow, step: Step, name: str) -> bool:
    """Along the last dimension, which stays."""
    is_kept = step.kwargs.get("keepdims", step.kwargs.get("keepdim")) is True
    ndim = flow.program.value(step.made[0]).obj.ndim
    return kind_of(step) == name and is_kept and _dimension(step) in (-1, ndim - 1)
