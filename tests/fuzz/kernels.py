"""Every kernel of every built environment of a CPU against the float64 reference that certifies it, on calls that
hypothesis makes: extents, strides, offsets, NaN, infinities, denormals, extremes, inputs that share memory.

A call starts from a problem of certification. What the descriptor or the certificate of this machine refuses is not
run, nor what the reference has no number for.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.envs.harness import FILL, STORE, Harness, Harnesses

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.descriptor import load as load_descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.envs.build.build import find, resolve
from layerzero.envs.probe.probe import cached_probe
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.numerics import gather, pack, scatter, tolerance, unpack
from layerzero.ipc.vocabulary.ops import DRAWING, OPS
from layerzero.ipc.vocabulary.shape_class import shape_class
from layerzero.ipc.vocabulary.shapes import outputs_of
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec, contiguous_strides
from layerzero.workers.certify.cases import TAKE_OUTS
from layerzero.workers.certify.problem import Problem, family
from layerzero.workers.certify.problems import PROBLEMS
from layerzero.workers.certify.values import Values

FOLDER = Path(__file__).parents[2] / "src" / "layerzero" / "capabilities" / "descriptors"
MAX_ELEMENTS = 3000  # of a call's inputs: the reference is plain Python
# Whose numbers belong together, or decide which way a row goes.
_OWN_NUMBERS = frozenset(
    {"attention_backward", "moe_route", "moe_mlp", "filter_logits", "penalize_logits", "merge_attention", *DRAWING}
)
_OWN_TENSORS = frozenset({"running_var", "scale", "zero_point"})
# Whose results are elements of inputs, or of one element alone: these bear the largest numbers.
_OF_ONE = frozenset({"relu", "add", "clamp", "where", "cat", "cast", "append_kv", "gather_kv", "copy_kv_blocks",
                     "embedding", "max_pool", "adaptive_max_pool", "moe_permute", "sigmoid", "tanh", "silu",
                     "gelu"})  # fmt: skip
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
            "float64": 1.7976931348623157e308}  # fmt: skip
_TINIEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}
PLAIN, ODD, TINY, LARGE = "plain", "NaN and infinities", "denormals", "extremes"


class Refused(Exception):
    """No call, or none that is served."""


class Finding(AssertionError):
    """A kernel gave something else than it must."""


@dataclass(frozen=True, eq=False)
class Target:
    """A kernel in one dtype. `certified`: classes that it is served for; None where no probe has said so."""

    backend: str
    op: str
    kernel: KernelCapability
    dtype: str
    certified: frozenset[str] | None


@dataclass(frozen=True)
class Call:
    """A problem of certification with other extents and numbers, and how its tensors lie in memory: of each an order of
    its dimensions, a gap behind rows, a step between elements, an offset in elements and dimensions of stride 0."""

    problem: Problem
    values: str
    extents: Mapping[int, int]
    layouts: tuple[tuple[int, int, int, int, int], ...]
    alias: bool
    seed: int

    def __repr__(self) -> str:
        return json.dumps(
            {"problem": self.problem.name, "values": self.values, "extents": {**self.extents},
             "layouts": self.layouts, "alias": self.alias, "seed": self.seed}
        )  # fmt: skip


def environments() -> list[str]:
    """Backends of the CPU whose environments are built, and that compute with tensors."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        capability = load_descriptor(path)
        if capability.platform != "cpu" or not PROBLEMS.keys() & capability.ops.keys():
            continue
        with suppress(Exception):
            manifest = resolve(capability.backend)
            if find(manifest, store=STORE) is not None:
                found.append(capability.backend)
    return found


def targets(backend: str) -> Iterator[Target]:
    """Every kernel in every dtype that is served."""
    manifest = resolve(backend)
    record = cached_probe(find(manifest, store=STORE), manifest)
    for op, kernels in load_descriptor(FOLDER / f"{backend}.json").ops.items():
        for kernel in kernels if op in PROBLEMS else ():
            certified = None if record is None else record.certified.get(kernel.kernel_id, {})
            for dtype in kernel.dtypes:
                classes = None if certified is None else frozenset(certified.get(dtype, ()))
                if classes is None or classes:
                    yield Target(backend, op, kernel, dtype, classes)


@cache
def _problems(target: Target) -> list[Problem]:
    claims = target.kernel.model_dump(mode="json")
    return [
        one
        for one in PROBLEMS[target.op](claims)
        if one.is_of(target.dtype)
        and sum(math.prod(values.shape) for values in one.inputs if values is not None) <= MAX_ELEMENTS
    ]


@st.composite
def calls(draw: st.DrawFn, target: Target) -> Call:
    problem = draw(st.sampled_from(_problems(target)))
    kinds = [PLAIN]
    if target.op not in _OWN_NUMBERS and target.dtype in FLOAT_DTYPES:
        kinds += [TINY]
        if not problem.attrs.get("dtype"):  # which may have no such numbers
            kinds += [ODD] if _is_steep(problem) else [ODD, LARGE]
    extents: dict[int, int] = {}
    if not OPS[target.op].indices and target.op not in _OWN_NUMBERS:
        known = sorted({n for one in problem.inputs if one is not None for n in one.shape})
        for extent in draw(st.lists(st.sampled_from(known), max_size=2)) if known else ():
            extents[extent] = draw(st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 33, 64])))
    count = len(OPS[target.op].inputs) + len(OPS[target.op].outputs)
    layout = st.one_of(
        st.just((0, 0, 1, 0, 0)),
        st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 1, 3, 8]), st.integers(1, 3), st.integers(0, 7),
                  st.sampled_from([0, 0, 0, 1, 2, 3])),
    )  # fmt: skip
    layouts = tuple(draw(layout) for _ in range(count))
    values = draw(st.sampled_from(kinds))
    return Call(problem, values, extents, layouts, draw(st.booleans()), draw(st.integers(0, 2**16)))


def _is_steep(problem: Problem) -> bool:
    """Whether a sum that is rounded goes through a function whose result depends on its last digits."""
    return (
        "attention" in problem.op or problem.op in ("mla_decode", "gated_mlp") or bool(problem.attrs.get("activation"))
    )


def _hides(problem: Problem) -> bool:
    """Whether elements have a weight of 0 that kernels may multiply or leave out (docs/ops.md): hidden keys, padding,
    and what lies exactly on an element."""
    attrs = problem.attrs
    if problem.op in ("conv", "conv_transpose", "mla_decode"):  # whose lse of a score of infinity is that, or NaN
        return True
    if problem.op == "interpolate":
        return not attrs["mode"].startswith("nearest")
    is_masked = "attention" in problem.op and any(values is not None for values in problem.inputs[3:])
    return is_masked or bool(attrs.get("is_causal")) or any(name.startswith("window") for name in attrs)


def check(harnesses: Mapping[str, Harness] | Harnesses, target: Target, call: Call) -> None:
    """Run a call. Raises Finding where its result is wrong, Refused where it is none."""
    op, problem = OPS[target.op], call.problem
    rng = np.random.default_rng(call.seed)
    kinds = tuple(
        kind if kind or values is None else target.dtype
        for kind, values in zip(problem.kinds, problem.inputs, strict=True)
    )
    numbers = problem.numbers(family(target.dtype))
    arrays = [
        None if one is None else _numbers(target, call, name, one, bool(own), rng)
        for name, one, own in zip(op.inputs, numbers, problem.kinds, strict=True)
    ]
    is_free = [target.op not in _OWN_NUMBERS and name not in _OWN_TENSORS for name in op.inputs]
    is_free = [free and not own for free, own in zip(is_free, problem.kinds, strict=True)]
    alias = _aliased(arrays, is_free) if call.alias and not op.in_place else {}
    # A row of equal numbers has no variance, by which norms divide what their mean is off.
    may_repeat = [*(free and "eps" not in problem.attrs for free in is_free), *(False for _ in op.outputs)]
    layouts = [layout if free else (*layout[:4], 0) for layout, free in zip(call.layouts, may_repeat, strict=True)]
    for i, j in alias.items():
        arrays[i], layouts[i] = arrays[j], layouts[j]
    specs, blobs = _laid_out(arrays, kinds, layouts, is_written=[name in op.in_place for name in op.inputs])
    try:
        made = outputs_of(target.op, specs, problem.attrs)
    except InvalidArgument as exc:
        raise Refused from exc
    outs = _outputs(target.op, specs, made, layouts[len(op.inputs) :])
    attrs = problem.attrs
    context = SelectionContext(target.op, tuple(specs), tuple(outs), attrs, DeviceSpec())
    if match(context, target.kernel):
        raise Refused
    if target.certified is not None and shape_class(target.op, specs, attrs, outs) not in target.certified:
        raise Refused
    wanted = _solved(target, problem, arrays, kinds)
    offsets = [
        layout[3] * (1 if spec is None else spec.itemsize)
        for layout, spec in zip(layouts, [*specs, *outs], strict=True)
        if spec is not None
    ]
    answer, written = harnesses[target.backend].run(
        target.kernel.kernel_id, target.op, specs, outs, dict(attrs), [blobs], offsets, alias
    )
    if "error" in answer:
        raise Finding(f"{answer['error']['code']}: {answer['error']['message']:.300}")
    for name, spec, memory, want in zip(op.outputs, outs, written, wanted, strict=True):
        place = op.inputs.index(name) if name in op.in_place else None
        before = bytes([FILL]) * spec.span_bytes if place is None else blobs[place]
        _compare(target, problem, name, spec, memory, before, want, len(outs))


def _numbers(
    target: Target, call: Call, name: str, values: Values, has_own: bool, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Those of the problem where they mean something, else others; in other extents always others."""
    shape = tuple(call.extents.get(n, n) for n in values.shape)
    is_free = target.op not in _OWN_NUMBERS and name not in _OWN_TENSORS and not has_own
    if shape == values.shape and (not is_free or call.values == PLAIN):
        return np.array(list(values.flat), dtype=object).reshape(shape)
    if not is_free or target.dtype not in FLOAT_DTYPES:
        if not values.shape or not len(values.flat):
            raise Refused
        return np.array(np.resize(np.array(list(values.flat), dtype=object), shape), dtype=object)
    made = rng.integers(-48, 49, shape) / 16
    if target.op in ("gated_mlp",):
        made = made / 16
    if call.values != PLAIN and made.size:
        chosen = rng.random(shape) < (0.3 if call.values == TINY else 0.08)
        odd = _odd(target, call.values)
        made = np.where(chosen, np.array(odd)[rng.integers(0, len(odd), shape)], made)
    flat = unpack(pack([float(one) for one in made.reshape(-1)], target.dtype), target.dtype)
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return array.reshape(shape)


def _odd(target: Target, kind: str) -> list[float]:
    if kind == ODD:
        return [math.nan, math.inf, -math.inf]
    tiny, largest = _TINIEST[target.dtype], _LARGEST[target.dtype]
    if kind == TINY:
        return [tiny, -tiny, 5 * tiny, -0.0, 0.0]
    if target.op in _OF_ONE:
        return [largest, -largest, largest / 2]
    far = {"float16": 16.0, "bfloat16": 2.0**20, "float32": 2.0**20, "float64": 2.0**40}[target.dtype]
    return [far, -far]


def _aliased(arrays: Sequence[Any], is_free: Sequence[bool]) -> dict[int, int]:
    """The second of two inputs that are alike has the memory of the first."""
    found: dict[int, int] = {}
    for i, one in enumerate(arrays):
        for j in range(i):
            other = arrays[j]
            is_one = one is not None and other is not None and one.shape == other.shape
            if is_one and is_free[i] and is_free[j] and j not in found:
                found[i] = j
                break
    return found


def _laid_out(
    arrays: list[Any], kinds: Sequence[str], layouts: Sequence[tuple[int, int, int, int, int]],
    is_written: Sequence[bool],
) -> tuple[list[TensorSpec | None], list[bytes]]:  # fmt: skip
    specs: list[TensorSpec | None] = []
    blobs: list[bytes] = []
    for place, (kind, layout, written) in enumerate(zip(kinds, layouts, is_written, strict=False)):
        array = arrays[place]
        if array is None:
            specs.append(None)
            blobs.append(b"")
            continue
        repeated = 0 if written or not array.ndim else layout[4] - 1 if 0 < layout[4] <= array.ndim else -1
        if not written and 0 <= repeated < array.ndim and layout[4] and array.shape[repeated]:
            first = array.take([0], repeated)
            arrays[place] = np.broadcast_to(first, array.shape)
            spec = _spec(kind, first.shape, layout)
            memory = _memory(first, spec)
            strides = [0 if n == repeated else s for n, s in enumerate(spec.strides)]
            spec = TensorSpec(kind, arrays[place].shape, tuple(strides))
        else:
            spec = _spec(kind, array.shape, layout)
            memory = _memory(array, spec)
        specs.append(spec)
        blobs.append(memory)
    return specs, blobs


def _spec(dtype: str, shape: tuple[int, ...], layout: tuple[int, int, int, int, int]) -> TensorSpec:
    turn, gap, step, _, _ = layout
    order = list(range(len(shape)))
    if len(shape) > 1 and turn:
        order = order[turn % len(shape) :] + order[: turn % len(shape)]
        if turn > 3:
            order[-1], order[-2] = order[-2], order[-1]
    laid = [shape[d] for d in order]
    strides = contiguous_strides((*laid[:-1], laid[-1] + gap)) if laid else ()
    found = [0] * len(shape)
    for d, stride in zip(order, strides, strict=True):
        found[d] = stride * step
    return TensorSpec(dtype, shape, tuple(found))


def _memory(array: np.ndarray[Any, Any], spec: TensorSpec) -> bytes:
    target = bytearray([FILL]) * spec.span_bytes
    scatter(pack(array.reshape(-1).tolist(), spec.dtype), spec, memoryview(target))
    return bytes(target)


def _outputs(
    op: str, specs: Sequence[TensorSpec | None], made: Sequence[tuple[str, tuple[int, ...]]],
    layouts: Sequence[tuple[int, int, int, int, int]],
) -> list[TensorSpec]:  # fmt: skip
    kind = OPS[op]
    if kind.in_place:
        return [one for name in kind.outputs if (one := specs[kind.inputs.index(name)]) is not None]
    if len(made) > 1 and op not in TAKE_OUTS:
        return [TensorSpec.contiguous(*one) for one in made]
    return [_spec(dtype, shape, layout) for (dtype, shape), layout in zip(made, layouts, strict=True)]


def _solved(target: Target, problem: Problem, arrays: Sequence[Any], kinds: tuple[str, ...]) -> list[list[Any]]:
    inputs = tuple(None if one is None else Values(one.shape, one.reshape(-1).tolist()) for one in arrays)
    exact = Problem(problem.op, problem.name, problem.attrs, inputs, tuple(kind or "-" for kind in kinds))
    try:
        return [list(one.flat) for one in exact.solutions(family(target.dtype))]
    except (OverflowError, ValueError, ZeroDivisionError) as exc:  # Python's, where IEEE 754 has a number
        raise Refused(f"no number: {exc}") from exc


def _compare(
    target: Target,
    problem: Problem,
    name: str,
    spec: TensorSpec,
    memory: bytes,
    before: bytes,
    want: list[Any],
    outs: int,
) -> None:
    if len(memory) != len(before):
        raise Finding(f"{name} has {len(memory)} bytes of {len(before)}")
    owned = bytearray(spec.span_bytes)
    scatter(b"\1" * (spec.numel * spec.itemsize), spec, memoryview(owned))
    if any(a != b and not own for a, b, own in zip(memory, before, owned, strict=True)):
        raise Finding(f"{name}: wrote between its elements")
    have = unpack(gather(memoryview(memory), spec), spec.dtype)
    if _hides(problem):
        kept = [n for n, pair in enumerate(zip(have, want, strict=True)) if all(map(math.isfinite, pair))]
        have, want = [have[n] for n in kept], [want[n] for n in kept]
    wrong = _difference(have, want, spec.dtype)
    allowed = tolerance(spec.dtype if outs == 1 else target.dtype, target.op, spec.dtype)
    if not wrong <= allowed:
        place = max(range(len(have)), key=lambda i: _distance(have[i], want[i]))
        raise Finding(f"{name}: error {wrong:.3g}, allowed {allowed:g}: [{place}] is {have[place]}, not {want[place]}")


def _distance(have: float, want: float) -> float:
    if have == want or (have != have and want != want):
        return 0.0
    return abs(have - want) if math.isfinite(have) and math.isfinite(want) else math.inf


def _difference(have: Sequence[float], want: Sequence[Any], dtype: str) -> float:
    """As numerics.difference has it, but what is beyond the dtype's largest number may become infinite."""
    if dtype not in FLOAT_DTYPES:
        bits = 8 * TensorSpec.contiguous(dtype, ()).itemsize
        low = 0 if dtype[0] == "u" or dtype == "bool" or "int" not in dtype else 1 << bits - 1
        if "int" in dtype:
            want = [(int(one) + low) % (1 << bits) - low for one in want]
        return max(map(_distance, have, want), default=0.0)
    largest = _LARGEST[dtype]
    edge = largest * (1 - 4 * tolerance(dtype))
    scale, found = 1.0, 0.0
    for one, wanted in zip(have, want, strict=True):
        if abs(wanted) > edge and abs(one) > edge and (one > 0) == (wanted > 0):
            continue
        if math.isfinite(wanted):
            scale = max(scale, abs(wanted))
        found = max(found, _distance(one, wanted))
    return found / scale


def fuzz(
    backend: str, seconds: float, *, first: int = 0, examples: int = 8, only: Callable[[Target], bool] | None = None
) -> dict[str, Any]:
    """Every kernel of a backend in turn, until the time is over. What was found of a kernel's dtype with such numbers
    is told once, of its smallest call; a kernel with three of them is left out then."""
    harnesses, counts = Harnesses(), Counter[str]()
    found: dict[str, dict[str, tuple[int, str]]] = {}
    every = [one for one in targets(backend) if only is None or only(one)]
    end, turn = time.monotonic() + seconds, first
    try:
        while time.monotonic() < end and every:
            for target in random.Random(turn).sample(every, len(every)):
                known = found.setdefault(f"{target.kernel.kernel_id} {target.dtype}", {})
                if time.monotonic() < end and len(known) < 3 and _problems(target):
                    try_kernel(harnesses, target, examples, turn, counts, known)
            turn += 1
    finally:
        harnesses.close()
    told = {name: {kind: text for kind, (_, text) in one.items()} for name, one in found.items() if one}
    kernels = len({one.kernel.kernel_id for one in every})
    return {
        "backend": backend,
        "kernels": kernels,
        "targets": len(every),
        "turns": turn - first,
        **counts,
        "found": told,
    }


def try_kernel(
    harnesses: Mapping[str, Harness] | Harnesses, target: Target, examples: int, number: int, counts: Counter[str],
    known: dict[str, tuple[int, str]],
) -> None:  # fmt: skip
    """So many calls of one kernel. Not shrunk: most problems are small, and a call takes milliseconds."""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(calls(target))
    def holds(call: Call) -> None:
        try:
            check(harnesses, target, call)
            counts["calls"] += 1
        except Refused:
            counts["refused"] += 1
        except Finding as exc:
            size = sum(math.prod(one.shape) for one in call.problem.inputs if one is not None) + len(repr(call))
            known[call.values] = min(known.get(call.values, (size, f"{exc}: {call!r}")), (size, f"{exc}: {call!r}"))

    holds()
