"""The pass that makes several projections of one array (queries, keys and values; gate and up) one: their weights are
laid side by side once, and what each has given is a part of the one result, in place, with other strides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.client.arrays.recognition import Array, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.connection import arena as arenas
from layerzero.client.plans.dataflow import Flow, is_whole
from layerzero.client.plans.fusing import Fusing
from layerzero.client.plans.passes import Program, choose_chained, is_view, may_be_chained
from layerzero.client.plans.recording import CONSTANT, STEP, Step, Storage, Use, Value
from layerzero.client.session.session import Session
from layerzero.ipc.vocabulary.tensors import TensorSpec

NAME = "projection fusion"
_JOINED = {"linear": 0, "matmul": 1}  # the dimension of the weights that is the result's last one


def fuse_projections(session: Session, program: Program) -> None:
    fusing = Fusing(session, program, NAME)
    for group in _groups(program):
        _join(fusing, group)
    fusing.close()


def _groups(program: Program) -> list[list[Step]]:
    """Calls of one op on one array, with weights that are constants."""
    found: dict[Any, list[Step]] = {}
    for step in program.steps:
        request = step.request
        if request is None or request.op not in _JOINED or step.number not in program.chained:
            continue
        x, weight, *bias = (None if arg is None else program.value(arg) for arg in step.args)
        assert x is not None
        assert weight is not None
        assert x.array is not None
        homes = [value.storage for value in (weight, *bias) if value is not None]
        if any(home.origin != CONSTANT for home in homes) or weight.obj.ndim != 2 or x.obj.ndim < 2:
            continue
        rows = weight.obj.shape[1 - _JOINED[request.op]]
        asked = tuple(sorted(request.params.items()))  # of linear an activation
        what = (request.op, request.backend, asked, rows, tuple(b is None for b in bias))
        found.setdefault((what, x.storage.number, x.offset, x.array.spec), []).append(step)
    return [group for group in found.values() if len(group) > 1]


def _join(fusing: Fusing, group: list[Step]) -> None:
    program, flow, first = fusing.program, Flow(fusing.program), group[0]
    request = first.request
    assert request is not None
    places = [place for place in range(1, len(first.args)) if first.args[place] is not None]
    weights = [[program.value(step.args[place]) for step in group] for place in places]
    homes = [value.storage for row in weights for value in row]
    if any(home.number not in program.immutable or home.writers for home in homes):
        return fusing.refuse("weights could change; fixed_weights=True says that they do not")
    x = program.value(first.args[0])
    if not flow.is_steady([x], group):
        return fusing.refuse("what they take is written to meanwhile")
    made = [program.value(step.made[0]) for step in group]
    widths = [value.obj.shape[-1] for value in made]
    moved = _moved(program, flow, made, widths)
    if isinstance(moved, str):
        return fusing.refuse(moved)
    joined = [_side_by_side(row, _JOINED[request.op] if row[0].obj.ndim == 2 else 0) for row in weights]
    asked = replace(request, args=(x.obj, *joined, *[None] * (len(first.args) - 1 - len(joined))))
    tried = fusing.tried(asked, [value.obj for value in made])
    if tried is None:
        return None
    kernel, us, result = tried
    step = _as_one(program, group, joined, result)
    step.kernel, step.kernel_us = kernel, us
    for value, spec, at in moved:
        assert value.array is not None
        value.array = Array(value.array.kind, spec, 0, value.obj, None)
        value.storage, value.offset = step.fresh[0], at
    numbers = {one.number for one in group}
    left = [one for one in program.steps if one is first or one.number not in numbers]
    program.steps = [step if one is first else one for one in left]
    choose_chained(program)
    assert may_be_chained(program, step), "a call on the same array, into memory of its own"
    names = ", ".join(str(one.number) for one in group)
    fusing.done.append(f"{names} {request.op} at {first.where} are one, {sum(widths)} wide, tried with {kernel}")
    return None


def _as_one(program: Program, group: list[Step], joined: list[Any], result: Any) -> Step:
    recording, first = program.recording, group[0]
    assert first.request is not None
    uses: list[Use | None] = [first.args[0]]
    for obj in joined:
        array = describe(obj)
        home = Storage(len(recording.storages), CONSTANT, len(recording.constants), array.address, array.nbytes)
        recording.storages.append(home)
        program.immutable.add(home.number)
        recording.constants.append(len(recording.values))
        uses.append(Use(len(recording.values)))
        recording.values.append(Value(len(recording.values), obj, array, home, 0))
    uses += [None] * (len(first.args) - len(uses))
    number = len(recording.steps)
    home = Storage(len(recording.storages), STEP, number, 0, result.nbytes)
    recording.storages.append(home)
    made = Value(len(recording.values), result, describe(result), home, 0)
    recording.values.append(made)
    reads = tuple(use.value for use in uses if use is not None)
    what = {"args": tuple(uses), "reads": reads, "result": Use(made.number), "made": (made.number,), "fresh": (home,)}
    step = replace(first, number=number, name=first.request.op, **what)  # type: ignore[arg-type]  # of its own fields
    recording.steps.append(step)
    return step


def _side_by_side(row: list[Value], dimension: int) -> Any:
    """Weights, or biases, in one array in memory that workers reach."""
    first = row[0].array
    assert first is not None
    shape = list(first.spec.shape)
    shape[dimension] = sum(value.obj.shape[dimension] for value in row)
    spec = TensorSpec.contiguous(first.spec.dtype, tuple(shape))
    memory, _, _ = arenas.pool.allocate(spec.span_bytes)
    whole, _ = wrap(memory, spec, first)
    at = 0
    for value in row:
        width = value.obj.shape[dimension]
        part = whole[at : at + width] if dimension == 0 else whole[:, at : at + width]
        part[...] = value.obj.detach() if hasattr(value.obj, "detach") else value.obj
        at += width
    return whole


def _moved(
    program: Program, flow: Flow, made: list[Value], widths: list[int]
) -> list[tuple[Value, TensorSpec, int]] | str:
    """Each value that lies in one of the results, with its strides and first byte in the one result; or why there is
    one that cannot lie there."""
    found: list[tuple[Value, TensorSpec, int]] = []
    total, at = sum(widths), 0
    for one, width in zip(made, widths, strict=True):
        home = one.storage
        if not is_whole(one) or home.writers:
            return "a result is written to later"
        if home.number in flow.given:
            return "a result is the caller's"
        if any(not is_view(step) and step.number not in program.chained for step in flow.readers(home)):
            return "a step of own code takes a result"
        for value in program.recording.values:
            if value.storage is home:
                spec = None if value.array is None or value.array.needs_copy else value.array.spec
                strides = None if spec is None else _strides_in(spec, value.offset // spec.itemsize, width, total)
                if spec is None or strides is None:
                    return "a view of a result puts rows behind each other"
                row, column = divmod(value.offset // spec.itemsize, width)
                offset = (row * total + at + column) * spec.itemsize
                found.append((value, TensorSpec(spec.dtype, spec.shape, strides), offset))
        at += width
    return found


def _strides_in(spec: TensorSpec, first: int, width: int, total: int) -> tuple[int, ...] | None:
    """Of a view of rows of `width` elements, when those rows are `total` apart. None where a dimension goes from the
    end of a row on to the next one."""
    strides, reach = [], first % width
    for extent, stride in zip(spec.shape, spec.strides, strict=True):
        if extent == 1:
            strides.append(stride)  # what describe() says of such a dimension depends on the shape alone
        elif stride % width == 0:
            strides.append(stride // width * total)
        else:
            reach += (extent - 1) * stride
            strides.append(stride)
    return tuple(strides) if reach < width else None
