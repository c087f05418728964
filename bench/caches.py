"""What the first call of a kernel that compiles costs: with nothing compiled, from a warm cache, from an imported one.
Writes results/caches.md.

    python bench/caches.py [--quick]

The kernel is silu in C, compiled for each length of rows by the machine's `cc -O3` and loaded with dlopen, in the
broker's own interpreter: a compiler takes some 0.1 s here, where Triton takes one and ninja with nvcc a minute. Each
time is of a broker that has just started, from the call to its result: the worker's start, the check of its cache,
compiling, the call. The environment was probed before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import at_most, finish, own_broker, parser

import layerzero as lz

SMALL, ROW = (
    7,
    1000,
)  # lengths of rows: of the call before, which has the environment probed, and of the one that is timed
PROVIDER = '''
import ctypes, os, subprocess
from pathlib import Path
from layerzero.workers.provider import Loaded

SOURCE = """
#include <math.h>
void silu(const float *x, float *y, long rows) {
    for (long i = 0; i < rows * %d; i++) y[i] = x[i] / (1.0f + expf(-x[i]));
}
"""


def load():
    import numpy

    cache = Path(os.environ["LZ_CC_CACHE"])

    def compiled(row):
        target = cache / f"silu_{row}.so"
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            source, draft = cache / f"silu_{row}.c", cache / f"silu_{row}.{os.getpid()}.so"
            source.write_text(SOURCE % row)
            subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", draft, source, "-lm"], check=True)
            draft.replace(target)
        function = ctypes.CDLL(str(target)).silu
        function.restype = None
        return function

    def silu(call, inputs, outputs):
        run, rows = compiled(call.inputs[0].shape[1]), ctypes.c_long(call.inputs[0].shape[0])
        x, y = (numpy.frombuffer(block.host, numpy.float32) for block in (inputs[0], outputs[0]))
        return lambda: run(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), rows)

    return Loaded({"numpy": numpy.__version__}, {"cc.silu": silu})
'''
KERNEL = {
    "kernel_id": "cc.silu",
    "priority": 70,
    "source": "bench",
    "dtypes": ["float32"],
    "min_ndim": 2,
    "max_ndim": 2,
    "requires_contiguous": True,
    "deterministic": True,
    "needs_jit": True,
    "compiled_for": ["row"],
}


def write_backend(folder: Path) -> None:
    folder.mkdir()
    (folder / "cc.py").write_text(PROVIDER)
    descriptor = {"schema_version": "1.0", "backend": "cc", "backend_version": "1", "platform": "cpu"}
    (folder / "cc.json").write_text(json.dumps({**descriptor, "ops": {"silu": [KERNEL]}}))
    (folder / "cc.toml").write_text(
        'summary = "silu, compiled by cc"\nprovider = "cc.py"\ndescriptor = "cc.json"\ninterpreter = "host"\n'
        '[env]\nLZ_CC_CACHE = "{cache}/cc"\n'
    )


def first_call_ms(row: int, **environ: str) -> float:
    with own_broker(**environ):
        x = np.ones((4, row), np.float32)
        start = time.perf_counter()
        result = lz.silu(x, backend="cc")
        took_ms = 1e3 * (time.perf_counter() - start)
        assert np.allclose(result, 1 / (1 + np.exp(-1)))
        lz.session().ask("shutdown")
    return took_ms


def command(*words: str, **environ: str) -> None:
    argv = [sys.executable, "-m", "layerzero.client.cli.app", "cache", *words]
    subprocess.run(argv, check=True, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)


def one_round(top: Path, manifests: Path) -> dict[str, float]:
    """Times in ms of the first call, by what there was."""
    here, there = (
        {"LAYERZERO_STORE": str(top / name), "LAYERZERO_MANIFEST_DIRS": str(manifests)} for name in ("here", "there")
    )
    for store in (here, there):
        first_call_ms(SMALL, **store)
    cold = first_call_ms(ROW, **here)
    warm = first_call_ms(ROW, **here)
    command("export", str(top / "exported"), "--unsigned", "-b", "cc", **here)
    command("import", str(top / "exported"), "--allow-unsigned", **there)
    return {"nothing compiled": cold, "a warm cache": warm, "an imported cache": first_call_ms(ROW, **there)}


def main() -> None:
    options = parser(__doc__, "one round").parse_args()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="lz-bench-caches-") as folder:
        write_backend(Path(folder) / "manifests")
        for number in range(1 if options.quick else 5):
            (Path(folder) / str(number)).mkdir()
            rounds.append(one_round(Path(folder) / str(number), Path(folder) / "manifests"))
    medians = {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
    warm = medians["a warm cache"]
    aims = {"an imported cache": at_most(medians["an imported cache"] / warm, 1.2)}
    rows = [(what, f"{took:,.0f} ms", aims.get(what, "")) for what, took in medians.items()]
    headings = ("from", "first call", "of a warm cache's")
    finish("caches", "First calls of a kernel that compiles", {}, headings, rows, is_quick=options.quick)


if __name__ == "__main__":
    main()
