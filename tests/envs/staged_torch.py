"""Run in torch's environment by test_staged_torch.py: the kernels of a descriptor, on a few cases of each of the op's
first classes, computed on the devices "cpu" and "meta". Prints a line of JSON for each case: [device, op, case, what
was wrong or None]."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from layerzero.ipc.vocabulary.numerics import difference, gather, tolerance, unpack
from layerzero.workers.certify.cases import Case, cases
from layerzero.workers.certify.memory import HostBench, placed
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.problems import PROBLEMS
from layerzero.workers.provider import Bind, Call
from layerzero.workers.providers import _torch_staged

DTYPE, CASES = "float32", 5


def wrong(bind: Bind, op: str, kernel_id: str, case: Case, bench: HostBench) -> str | None:
    inputs, (output,) = placed(bench, op, case)
    try:
        bench.run(bind(Call(op, kernel_id, case.inputs, case.outputs, case.attrs), inputs, (output,)))
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"[:200]
    found = unpack(gather(bench.content(output), output.spec), DTYPE)
    error = difference(found, case.expected[0], DTYPE)
    return None if error <= tolerance(DTYPE, op) else f"error {error:g}"


def of_any_scale(problems: Sequence[Problem]) -> Iterator[Problem]:
    """The first causal one with scales that the libraries' kernels do not take."""
    causal = next((one for one in problems if one.attrs.get("is_causal")), None)
    for scale in () if causal is None else (0.0, -1.0):
        yield Problem(causal.op, f"scale {scale}", {**causal.attrs, "scale": scale}, causal.inputs, causal.kinds)


def main(descriptor: str) -> None:
    claims: dict[str, Any] = json.loads(Path(descriptor).read_text())["ops"]
    bench = HostBench(4 << 20)
    for device in ("cpu", "meta"):
        kernels = _torch_staged.kernels(torch, device, "torch-rocm")
        for op, (claim,) in claims.items():
            problems = list(PROBLEMS[op](claim))
            fitting = (case for case in cases(op, claim, problems, DTYPE) if case.outputs[0].numel)
            scaled = cases(op, claim, list(of_any_scale(problems)), DTYPE)
            for case in itertools.chain(itertools.islice(fitting, CASES), scaled):
                said = wrong(kernels[claim["kernel_id"]], op, claim["kernel_id"], case, bench)
                print(json.dumps([device, op, case.name, said]))


if __name__ == "__main__":
    main(*sys.argv[1:])
