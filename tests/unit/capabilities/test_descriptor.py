"""Descriptors fail closed: what is not understood disables the backend, and the message says where and why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerzero.capabilities import descriptor
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import Capability, DescriptorError
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

DESCRIPTORS = sorted((Path(descriptor.__file__).parent / "descriptors").glob("*.json"))
GOOD: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "lib",
    "backend_version": "1.2",
    "platform": "cpu",
    "ops": {
        "silu": [
            {"kernel_id": "lib.silu", "priority": 50, "source": "doc", "dtypes": ["float32"], "deterministic": True}
        ],
        "attention": [
            {
                "kernel_id": "lib.attention",
                "priority": 50,
                "source": "doc",
                "dtypes": ["float32"],
                "deterministic": True,
                "requires_layouts": ["BHSD"],
                "causal_alignments": ["top_left"],
                "masked_rows": "zero",
            }
        ],
        "tokenize": [
            {
                "kernel_id": "lib.tokenize",
                "priority": 50,
                "source": "doc",
                "deterministic": True,
                "tokenizer_formats": ["0.13"],
            }
        ],
    },
}
Change = Callable[[dict[str, Any]], Any]


def silu(data: dict[str, Any]) -> dict[str, Any]:
    kernel: dict[str, Any] = data["ops"]["silu"][0]
    return kernel


def first(data: dict[str, Any], op: str) -> dict[str, Any]:
    kernel: dict[str, Any] = data["ops"][op][0]
    return kernel


def test_good_descriptor_survives_a_round_trip() -> None:
    """What is written back must mean the same, and the hash is part of every cached decision."""
    capability = descriptor.parse(json.dumps(GOOD), "lib.json")
    again = descriptor.parse(capability.model_dump_json(), "lib.json")
    assert (again, again.hash) == (capability, capability.hash)


def test_hash_changes_with_any_claim() -> None:
    """A cached decision must not outlive the claim it rests on."""
    changed = copy.deepcopy(GOOD)
    silu(changed)["supports_empty"] = True
    assert descriptor.parse(json.dumps(changed), "").hash != descriptor.parse(json.dumps(GOOD), "").hash


BROKEN: dict[str, tuple[Change, str]] = {
    "no backend": (lambda d: d.pop("backend"), "backend: Field required"),
    "bad name": (lambda d: d.update(backend="../evil"), "backend: String should match pattern"),
    "long name": (lambda d: d.update(backend="a" * 65), "backend: String should match pattern"),
    "unknown platform": (
        lambda d: d.update(platform="tpu"),
        "platform: Input should be 'cpu', 'cuda', 'rocm', 'xpu' or 'hpu'",
    ),
    "unknown field": (lambda d: d.update(flavour="mint"), "flavour: unknown field flavour; known: schema_version, "),
    "unknown constraint": (
        lambda d: silu(d).update(max_heads=8),
        "unknown field max_heads; did you mean max_head_dim?",
    ),
    "no source": (lambda d: silu(d).pop("source"), "source: Field required"),
    "no word on determinism": (lambda d: silu(d).pop("deterministic"), "deterministic: Field required"),
    "priority too high": (lambda d: silu(d).update(priority=101), "less than or equal to 100"),
    "priority below zero": (lambda d: silu(d).update(priority=-1), "greater than or equal to 0"),
    "unknown dtype": (lambda d: silu(d).update(dtypes=["float8"]), "unknown dtypes"),
    "unknown index dtype": (lambda d: silu(d).update(index_dtypes=["int3"]), "unknown dtypes"),
    "no dtypes": (lambda d: silu(d).pop("dtypes"), "missing constraint dtypes"),
    "op without kernels": (lambda d: d["ops"].update(gelu=[]), "lists no kernel"),
    "kernel id twice": (lambda d: d["ops"].update(gelu=d["ops"]["silu"]), "given twice: lib.silu"),
    "head dims crossed": (
        lambda d: first(d, "attention").update(min_head_dim=64, max_head_dim=32),
        "max_head_dim 32 is below min_head_dim 64",
    ),
    "zero head dim": (lambda d: first(d, "attention").update(head_dim_multiple=0), "greater than or equal to 1"),
    "attention without layouts": (lambda d: first(d, "attention").pop("requires_layouts"), "requires_layouts"),
    "attention without alignment": (lambda d: first(d, "attention").pop("causal_alignments"), "causal_alignments"),
    "attention without masked rows": (lambda d: first(d, "attention").pop("masked_rows"), "masked_rows"),
    "unknown layout": (lambda d: first(d, "attention").update(requires_layouts=["SBHD"]), "'BHSD' or 'BSHD'"),
    "unknown mask type": (lambda d: first(d, "attention").update(attn_mask_types=["int"]), "'bool' or 'float'"),
    "tokenizer without formats": (lambda d: first(d, "tokenize").pop("tokenizer_formats"), "tokenizer_formats"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_descriptor_is_refused(name: str) -> None:
    """A claim that is not understood must not be taken for granted."""
    change, text = BROKEN[name]
    data = copy.deepcopy(GOOD)
    change(data)
    with pytest.raises(DescriptorError) as caught:
        descriptor.parse(json.dumps(data), "lib.json")
    assert text in caught.value.message
    assert caught.value.message.startswith("lib.json: ")
    assert caught.value.reason is Reason.CAPABILITIES_INVALID


@pytest.mark.parametrize("version", ["1.1", "2.0", 1.0, None])
def test_unknown_schema_version_has_a_reason_of_its_own(version: object) -> None:
    """The repair is another release, not an edit."""
    with pytest.raises(DescriptorError) as caught:
        descriptor.parse(json.dumps({**GOOD, "schema_version": version}), "lib.json")
    assert caught.value.reason is Reason.CAPABILITIES_SCHEMA_MISMATCH


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": "1.0"'])
def test_text_that_is_no_descriptor_is_refused(text: str) -> None:
    """A half-written file must not stop the broker."""
    with pytest.raises(DescriptorError):
        descriptor.parse(text, "lib.json")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    """It disables its backend only."""
    with pytest.raises(DescriptorError, match="cannot be read"):
        descriptor.load(tmp_path / "gone.json")


@pytest.mark.parametrize("path", DESCRIPTORS, ids=lambda path: path.stem)
def test_our_own_descriptors_say_nothing_twice(path: Path) -> None:
    """Of two values of a key JSON keeps the last."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert len(keys) == len(set(keys)), keys
        return dict(pairs)

    json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)


@pytest.mark.parametrize("path", DESCRIPTORS, ids=lambda path: path.stem)
def test_our_own_descriptors_are_good(path: Path) -> None:
    """Each names itself, and only ops, attributes and arguments that exist."""
    capability: Capability = descriptor.load(path)
    assert capability.backend == path.stem
    for op, kernels in capability.ops.items():
        for kernel in kernels:
            assert kernel.kernel_id.endswith(op) or "." in kernel.kernel_id
            assert set(kernel.attrs) <= set(OPS[op].attrs)
            assert {*kernel.optional_args, *kernel.required_args} <= OPS[op].optional


@pytest.mark.parametrize("dtype", sorted(FLOAT_DTYPES))
@pytest.mark.parametrize("op", ["matmul", "softmax", "silu", "gelu", "layer_norm", "rms_norm"])
def test_torch_takes_any_memory_and_any_float(op: str, dtype: str) -> None:
    """It is the last resort: when it refuses, the call fails."""
    attrs: dict[str, Any] = {"softmax": {"dim": 0, "dtype": ""}, "gelu": {"approximate": "tanh"}}.get(op, {})
    if op.endswith("norm"):
        attrs = {"ndim": 1, "eps": 1e-5}
    (kernel,) = descriptor.load(next(path for path in DESCRIPTORS if path.stem == "torch")).ops[op]
    absent = (None,) * len(OPS[op].optional)
    for strided in (
        TensorSpec(dtype, (3, 3), (1, 3)),
        TensorSpec(dtype, (3, 3), (0, 0)),
        TensorSpec(dtype, (0, 3), (3, 1)),
    ):
        inputs = (*(strided,) * (len(OPS[op].inputs) - len(absent)), *absent)
        assert match(SelectionContext(op, inputs, (strided,), attrs, DeviceSpec()), kernel) == []
