"""The calls that tests/gpu/test_lifting.py lifts, which only a machine with a GPU makes: that they are calls of today's
ops."""

from __future__ import annotations

from typing import Any

import pytest
from tests.gpu.lifting_calls import Kind, certified, kinds
from tests.gpu.test_lifting import MUST
from tests.unit.workers.gpu.cuda_kernels import KERNELS

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.workers.certify.claims import admits


def check(op: str, kernel: dict[str, Any], kind: Kind) -> None:
    call = kind.call
    assert (call.op, call.kernel_id) == (op, kernel["kernel_id"])
    assert (len(call.inputs), len(call.outputs)) == (len(OPS[op].inputs), len(OPS[op].outputs))
    assert len(kind.alignments) == len(call.inputs) + len(call.outputs)
    check_call(op, call.inputs, call.outputs, call.attrs)
    assert admits(op, kernel, call.inputs, call.outputs, call.attrs)


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_there_is_a_call_of_each_kernel_that_can_be_lifted(op: str, kernel: dict[str, Any]) -> None:
    found = list(kinds(op, kernel))
    for kind in found:
        check(op, kernel, kind)
    assert len({kind.name for kind in found}) == len(found)
    assert found or not kernel.get("is_cuda_graph_safe")


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_there_is_a_call_of_each_class_that_computes_something(op: str, kernel: dict[str, Any]) -> None:
    """A library may enqueue nothing for no rows that go into a cache."""
    found = list(certified(op, kernel))
    for kind in found:
        check(op, kernel, kind)
    assert found
    assert len({kind.name for kind in found}) == len(found)
    for call in (kind.call for kind in found):
        assert all(spec.numel for spec in call.outputs)
        assert all(spec.numel for spec in call.inputs if spec is not None) or not OPS[op].in_place


def test_what_must_be_lifted_is_among_them() -> None:
    """Each start of a name is one of calls that workers are asked to lift."""
    kernels: list[Any] = [param.values for param in KERNELS]
    names = [kind.name for op, kernel in kernels if kernel.get("is_cuda_graph_safe") for kind in kinds(op, kernel)]
    assert [start for start in MUST if not any(name.startswith(start) for name in names)] == []
