"""Whether two runs of a function were the same but for the numbers in its arguments: only then is it made a plan."""

from __future__ import annotations

from typing import Any

from layerzero.client.plans.recording import CONSTANT, MAX_CONSTANT_BYTES, Recording, Step, Use, Value, digest
from layerzero.client.plans.traced import map_leaves

KEPT, NEW = "kept", "new"


def difference(one: Recording, other: Recording, *, bakes_constants: bool) -> str:
    """What differs first, in words for a person; "" for nothing. Without `bakes_constants` an array that the function
    makes anew, and not of its arguments, counts as different: what it is made of may change, and none would see it."""
    if len(one.steps) != len(other.steps):
        return f"it made {len(one.steps)} steps in one run and {len(other.steps)} in the next"
    for first, second in zip(one.steps, other.steps, strict=True):
        found = _between(first, second)
        if found:
            return f"step {first.number}, {first.name} at {first.where}: {found}"
    if len(one.values) != len(other.values) or one.inputs != other.inputs:
        return "its arrays are others"
    for value, again in zip(one.values, other.values, strict=True):
        if _shape_of(value) != _shape_of(again):
            return f"array {value.number} is {_named(value)} in one run and {_named(again)} in the next"
        kind = constant_kind(value, again) if value.storage.origin == CONSTANT else KEPT
        if kind is None:
            return f"the {_named(value)} that it does not get as an argument has other numbers at each run"
        if kind == NEW and not bakes_constants and not _is_scalar(value):
            return (
                f"it makes a {_named(value)} anew at each run, and not of its arguments: make it once, outside, "
                "or pass bake_constants=True if what it is made of never changes"
            )
    return "" if same_leaves(one.output, other.output) else "its result is made otherwise"


def constant_kind(value: Value, again: Value) -> str | None:
    """KEPT for an array that is the same memory in both runs, NEW for one made anew with the same numbers; None for
    neither."""
    if value.obj is again.obj or (
        value.array is not None and again.array is not None and value.array.address == again.array.address != 0
    ):
        return KEPT
    nbytes = getattr(value.obj, "nbytes", 0)
    return NEW if nbytes <= MAX_CONSTANT_BYTES and digest(value) == digest(again) else None


def _is_scalar(value: Value) -> bool:
    """A number in NumPy's clothes, such as numpy.float32(2): as numbers of Python it is part of the program."""
    return not value.storage.nbytes and not value.obj.shape


def _between(one: Step, other: Step) -> str:
    if one.name != other.name or (one.request is None) != (other.request is None):
        return f"it was {other.name} in the next run"
    if one.request is not None and other.request is not None:
        first, second = one.request, other.request
        asked = [(r.backend, r.timeout_s, r.output_bytes, r.is_rigid) for r in (first, second)]
        if asked[0] != asked[1] or not same_leaves(first.params, second.params):
            return f"it was called with {second.params} in the next run"
    elif one.function != other.function:
        return "it was another function in the next run"
    if not same_leaves(one.args, other.args) or not same_leaves(one.kwargs, other.kwargs):
        return "its arguments were others in the next run"
    written = [[storage.number for storage in step.writes] for step in (one, other)]
    if one.made != other.made or not same_leaves(one.result, other.result) or written[0] != written[1]:
        return "what it made was other in the next run"
    return ""


def same_leaves(one: Any, other: Any) -> bool:
    """Whether structures and all that is in them are equal; arrays are Use."""
    leaves: list[list[Any]] = [[], []]

    def collect(found: list[Any]) -> Any:
        def take(leaf: Any) -> None:
            found.append(leaf)

        return take

    shapes = [map_leaves(value, collect(found)) for value, found in zip((one, other), leaves, strict=True)]
    if repr(shapes[0]) != repr(shapes[1]) or len(leaves[0]) != len(leaves[1]):
        return False
    return all(_is_equal(a, b) for a, b in zip(*leaves, strict=True))


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (Use, str, bytes, int, bool)):
        return bool(one == other)
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # not a number is equal to itself here, 0.0 is not -0.0
    try:
        return bool(one == other)
    except Exception:  # an object that cannot be compared is another one
        return False


def _named(value: Value) -> str:
    """Its dtype and shape."""
    return str(value.array.spec) if value.array is not None else f"{value.obj.dtype}{list(value.obj.shape)}"


def _shape_of(value: Value) -> tuple[Any, ...]:
    array, home = value.array, value.storage
    shape = (str(value.obj.dtype), tuple(value.obj.shape)) if array is None else (str(array.spec), array.spec.strides)
    return (shape, home.number, home.origin, value.offset if home.nbytes else 0)
