"""selection/neighbours.py: which extents may be others, held against rankings of the calls themselves."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.signatures import planned
from tests.unit.broker.selection.test_signature import OURS, route_of

from layerzero.broker.selection.certification import Certification, Subject
from layerzero.broker.selection.neighbours import neighbourhood
from layerzero.broker.selection.policy import Policy
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.device import DeviceSpec
from layerzero.client.planning import attention_plans, plans
from layerzero.client.planning.plans import Plan
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.neighbours import Neighbourhood
from layerzero.ipc.vocabulary.ops import CALLED_OPS, OPS
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.ipc.vocabulary.tensors import TensorSpec

# The others write into their arguments, have results whose size the data decides, or no tensors.
HAVE_NEIGHBOURS = CALLED_OPS.keys() - {"append_kv", "copy_kv_blocks", "detokenize", "function", "null", "tokenize"}


def spec_of(plan: Plan) -> CallSpec:
    return CallSpec.parse(route_of(plan))


def found_for(spec: CallSpec, engine: Engine) -> Neighbourhood | None:
    context = engine.context(spec)
    return neighbourhood(engine, spec, context, engine.rank(spec, context, {}, 0.0))


def ranking(spec: CallSpec, engine: Engine) -> list[Any]:
    ranked = engine.rank(spec, engine.context(spec), {}, 0.0)
    return [(one.kernel_id, one.is_accepted, one.terms, {reason.code for reason in one.reasons}) for one in ranked]


def neighbours_of(spec: CallSpec, near: Neighbourhood, rng: Random) -> list[CallSpec]:
    """Some of them, those at the ends among them; none whose extents do not belong together."""
    made, base = [], (*spec.inputs, *spec.outputs)
    lows, highs = ([its[end] for its in near.ranges] for end in (0, 1))
    for values in (lows, highs, *([rng.randint(*its) for its in near.ranges] for _ in range(12))):
        specs = near.apply(base, values)
        if specs is None:
            continue
        count = len(spec.inputs)
        outputs = tuple(one for one in specs[count:] if one is not None)
        try:
            check_call(spec.op, specs[:count], outputs, spec.attrs)
        except InvalidArgument:
            continue
        made.append(replace(spec, inputs=specs[:count], outputs=outputs))
    return made


@pytest.mark.parametrize("op", sorted(CALLED_OPS))
def test_neighbours_are_ranked_alike(op: str) -> None:
    """This is what lets a client do without the broker."""
    engine, compared = Engine(OURS, DeviceSpec()), 0
    for seed in range(60):
        rng = Random(seed)
        spec = spec_of(planned(op, rng))
        near = found_for(spec, engine)
        for other in () if near is None else neighbours_of(spec, near, rng):
            compared += other != spec
            assert ranking(other, engine) == ranking(spec, engine)
            assert engine.context(other).perf_key() == engine.context(spec).perf_key()
    assert bool(compared) == (op in HAVE_NEIGHBOURS)


def attention(queries: int, keys: int, *, heads: int = 4, dim: int = 64, **more: Any) -> CallSpec:
    q, k = (TensorSpec.contiguous("float32", (2, heads, n, dim)) for n in (queries, keys))
    return spec_of(attention_plans.plan_attention(q, k, k, **more))


def linear(rows: int, wide: int = 48) -> CallSpec:
    x, weight = (TensorSpec.contiguous("float32", shape) for shape in ((rows, wide), (2 * wide, wide)))
    return spec_of(plans.plan_linear(x, weight, None))


@pytest.mark.parametrize(
    ("spec", "ranges"),
    [
        (attention(1, 200), ((129, 256),)),  # one query over a cache
        (attention(200, 200), ((129, 256),)),  # a prompt
        (attention(200, 200, is_causal=True), ((129, 256),)),
        (attention(70, 300), ((65, 128), (257, 512))),
        (linear(200), ((33, 64), (65, 128), (129, 256))),
    ],
)
def test_lengths_move_within_their_bucket(spec: CallSpec, ranges: tuple[tuple[int, int], ...]) -> None:
    """Heads and what a head is wide stay: rules read them."""
    near = found_for(spec, Engine(OURS, DeviceSpec()))
    assert near is not None
    assert near.ranges == ranges


def test_lengths_that_may_meet_stay() -> None:
    """As many queries as keys are another call, for the causal rule."""
    assert found_for(attention(130, 140, is_causal=True), Engine(OURS, DeviceSpec())) is None


def test_rows_move_beside_a_width_of_the_same_bucket() -> None:
    """Every new length of a layer went by the broker where its width was between the same powers of two."""
    engine, spec = Engine(OURS, DeviceSpec()), linear(400, wide=384)
    near = found_for(spec, engine)
    assert near is not None
    assert near.ranges == ((257, 512), (513, 1024))
    assert near.places == ((0, -1), (1, -1), None, (0, 1))
    others = [near.apply((*spec.inputs, *spec.outputs), (rows, 768)) for rows in (257, 384, 511)]
    for other, rows in zip(others, (257, 384, 511), strict=True):
        wanted = linear(rows, wide=384)
        assert other == (*wanted.inputs, *wanted.outputs)
        assert ranking(wanted, engine) == ranking(spec, engine)


def test_a_class_that_a_kernel_lost_its_certificate_for_is_not_reached() -> None:
    """128 keys are aligned; 100 are ragged, and those one kernel was found to get wrong."""
    engine = Engine(OURS, DeviceSpec())
    spec = attention(1, 128)
    assert found_for(spec, engine) is not None
    (kernel_id, *_) = (kernel_id for kernel_id, _ in engine.kernels("attention"))
    wrong = Subject(kernel_id, "float32", "plain/ragged/dense")
    engine.set_certification(Certification({}).with_quarantine(wrong, "differs"))
    assert found_for(spec, engine) is None


@pytest.mark.parametrize(
    "values", [{"memory_headroom_bytes": 1}, {"rules": [{"match": {"op": "attention"}, "prefer": ["torch.*"]}]}]
)
def test_policy_that_looks_at_sizes_wants_to_see_each_call(values: dict[str, Any]) -> None:
    engine = Engine(OURS, DeviceSpec())
    overlay = {"layers": [{"origin": "test", "values": values}]}
    assert Policy().with_overlay(overlay) is not None
    assert found_for(replace(attention(1, 200), policy=overlay), engine) is None


def test_calls_on_gpus_and_on_text_have_none() -> None:
    engine = Engine(OURS, DeviceSpec())
    for op in ("tokenize", "append_kv", "null"):
        if op in OPS:
            assert found_for(spec_of(planned(op, Random(1))), engine) is None
