"""Profiles: which calls belong to one, and what is said of those that do not."""

from __future__ import annotations

import pytest

from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.profiles import ALL, PROFILES, Profile, of_calls, of_key
from layerzero.ipc.vocabulary.ops import OPS, PUBLIC_OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec


def pairs(profile: Profile) -> set[tuple[str, str]]:
    assert profile.calls is not None
    return {(op, dtype) for op, dtypes in profile.calls.items() for dtype in dtypes}


def test_what_belongs_to_a_profile_belongs_to_the_larger_ones() -> None:
    """Who takes a larger one loses no call; each lacks something."""
    nlp, quantized, inference = (pairs(PROFILES[name]) for name in ("nlp", "quantized", "inference"))
    assert nlp < quantized < inference
    assert {op for op, _ in inference} < PUBLIC_OPS.keys()


@pytest.mark.parametrize(
    ("profile", "op", "dtype", "said"),
    [
        ("nlp", "attention", "bfloat16", ""),
        ("nlp", "tokenize", "any", ""),
        ("nlp", "null", "any", ""),
        ("nlp", "function", "uint8", ""),
        ("nlp", "conv", "float32", "profile nlp has no conv"),
        (
            "nlp",
            "silu",
            "float64",
            "profile nlp has silu in bfloat16, float16, float32, bool, int32, int64, and not in float64",
        ),
        ("quantized", "scaled_linear", "float4_e2m1fn_x2", ""),
        ("inference", "attention_backward", "float32", "profile inference has no attention_backward"),
        ("all", "attention_backward", "float64", ""),
    ],
)
def test_a_call_outside_of_a_profile_is_told_what_belongs_to_it(profile: str, op: str, dtype: str, said: str) -> None:
    """Never silence: the reason names the profile and what it has of the op."""
    assert PROFILES[profile].refusal(op, dtype) == said
    assert PROFILES[profile].has(op, dtype) is not bool(said)


def test_hashes_are_of_what_belongs_to_a_profile() -> None:
    """A verdict on a profile that was learned anew since is no verdict on it."""
    one, other = (of_calls("mine", [("silu", dtype)]) for dtype in ("float32", "float64"))
    assert one.hash == of_calls("theirs", [("silu", "float32"), ("silu", "float32")]).hash
    assert len({"", one.hash, other.hash}) == 3
    assert ALL.hash == ""


def test_a_key_of_measured_times_tells_op_and_dtype() -> None:
    """The dtype that certificates are by: that of the weight of an embedding, not that of its indices."""
    ids, weight = TensorSpec.contiguous("int64", (3,)), TensorSpec.contiguous("float16", (5, 4))
    out = TensorSpec.contiguous("float16", (3, 4))
    context = SelectionContext("embedding", (ids, weight), (out,), {}, DeviceSpec(device_uuid="cpu-1"))
    assert of_key(context.perf_key()) == ("embedding", "float16")
    assert of_key("attention q:float32[2x4x8x8]/rows k:float32[2x4x8x8] is_causal=True") == ("attention", "float32")
    assert of_key("tokenize tokenizer:uint8[64] text:uint8[8] text_splits:int64[2]") == ("tokenize", "any")
    assert "forgotten" not in OPS
    assert of_key("forgotten x:float32[1]") is None
    assert of_key("function frame:uint8[0] of=") is None
