"""Which dtypes an op takes together, and which it gives; what kernels compute in.

Nothing is listed here. Shape functions (ipc/vocabulary/shapes.py) refuse what does not belong together, to clients,
broker and workers alike: the table of an op is what they say of calls in all dtypes. What a kernel computes in is in
its descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from layerzero.capabilities.descriptor import KernelCapability
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.quantized_shapes import PACKED
from layerzero.ipc.vocabulary.shapes import outputs_of
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, ITEMSIZE, TensorSpec

# Attributes that name dtypes or formats.
TYPE_ATTRS = ("dtype", "format", "weight_format")

Inputs = tuple["TensorSpec | None", ...]


class Sample(NamedTuple):
    """A call of which the op says what it gives."""

    inputs: Inputs
    attrs: Mapping[str, Any]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Rule:
    """Dtypes that an op takes together. `data`: of the inputs that are always given and whose dtype is not fixed;
    `gives`: of its outputs. `others`: the dtypes that other inputs may have then."""

    data: tuple[str, ...]
    attrs: tuple[tuple[str, str], ...]
    gives: tuple[str, ...]
    others: dict[str, list[str]] = field(default_factory=dict, compare=False)
    samples: list[Sample] = field(default_factory=list, compare=False)


class Refusal(NamedTuple):
    """Dtypes that an op does not take together: what was found, and what is allowed in its place."""

    dtypes: tuple[tuple[str, str], ...]
    attrs: tuple[tuple[str, str], ...]
    found: str
    allowed: str


class TypeTable(NamedTuple):
    op: str
    data: tuple[str, ...]
    rules: list[Rule]
    refusals: list[Refusal]


def data_inputs(op: str) -> tuple[str, ...]:
    """The inputs whose dtypes a rule is of: never left out, and neither indices nor of a fixed dtype. Of an op that has
    indices alone, all that are never left out."""
    kind = OPS[op]
    always = [name for name in kind.inputs if name not in kind.optional]
    return tuple(name for name in always if name not in kind.indices | kind.singles) or tuple(always)


def type_table(op: str, samples: Iterable[tuple[Inputs, Mapping[str, Any]]]) -> TypeTable:
    """What the shape function says of these calls, and of each of them with one tensor in another dtype."""
    names = data_inputs(op)
    rules: dict[Any, Rule] = {}
    refused: dict[Any, Refusal] = {}
    known: set[Any] = set()
    for inputs, attrs in samples:
        if _judge(op, names, inputs, attrs, rules, refused, known):
            for other in _varied(inputs):
                _judge(op, names, other, attrs, rules, refused, known)
    taken = {(_typed(op, one.inputs), rule.attrs) for rule in rules.values() for one in rule.samples}
    return TypeTable(op, names, list(rules.values()), [one for key, one in refused.items() if key not in taken])


def computes_in(kernel: KernelCapability, dtype: str, gives: str) -> str:
    """What a kernel adds up data of this dtype in: what its descriptor says, and never less than the floats that go in
    or come out. Integers that stay what they are wrap in their own dtype."""
    declared = dtype if kernel.compute_dtype == "same" or dtype == gives not in FLOAT_DTYPES else kernel.compute_dtype
    if declared not in FLOAT_DTYPES:
        return declared
    return max((declared, *(one for one in (dtype, gives) if one in FLOAT_DTYPES)), key=ITEMSIZE.__getitem__)


def _judge(
    op: str,
    names: Sequence[str],
    inputs: Inputs,
    attrs: Mapping[str, Any],
    rules: dict[Any, Rule],
    refused: dict[Any, Refusal],
    known: set[Any],
) -> bool:
    """Whether the op takes this call and nothing was known of such dtypes; notes what it says."""
    typed, types = _typed(op, inputs), _type_attrs(attrs)
    if (typed, types, "taken") in known:
        return False
    try:
        made = outputs_of(op, inputs, attrs)
    except InvalidArgument as exc:
        found, _, allowed = str(exc).removeprefix(f"{op}: ").partition("; allowed: ")
        refused.setdefault((typed, types), Refusal(typed, types, found, allowed))
        return False
    known.add((typed, types, "taken"))
    dtypes = dict(typed)
    data, gives = tuple(dtypes[name] for name in names), tuple(dtype for dtype, _ in made)
    rule = rules.setdefault((data, types), Rule(data, types, gives))
    for name, dtype in typed:
        if name not in names and dtype not in rule.others.setdefault(name, []):
            rule.others[name].append(dtype)
    rule.samples.append(Sample(inputs, attrs, tuple(TensorSpec.contiguous(*one) for one in made)))
    return True


def _typed(op: str, inputs: Inputs) -> tuple[tuple[str, str], ...]:
    return tuple((name, spec.dtype) for name, spec in zip(OPS[op].inputs, inputs, strict=True) if spec is not None)


def _type_attrs(attrs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(attrs[name])) for name in TYPE_ATTRS if attrs.get(name))


def _varied(inputs: Inputs) -> Iterator[Inputs]:
    """With one tensor in another dtype, of as many numbers."""
    for place, spec in enumerate(inputs):
        if spec is None:
            continue
        for dtype in ITEMSIZE:
            if dtype != spec.dtype:
                yield (*inputs[:place], _in_dtype(spec, dtype), *inputs[place + 1 :])


def _in_dtype(spec: TensorSpec, dtype: str) -> TensorSpec:
    *rows, extent = spec.shape or (1,)
    if spec.dtype == PACKED:
        extent *= 2
    elif dtype == PACKED and extent % 2 == 0:
        extent //= 2
    return TensorSpec.contiguous(dtype, (*rows, extent) if spec.shape else ())
