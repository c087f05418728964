"""What calls of isolated functions with CUDA tensors cost, beside the same work in this process. Writes
results/gpu_functions.md.

    python bench/gpu_functions.py [--quick]

Needs an NVIDIA GPU, torch, and the repository on PYTHONPATH: the functions are those of tests/gpu, in a venv of the
bench's own that has what is installed here. Nothing is built or downloaded. Rounds alternate between ours and the
floor; a figure is the median of the rounds, a ratio the median of their ratios.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import at_most, finish, parser
from gpu_common import Row, pipelined, torch, versions
from gpu_dispatch import COUNT, ROUNDS, compare, synchronous
from tests.gpu.function_sites import interpreter
from tests.process.harness import Site

import layerzero as lz

MIB = 1 << 18  # elements of float32


def host(name: str, ours: Callable[[], Any], floor: Callable[[], Any], *, quick: bool, most_us: float = 0.0) -> Row:
    """Until the call has returned: the GPU is behind."""
    found = compare(ours, floor, pipelined, COUNT, 3 if quick else ROUNDS)
    path = lz.last_report()
    told = f"; {at_most(found.ours_host / most_us, 1.0)} of {most_us:g} us" if most_us else ""
    return Row(
        f"{name}; path {path.path if path else 'unknown'}",
        f"{found.ours_host:.1f} us (wall {found.ours_wall:.1f} us)",
        f"{found.floor_host:.1f} us (wall {found.floor_wall:.1f} us)",
        f"{found.ours_host - found.floor_host:.1f} us more{told}",
    )


def rows(fn: Any, *, quick: bool) -> Iterator[Row]:
    small, x = torch.randn(1024, device="cuda"), torch.randn(MIB, device="cuda")
    yield host("no array", fn.place, os.getpid, quick=quick)
    yield host("4 KiB, result copied", lambda: fn.scaled(small), lambda: small * 2, quick=quick)
    yield host("1 MiB, result copied", lambda: fn.scaled(x), lambda: x * 2, quick=quick, most_us=100.0)
    yield host("1 MiB, result made in place (shapes=, out)", lambda: fn.into(x), lambda: torch.mul(x, 3), quick=quick)
    yield host("1 MiB, a list of text back", lambda: fn.described(x), lambda: x.shape, quick=quick)
    with fn.Counter(torch.zeros(MIB, device="cuda")) as counter:
        yield host("1 MiB, a method of an object", lambda: counter.add(x), lambda: x + x, quick=quick)
    found = compare(lambda: fn.scaled(x), lambda: x * 2, synchronous, COUNT, 3 if quick else ROUNDS)
    yield Row(
        "1 MiB, result copied, each call waited for until the GPU is through",
        f"{found.ours_wall:.1f} us",
        f"{found.floor_wall:.1f} us",
        f"{found.ours_wall - found.floor_wall:.1f} us more",
    )
    many = [torch.randn(MIB, device="cuda") for _ in range(32)]
    times = [pipelined(lambda: [future.result() for future in map(fn.scaled.submit, many)], 4)[0] for _ in range(3)]
    yield Row("32 submitted calls of 1 MiB, host time a call", f"{statistics.median(times) / 32:.1f} us", "", "")


def main() -> None:
    args = parser(__doc__, "fewer rounds").parse_args()
    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU")
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        os.environ["LZ_TEST_INTERPRETER"] = str(interpreter(Path(folder) / "v"))
        functions = importlib.import_module("tests.gpu.function_calls")
        site = Site(Path(folder) / "store", restart_budget=1000, backoff_s=0.01, backoff_max_s=0.01)
        try:
            with site.environment():
                functions.GPU.build(quiet=True)
                site.start().connect()
                functions.place()
                table, told = list(rows(functions, quick=args.quick)), {"client": versions()["client"]}
                lz.disconnect()
        finally:
            site.stop()
    headings = ("figure", "LayerZero", "torch in this process", "what it adds")
    finish("gpu_functions", "Functions with arrays on a GPU", told, headings, table, is_quick=args.quick)


if __name__ == "__main__":
    main()
