"""Calls of LayerZero in the place of a library's, as its tests make them: what is served, by whom, and what is not."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any, NoReturn

import pytest

import layerzero as lz


class Calls:
    """`served`: how many calls of an op a kernel has served; `backend`: that of each call, None for any; `file`: the
    file whose test runs."""

    def __init__(self) -> None:
        self.served: Counter[tuple[str, str]] = Counter()
        self.backend: str | None = None
        self.file = ""

    def __call__(self, op: str, *args: Any, **options: Any) -> Any:
        """The op's result; where no kernel takes the call, the test is skipped with the reasons."""
        with told(op, self.backend):
            made = getattr(lz, op)(*args, backend=self.backend, **options)
        report = lz.last_report()
        assert report is not None
        self.served[op, str(report.kernel_id)] += 1
        return made

    def differentiable(self, op: str, *args: Any, **options: Any) -> Any:
        """As a call, by the op of torch, which has gradients; any backend serves."""
        import torch

        importlib.import_module("layerzero.torch")
        with told(op):
            made = getattr(torch.ops.layerzero, op)(*args, **options)
        report = lz.last_report()
        self.served[op, str(report.kernel_id) if report else "?"] += 1
        return made


# Of backends that are not here, or not asked.
ELSEWHERE = frozenset({"NOT_INSTALLED", "PLATFORM_MISMATCH", "NOT_FOR_MACHINE", "NOT_PINNED"})


class told:
    """Skips the test where LayerZero has no kernel for a call."""

    def __init__(self, op: str, backend: str | None = None) -> None:
        self.op, self.backend = op, backend

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, lz.NoBackend):
            found = error.report.candidates if error.report else ()
            asked = [one for one in found if self.backend in (None, one.backend)]
            codes = {reason.code for one in asked for reason in one.reasons} - ELSEWHERE
            refused(f"{self.op}: {', '.join(sorted(codes)) or 'no kernel'}")
        if isinstance(error, lz.InvalidArgument):
            refused(f"{self.op}: {str(error).splitlines()[0][:100]}")


def refused(why: str) -> NoReturn:
    pytest.skip(f"layerzero: refused: {why}")


def unserved(why: str) -> NoReturn:
    """Skips a test that asks for what no op has."""
    pytest.skip(f"layerzero: no such option: {why}")
