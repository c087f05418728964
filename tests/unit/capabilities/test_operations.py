"""OperationSpecs say of every op what its vocabulary, its references and its kernels say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import reference

from layerzero.capabilities import descriptor
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import TOKENIZER_OPS
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.capabilities.operations import OPERATIONS, TOKENIZER_METADATA, OperationSpec
from layerzero.ipc.vocabulary.numerics import tolerance
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

ROOT = Path(descriptor.__file__).resolve().parents[1]
SHIPPED = [
    descriptor.load(path)
    for path in sorted((ROOT / "src" / "layerzero" / "capabilities" / "descriptors").glob("*.json"))
]
ALL = [pytest.param(spec, id=spec.op_id) for spec in OPERATIONS.values()]


def test_every_op_has_its_operation() -> None:
    """An op without a stated meaning cannot be certified."""
    assert list(OPERATIONS) == list(OPS)


@pytest.mark.parametrize("spec", ALL)
def test_operation_agrees_with_the_vocabulary(spec: OperationSpec) -> None:
    """Two lists of what an op takes would drift apart."""
    op = OPS[spec.op_id]
    assert (spec.optional_inputs, spec.attributes) == (op.optional, op.attrs)
    assert bool(spec.layouts) == ("layout" in op.attrs)
    assert (spec.op_kind == "tokenization") == (spec.op_id in TOKENIZER_OPS)
    assert spec.returns_offsets == ("return_offsets" in op.attrs)
    assert spec.tokenization_metadata_required == (TOKENIZER_METADATA if spec.op_id in TOKENIZER_OPS else ())
    assert (spec.output_kind == "none") == (op.outputs == ())


@pytest.mark.parametrize("spec", ALL)
def test_tolerances_are_those_that_certificates_use(spec: OperationSpec) -> None:
    """A promise that nobody checks against is no promise."""
    if spec.precision_tolerances:
        assert set(spec.precision_tolerances) == FLOAT_DTYPES
        assert all(tolerance(dtype) == value for dtype, value in spec.precision_tolerances.items())
        assert spec.precision_tolerances == reference.TOLERANCE


@pytest.mark.parametrize("spec", ALL)
def test_what_an_operation_allows_some_kernel_serves(spec: OperationSpec) -> None:
    """Layouts and grouped heads that every kernel refuses would be allowed on paper only."""
    kernels = {k.kernel_id: k for capability in SHIPPED for k in capability.ops.get(spec.op_id, ())}
    assert spec.fallback_impl in kernels
    fallback = kernels[spec.fallback_impl]
    assert set(spec.layouts) <= set(fallback.requires_layouts)
    assert spec.supports_gqa == any(k.supports_gqa for k in kernels.values())
    assert spec.returns_offsets == any(k.supports_offsets for k in kernels.values())


@pytest.mark.parametrize("dtype", sorted(FLOAT_DTYPES))
@pytest.mark.parametrize("op", ["matmul", "softmax", "silu", "gelu", "layer_norm", "rms_norm"])
def test_fallback_takes_any_memory_and_any_float(op: str, dtype: str) -> None:
    """It is the last resort: when it refuses, the call fails."""
    attrs = {"softmax": {"dim": 0}, "gelu": {"approximate": "tanh"}}.get(op, {})
    if op.endswith("norm"):
        attrs = {"ndim": 1, "eps": 1e-5}
    (fallback,) = (
        k for capability in SHIPPED for k in capability.ops.get(op, ()) if k.kernel_id == OPERATIONS[op].fallback_impl
    )
    for strided in (
        TensorSpec(dtype, (3, 3), (1, 3)),
        TensorSpec(dtype, (3, 3), (0, 0)),
        TensorSpec(dtype, (0, 3), (3, 1)),
    ):
        optional = [None] * len(OPS[op].optional)
        needed = [strided] * (len(OPS[op].inputs) - len(optional))
        context = SelectionContext.of(op, [*needed, *optional], [strided], attrs, DeviceSpec())
        assert match(context, fallback) == []


def test_documentation_has_a_section_for_each() -> None:
    """docs/ops.md is what users read."""
    document = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert [line[3:] for line in document.splitlines() if line[3:] in OPS] == list(OPERATIONS)
