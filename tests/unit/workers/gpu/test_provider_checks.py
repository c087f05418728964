"""The calls that tests/gpu/test_providers.py checks kernels with, which only a machine with a GPU makes: that they are
calls of today's ops, and that each kernel has some."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from tests.unit.workers.gpu.cuda_kernels import KERNELS

from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import check_call
from layerzero.workers.certify.cases import Case, cases
from layerzero.workers.certify.claims import dtypes


@pytest.fixture(scope="module")
def checks() -> Iterator[ModuleType]:
    """The program, whose neighbours are modules of its own; with few problems, since each takes a while."""
    with mock.patch.object(sys, "path", [str(Path(__file__).parents[3] / "gpu"), *sys.path]):
        program = importlib.import_module("provider_checks")
    with mock.patch.object(program, "RANDOM_PROBLEMS", 3):
        yield program


def check(op: str, case: Case) -> None:
    assert (len(case.inputs), len(case.outputs)) == (len(OPS[op].inputs), len(OPS[op].outputs))
    check_call(op, case.inputs, case.outputs, case.attrs)


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_each_kernel_has_random_calls(checks: ModuleType, op: str, kernel: dict[str, Any]) -> None:
    problems = list(checks.random_problems(op, kernel))
    found = [case for dtype in dtypes(op, kernel) for case in cases(op, kernel, problems, dtype)]
    assert found
    for case in found:
        check(op, case)


@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_each_kernel_has_a_call_and_the_same_on_other_numbers(
    checks: ModuleType, op: str, kernel: dict[str, Any]
) -> None:
    """For graphs that are replayed: nothing but the data may differ."""
    found = list(checks.pairs(op, kernel))
    assert found
    for case, other in found:
        check(op, case)
        assert (case.inputs, case.outputs, case.attrs) == (other.inputs, other.outputs, other.attrs)
