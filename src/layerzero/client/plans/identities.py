"""The pass that leaves out what changes nothing: views that are what they are made of, copies that nobody writes to,
and arithmetic whose result has the bits of its argument."""

from __future__ import annotations

from layerzero.client.plans.dataflow import Flow, is_same, kind_of, number_of
from layerzero.client.plans.passes import Program, is_view, leave_out
from layerzero.client.plans.recording import Step, Use, Value

_COPIES = frozenset(("copy", "clone", "contiguous", "ascontiguousarray", "astype", "to", "float", "array", "pos"))


def leave_out_identities(program: Program) -> None:
    """Where the result is not the caller's, and neither memory is written to later."""
    flow, found = Flow(program), list[Step]()
    for step in program.steps:
        source = _is_what(program, flow, step)
        if source is None:
            continue
        made = program.value(step.made[0])
        if made.number != source.number:
            program.renamed.update({n: source.number for n, to in program.renamed.items() if to == made.number})
            program.renamed[made.number] = source.number
        if step.fresh:
            for value in program.recording.values:
                if value.storage is step.fresh[0]:
                    value.storage, value.offset = source.storage, value.offset + source.offset
        found.append(step)
    leave_out(program, found, "identities", "whose result is what they take")


def _is_what(program: Program, flow: Flow, step: Step) -> Value | None:
    """The value that the step gives once more."""
    if step.request is not None or step.writes or len(step.made) != 1 or not isinstance(step.result, Use):
        return None
    made, reads = program.value(step.made[0]), [program.value(number) for number in step.reads]
    if made.storage.number in flow.given or made.array is None or made.array.needs_copy:
        return None
    if is_view(step):  # also of a view: transposes that cancel
        same = (v for v in program.recording.values if v.number <= made.number and is_same(v, made))
        first = next((program.value(v.number) for v in same), made)
        is_plain = kind_of(step) not in ("", "detach") and _flags(first) == _flags(made)
        return first if is_plain and first is not made else None
    source = _of_the_same_bits(program, step, reads)
    if source is None or source.array is None or not step.fresh:
        return None
    homes = (made.storage, source.storage)
    is_alike = source.array.spec == made.array.spec and source.array.kind == made.array.kind
    is_alike = is_alike and made.array.spec.is_contiguous and _flags(source) == _flags(made) and made.offset == 0
    place = flow.place[step.number]
    if not is_alike or any(flow.place.get(n, 0) > place for home in homes for n in home.writers):
        return None
    return source


def _of_the_same_bits(program: Program, step: Step, reads: list[Value]) -> Value | None:
    kind = kind_of(step)
    if kind in _COPIES and len(reads) == 1 and "out" not in step.kwargs:
        return reads[0]
    if kind not in ("mul", "truediv", "sub", "add") or len(step.args) != 2 or step.kwargs:
        return None
    first, second = step.args
    one, other = number_of(program, first), number_of(program, second)
    source = first if one is None else second
    number = other if one is None else one
    if number is None or not isinstance(source, Use):
        return None
    value = program.value(source)
    is_float = "float" in str(value.obj.dtype)
    zero_is_kept = kind == "sub" or str(number) == "-0.0" or not is_float  # -0.0 + 0.0 is 0.0
    if one is not None and kind in ("sub", "truediv"):
        return None
    is_neutral = number == 1 if kind in ("mul", "truediv") else number == 0 and zero_is_kept
    return value if is_neutral and (kind != "sub" or str(number) != "-0.0" or not is_float) else None


def _flags(value: Value) -> tuple[object, ...]:
    """What else than its elements makes an array another one."""
    obj = value.obj
    flags = getattr(obj, "flags", None)
    return (type(obj), getattr(obj, "requires_grad", False), getattr(flags, "writeable", True))
