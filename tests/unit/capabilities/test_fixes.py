"""What would have to change: advice is only given where following it leads to acceptance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.example_counts import examples
from tests.unit.capabilities.calls import ATTENTION, TOKENIZER, attention_call, call, kernel, spec
from tests.unit.capabilities.test_context import KERNELS, contexts

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.fixes import NOTHING, adaptation, copied_bytes, counterfactual
from layerzero.capabilities.match import Rejection, match, memory_rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

X = spec(2, 8)
GAPS = spec(2, 8, strides=(9, 1))
Q = spec(1, 4, 6, 16)
BSHD = spec(1, 6, 4, 16).permute(0, 2, 1, 3)
LAYER_NORM = {"optional_args": ["bias"], "required_args": ["weight"]}

# The call, the kernel, the change, its transforms.
FIXES: dict[str, tuple[SelectionContext, KernelCapability, str, tuple[str, ...]]] = {
    "dense input": (
        call("silu", GAPS, out=X), kernel(requires_contiguous=True), "make x contiguous", ("contiguous x",),
    ),
    "dense output": (
        call("silu", X, out=GAPS), kernel(requires_contiguous=True), "take the result in a contiguous out=",
        ("contiguous out",),
    ),
    "rows": (
        call("silu", spec(2, 8, strides=(1, 2))), kernel(requires_last_dim_stride1=True), "make x contiguous",
        ("contiguous x",),
    ),
    "wider dtype": (
        call("silu", spec(4, dtype="bfloat16"), out=spec(4, dtype="bfloat16")), kernel(),
        "cast x bfloat16->float32, cast out float32->bfloat16",
        ("cast x bfloat16->float32", "cast out float32->bfloat16"),
    ),
    "narrower dtype": (
        call("silu", spec(4, dtype="float64")), kernel(), "cast x float64->float32", ("cast x float64->float32",),
    ),
    "one dtype of two": (
        call("matmul", X, spec(8, 2, dtype="float16")), kernel(), "cast b float16->float32",
        ("cast b float16->float32",),
    ),
    "index dtype": (
        call("embedding", spec(3, dtype="int32"), X), kernel(index_dtypes=["int64"]), "cast ids int32->int64",
        ("cast ids int32->int64",),
    ),
    "dtype and memory": (
        call("silu", spec(2, 8, dtype="float64", strides=(9, 1))), kernel(requires_contiguous=True),
        "cast x float64->float32; make x contiguous", ("cast x float64->float32", "contiguous x"),
    ),
    "argument too many": (
        call("linear", X, X, spec(2)), kernel(), "leave out bias and apply it to the result yourself", (),
    ),
    "argument too few": (
        call("layer_norm", X, None, None), kernel(**LAYER_NORM), "pass ones([8]) as weight", (),
    ),
    "bias too few": (
        call("linear", X, spec(3, 8), None), kernel(required_args=["bias"]), "pass zeros([3]) as bias", (),
    ),
    "attribute": (
        call("gelu", X, approximate="tanh"), kernel(attrs={"approximate": ["none"]}),
        "pass approximate='none', which changes the result", (),
    ),
    "offsets": (
        call("tokenize", *[spec(3, dtype="uint8")] * 3, return_offsets=True), kernel(**TOKENIZER),
        "pass return_offsets=False, which changes the result", (),
    ),
    "scale": (
        attention_call(Q, scale=1.0), kernel(**ATTENTION, supports_scale=False),
        "multiply q by 4 and leave out scale", ("scale q",),
    ),
    "layout": (
        attention_call(BSHD, layout="BSHD", out=BSHD), kernel(**ATTENTION), "pass q, k, v in layout BHSD",
        ("layout BSHD->BHSD", "contiguous q", "contiguous k", "contiguous v", "contiguous out"),
    ),
    "head_dim": (
        attention_call(spec(1, 4, 6, 12), out=spec(1, 4, 6, 12)), kernel(**ATTENTION),
        "pad head_dim of q, k, v with zeros from 12 to 16, and drop the padding of the result",
        ("pad q", "pad k", "pad v"),
    ),
    "small head_dim": (
        attention_call(spec(1, 4, 6, 4)), kernel(**ATTENTION), "pad head_dim of q, k, v with zeros from 4 to 8",
        ("pad q", "pad k", "pad v"),
    ),
    "grouped heads": (
        attention_call(Q, spec(1, 2, 6, 16)), kernel(**ATTENTION),
        "repeat each head of k and v 2 times (repeat_interleave)", ("repeat k", "repeat v"),
    ),
    "bool mask": (
        attention_call(Q, mask=spec(1, 1, 6, 6, dtype="bool")), kernel(**ATTENTION | {"attn_mask_types": ["float"]}),
        "pass attn_mask as float32: 0 where it is True, -inf where it is False", ("cast attn_mask bool->float32",),
    ),
    "mask dtype": (
        attention_call(Q, mask=spec(1, 1, 6, 6, dtype="float16")),
        kernel(**ATTENTION | {"attn_mask_types": ["float"], "dtypes": ["float32"]}),
        "cast attn_mask float16->float32", ("cast attn_mask float16->float32",),
    ),
    "mask for all heads": (
        attention_call(Q, mask=spec(1, 1, 6, 6, dtype="bool")), kernel(**ATTENTION, attn_mask_layouts=["per_head"]),
        "repeat attn_mask for each of the 4 heads", ("repeat attn_mask",),
    ),
    "causal rule": (
        attention_call(Q, spec(1, 4, 9, 16), is_causal=True, causal_alignment="bottom_right"), kernel(**ATTENTION),
        "pass the bottom_right causal rule as a bool attn_mask instead of is_causal=True", (),
    ),
    "packed weights": (
        call("linear", X, X, None), kernel(requires_packed_weights=True, supports_prepack=True),
        "pack the weights for lib.op", ("pack weight",),
    ),
    "determinism": (
        call("silu", X, requires_deterministic=True), kernel(deterministic=False),
        "set requires_deterministic: false in the policy", (),
    ),
    "jit": (
        call("silu", X, allow_jit_compile=False), kernel(needs_jit=True),
        "set allow_jit_compile: true in the policy", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXES)
def test_fix_names_the_change_and_leads_to_acceptance(name: str) -> None:
    """Advice that does not help is worse than none."""
    context, capability, change, transforms = FIXES[name]
    rejections = match(context, capability)
    fix = counterfactual(context, capability, rejections)
    assert rejections
    assert fix is not None
    assert (fix.change, fix.transforms) == (change, transforms)
    assert fix.codes == tuple(dict.fromkeys(rejection.code for rejection in rejections))
    assert match(fix.context, capability) == []


def test_memory_fix_is_the_headroom_that_still_fits() -> None:
    """One byte more would be refused again."""
    context, capability = (
        call("silu", X, memory_headroom_bytes=900, free_memory_bytes=1000),
        kernel(workspace_bytes=300),
    )
    rejection = memory_rejection(context, capability)
    assert rejection is not None
    fix = counterfactual(context, capability, [rejection])
    assert fix is not None
    assert fix.change == "set memory_headroom_bytes to 700 or less in the policy"
    assert memory_rejection(fix.context, capability) is None
    too_much = kernel(workspace_bytes=1001)
    rejection = memory_rejection(context, too_much)
    assert rejection is not None
    assert counterfactual(context, too_much, [rejection]) is None


@pytest.mark.parametrize(
    ("context", "capability"),
    [
        (call("silu", X), kernel(platform="cuda")),
        (call("silu", X), kernel(requires_isa=["avx512f"])),
        (call("silu", spec(0, 8)), kernel()),
        (call("softmax", X), kernel(min_ndim=3)),
        (call("silu", spec(4, dtype="int8")), kernel()),
        (call("dynamic_quantize", X, format="int8", groups=1, symmetric=True), kernel()),
        (call("linear", X, X, None), kernel(requires_packed_weights=True)),
        (attention_call(spec(1, 4, 6, 128)), kernel(**ATTENTION)),
        (attention_call(spec(1, 4, 6, 60)), kernel(**ATTENTION | {"head_dim_multiple": 48})),
        (attention_call(spec(1, 4, 513, 16)), kernel(**ATTENTION)),
        (attention_call(Q, spec(1, 3, 6, 16)), kernel(**ATTENTION)),
        (attention_call(Q, mask=spec(1, 1, 6, 6)), kernel(**ATTENTION)),
        (attention_call(Q, mask=spec(1, 1, 5, 6, dtype="bool")), kernel(**ATTENTION)),
        (attention_call(Q, kv_cache_layout="NHD"), kernel(**ATTENTION)),
        (call("tokenize", *[spec(3, dtype="uint8")] * 3), kernel(**TOKENIZER, vocab_hashes=["a"])),
        (attention_call(GAPS.unsqueeze(0).unsqueeze(0), layout="BSHD"),
         kernel(**ATTENTION, produces_layout="BSHD", requires_contiguous=True)),
    ],
)  # fmt: skip
def test_nothing_is_advised_where_no_change_helps(context: SelectionContext, capability: KernelCapability) -> None:
    """Other hardware, other data: that is not a change of the call."""
    rejections = match(context, capability)
    assert rejections
    assert counterfactual(context, capability, rejections) is None


@pytest.mark.parametrize(
    ("code", "detail", "change"),
    [
        (Reason.NOT_PINNED, "the call is pinned to 'a'", "leave out backend= (the call is pinned to 'a')"),
        (Reason.NOT_INSTALLED, "run: lz env build b", "build the environment (run: lz env build b)"),
        (Reason.BACKEND_DISABLED, "run: lz env probe b", "repair the backend (run: lz env probe b)"),
        (Reason.POLICY_DENIED, "avoid: b", "change the policy (avoid: b)"),
        (Reason.POLICY_LOCKED, "lock: a", "change the policy (lock: a)"),
    ],
)
def test_what_lies_outside_of_the_call_is_named_beside_its_changes(code: Reason, detail: str, change: str) -> None:
    """Both are needed before the kernel serves the call."""
    assert_fix(call("silu", X), kernel(), [Rejection(code, detail)], change)
    context, capability = call("silu", GAPS), kernel(requires_contiguous=True)
    both = [*match(context, capability), Rejection(code, detail)]
    assert_fix(context, capability, both, f"make x contiguous; {change}")


def assert_fix(
    context: SelectionContext, capability: KernelCapability, rejections: list[Rejection], change: str
) -> None:
    fix = counterfactual(context, capability, rejections)
    assert fix is not None
    assert (fix.change, fix.codes) == (change, tuple(r.code for r in rejections))


@pytest.mark.parametrize("code", [Reason.NOT_CERTIFIED, Reason.BACKEND_RESTARTING, Reason.OP_UNSUPPORTED])
def test_state_that_nobody_can_change_has_no_fix(code: Reason) -> None:
    """ "Wait" and "write the kernel" are no changes."""
    assert counterfactual(call("silu", X), kernel(), [Rejection(code, "")]) is None


def test_accepted_call_needs_no_fix() -> None:
    """There is nothing to say."""
    assert counterfactual(call("silu", X), kernel(), []) is None
    assert adaptation(call("silu", X), kernel()) == NOTHING


# --- what the client does unasked


def test_copies_of_inputs_are_an_adaptation() -> None:
    """The values stay what they are; only their place changes."""
    both = call("matmul", GAPS, spec(8, 2, strides=(1, 8)), out=spec(2, 2))
    found = adaptation(both, kernel(requires_contiguous=True))
    assert found is not None
    assert found.transforms == ("contiguous a", "contiguous b")
    assert copied_bytes(both, found.transforms) == 128


def test_layout_is_advice_and_no_adaptation() -> None:
    """The client makes inputs contiguous unasked; to rearrange inputs and result is the caller's to decide."""
    context = attention_call(BSHD, layout="BSHD", out=BSHD)
    assert adaptation(context, kernel(**ATTENTION)) is None
    fix = counterfactual(context, kernel(**ATTENTION), match(context, kernel(**ATTENTION)))
    assert fix is not None
    assert fix.change == "pass q, k, v in layout BHSD"


@pytest.mark.parametrize(
    ("context", "capability"),
    [
        (call("silu", spec(2, 8, dtype="float64", strides=(9, 1))), kernel(requires_contiguous=True)),
        (call("silu", spec(2, 8, dtype="float64")), kernel()),
        (call("silu", X, out=GAPS), kernel(requires_contiguous=True)),
        (call("silu", GAPS, out=GAPS), kernel(requires_contiguous=True)),
    ],
    ids=["dtype too", "dtype", "output", "output too"],
)
def test_nothing_else_is_adapted_unasked(context: SelectionContext, capability: KernelCapability) -> None:
    """A cast changes the result, and the caller's out= is where the result has to be."""
    assert adaptation(context, capability) is None


@pytest.mark.parametrize("op", sorted(KERNELS))
@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_advised_or_adapted_is_accepted(op: str, data: st.DataObject) -> None:
    """Over all kinds of calls and kernels, also those that nobody thought of."""
    context = data.draw(contexts(op))
    for capability in KERNELS[op]:
        rejections = match(context, capability)
        fix = counterfactual(context, capability, rejections)
        if fix is not None:
            assert match(fix.context, capability) == []
            assert copied_bytes(context, fix.transforms) >= 0
        found = adaptation(context, capability)
        if found is not None and not any(t.startswith("layout") for t in found.transforms):
            names = {transform.split()[1] for transform in found.transforms}
            dense = [
                TensorSpec.contiguous(spec.dtype, spec.shape) if spec is not None and name in names else spec
                for name, spec in zip(OPS[op].inputs, context.inputs, strict=True)
            ]
            changed = replace(context, inputs=tuple(dense))
            assert match(changed, capability) == []
