"""What calls and bundles cost from C, by the broker and by an express lane, beside Python's and two processes in C that
ring each other. Writes results/c_api.md.

    python bench/c_api.py [--quick]

Two brokers, one that lends no lanes; at each a program in C (bench/c_api.c) and one in Python make the same calls, in
rounds that alternate. The bundle is that of a frozen plan, silu(x @ w1) @ w2 with float32 of 4 x 64, whose kernels are
small. Memory is shared on both sides, so nothing is copied. Both sides may look before they sleep.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from common import finish, own_broker, parser, verdict

import layerzero as lz

HERE = Path(__file__).parent
LOOP = """
import statistics, sys, time
import numpy as np
import layerzero as lz
lz.connect()
x = lz.share(np.zeros(4, np.float32))
y = lz.share(np.zeros(4, np.float32))
bundle = lz.load_bundle(sys.argv[1])
given = lz.share(np.zeros((4, 64), np.float32))
makes = {"null": lz.null, "silu": lambda: lz.silu(x, out=y), "bundle": lambda: bundle(given)}
for line in sys.stdin:
    what, count = line.split()
    make, times = makes[what], []
    for _ in range(int(count)):
        start = time.perf_counter_ns()
        make()
        times.append(time.perf_counter_ns() - start)
    path = "-" if what == "bundle" else lz.last_report().path
    print(min(times), sorted(times)[len(times) // 2], path, flush=True)
"""
NOTE = (
    "Least of all calls, and the middle of the rounds' medians; the floor sleeps and is woken, which who looks at a "
    "page does not. Predicted for the null call on C's lane, from Python's 4.6 us of which 2.6 are its Python's: 0.55 "
    "of Python's."
)
OPS = ("null", "silu", "bundle")
NAMES = {
    "null": "a null call",
    "silu": "silu of 4 floats",
    "bundle": "a bundle of three small calls",
}


def block(x: Any) -> Any:
    return lz.matmul(lz.silu(lz.matmul(x, W1)), W2)


W1, W2 = (np.random.default_rng(seed).standard_normal((64, 64)).astype(np.float32) for seed in (1, 2))


def write_bundle(file: Path) -> None:
    fast, x = lz.plan(block, fixed_weights=True), np.zeros((4, 64), np.float32)
    while fast.phase != "FROZEN":
        fast(x)
    lz.write_bundle(fast, file)


def compiled(folder: Path) -> Path:
    """bench/c_api.c with the library, as a user compiles both."""
    library = HERE.parent / "c"
    subprocess.run(["make", "-s", "-C", library, f"BUILD={folder}", folder / "liblayerzero.a"], check=True)
    program = folder / "c_api"
    paths = map(str, (library, HERE / "c_api.c", folder / "liblayerzero.a"))
    command = ["cc", "-O2", "-D_GNU_SOURCE", "-I", *paths, "-o", str(program), "-ldl", "-lm", "-pthread"]
    subprocess.run(command, check=True)
    return program


def libzmq() -> str:
    bundled = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libzmq*.so*"))
    return str(bundled[0]) if bundled else "libzmq.so.5"


class Program:
    """One that reads lines of "WHAT COUNT"."""

    def __init__(self, *command: object) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.running = subprocess.Popen([str(part) for part in command], **pipes)

    def ask(self, what: str, count: int) -> tuple[float, float, str]:
        """Least and middle in us, and the path."""
        assert self.running.stdin is not None
        assert self.running.stdout is not None
        self.running.stdin.write(f"{what} {count}\n")
        self.running.stdin.flush()
        least, middle, path = self.running.stdout.readline().split()
        return int(least) / 1e3, int(middle) / 1e3, path


def row(name: str, times: Sequence[tuple[float, float]], floors: Sequence[tuple[float, float]]) -> list[str]:
    least, middle = min(one for one, _ in times), statistics.median(one for _, one in times)
    floor = min(one for one, _ in floors)
    return [name, f"{least:.1f} us", f"{middle:.1f} us", f"{least / floor:.2f}"]


def main() -> None:
    options = parser(__doc__, "few rounds").parse_args()
    rounds, count = (5, 200) if options.quick else (30, 500)
    with tempfile.TemporaryDirectory(prefix="lz-bench-c-") as name, own_broker() as lanes:
        folder = Path(name)
        program, file = compiled(folder), folder / "block.lzb"
        write_bundle(file)
        asked = {("C", "lane"): Program(program, lanes, libzmq(), file)}
        asked["Python", "lane"] = Program(sys.executable, "-c", LOOP, file)
        with own_broker(LAYERZERO_EXPRESS="false") as broker:
            asked["C", "broker"] = Program(program, broker, libzmq(), file)
            asked["Python", "broker"] = Program(sys.executable, "-c", LOOP, file)
            for one in asked.values():
                for what in OPS:
                    one.ask(what, 300)
            found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
            floors = []
            for _ in range(rounds):
                floors.append(asked["C", "lane"].ask("floor", count)[:2])
                for (language, way), one in asked.items():
                    for what in OPS:
                        *times, path = one.ask(what, count if way == "lane" else count // 5)
                        assert path in ("-", {"lane": "express", "broker": "broker"}[way]), (language, way, what, path)
                        found.setdefault((what, way, language), []).append((times[0], times[1]))
        for one in asked.values():
            one.running.communicate()
    rows = [row("two processes in C, eventfds: the floor", floors, floors)]
    for what in OPS:
        for way in ("broker", "lane"):
            for language in ("Python", "C"):
                rows.append(row(f"{NAMES[what]}, {language}, by the {way}", found[what, way, language], floors))
        ours, others = (min(least for least, _ in found[what, "lane", language]) for language in ("C", "Python"))
        by_broker = min(least for least, _ in found[what, "broker", "C"])
        aim = f"{ours / others:.2f} (at most 1: {verdict(ours <= others)})"
        rows.append([f"{NAMES[what]}: C's lane, of Python's", "", "", aim])
        rows.append([f"{NAMES[what]}: C's lane, of C's by the broker", "", "", f"{ours / by_broker:.2f}"])
    headings = ("what", "least", "middle", "least, of the floor's")
    notes = (NOTE,)
    finish("c_api", "Calls and bundles from C", {}, headings, rows, notes, is_quick=options.quick)


if __name__ == "__main__":
    main()
