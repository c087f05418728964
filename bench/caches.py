"""What the first call of a kernel that compiles costs, and the first run of a bundle of it: with nothing compiled, from
a warm cache, from an imported one, and lifted. Writes results/caches.md; with --gpu results/gpu_caches.md.

    python bench/caches.py [--quick] [--gpu]

Without a GPU the kernel is silu in C, compiled for each length of rows by the machine's `cc -O3` and loaded with
dlopen, in the broker's own interpreter: a compiler takes some 0.1 s here, where Triton takes one and ninja with nvcc a
minute.
With --gpu it is rms_norm of LayerZero's own in Triton, in this interpreter, which has torch and Triton; nothing need be
built. Each time is of a broker that has just started, from the call, or the opening of the bundle, to the result: the
worker's start, the check of its cache, compiling, the call. The environment was probed before. A lifted call, of a GPU,
starts no worker: its machine code is in the store.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from common import at_most, finish, parser

# Lengths of rows: of the call before, which has the environment probed, and of the one that is timed.
ROWS = {"silu": (7, 1000), "rms_norm": (512, 4096)}
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


TRITON = """
from dataclasses import replace

from layerzero.workers.providers import triton


def load():
    loaded = triton.load()
    return replace(loaded, kernels={"tri.rms_norm": loaded.kernels["triton.rms_norm"]})
"""
# A process of its own: what it calls with, how, and whether it says how long the first call took.
FIRST = """
import json, sys, time
import layerzero as lz
what, columns, file, until = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
if what == "silu":
    import numpy as np
    x = np.ones((4, columns), np.float32)
    op = lambda x: lz.silu(x, backend="cc")
    wait = lambda: None
else:
    import torch
    x = torch.ones(4, columns, device="cuda", dtype=torch.bfloat16)
    op = lambda x: lz.rms_norm(x, (columns,), None, backend="tri")
    wait = torch.cuda.synchronize
lz.connect()
lz.status()
wait()
start = time.perf_counter()
if file == "-":
    y = op(x)
else:
    y = lz.load_bundle(file)(x)
wait()
took_ms = 1e3 * (time.perf_counter() - start)
assert abs(float(y[0, 0]) - (0.7310586 if what == "silu" else 1.0)) < 1e-2
path = lz.last_report().path if file == "-" else "bundle"
while until == "lifted" and lz.last_report().path != "lifted":
    op(x)
    wait()
workers = [b["name"] for b in lz.status()["backends"] if b["pid"]]
if until.startswith("write "):
    plan = lz.plan(op)
    while plan.phase != "FROZEN":
        plan(x)
    lz.write_bundle(plan, until[6:])
lz.session().ask("shutdown")
print(json.dumps([took_ms, path, workers]))
"""


def write_backend(folder: Path) -> None:
    folder.mkdir()
    (folder / "cc.py").write_text(PROVIDER)
    descriptor = {"schema_version": "1.0", "backend": "cc", "backend_version": "1", "platform": "cpu"}
    (folder / "cc.json").write_text(json.dumps({**descriptor, "ops": {"silu": [KERNEL]}}))
    (folder / "cc.toml").write_text(
        'summary = "silu, compiled by cc"\nprovider = "cc.py"\ndescriptor = "cc.json"\ninterpreter = "host"\n'
        '[env]\nLZ_CC_CACHE = "{cache}/cc"\n'
    )


def write_triton(folder: Path) -> None:
    """LayerZero's rms_norm in Triton, in this interpreter."""
    folder.mkdir()
    packaged = json.loads((files("layerzero.capabilities") / "descriptors" / "triton.json").read_text())
    kernel = next(one for one in packaged["ops"]["rms_norm"] if one["kernel_id"] == "triton.rms_norm")
    kernel |= {"kernel_id": "tri.rms_norm", "dtypes": ["bfloat16"]}  # fewer, since each is probed first
    found = {**packaged, "backend": "tri", "ops": {"rms_norm": [kernel]}}
    (folder / "tri.py").write_text(TRITON)
    (folder / "tri.json").write_text(json.dumps(found))
    (folder / "tri.toml").write_text(
        'summary = "rms_norm in Triton"\nprovider = "tri.py"\ndescriptor = "tri.json"\ninterpreter = "host"\n'
        '[env]\nTRITON_CACHE_DIR = "{cache}/triton"\n'
    )


class First(NamedTuple):
    ms: float
    path: str
    workers: list[str]


def first(what: str, columns: int, file: str = "-", until: str = "", **environ: str) -> First:
    """The first call of a new process at a new broker."""
    with tempfile.TemporaryDirectory(prefix="lz-bench-") as folder:
        own = {"LAYERZERO_RUNTIME_DIR": folder, "LAYERZERO_PERF_DB": f"{folder}/perf.db"}
        ran = subprocess.run(
            [sys.executable, "-c", FIRST, what, str(columns), file, until],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **own, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
    if ran.returncode:
        sys.exit(f"a process of the bench ended with {ran.returncode}: {ran.stderr[-3000:]}")
    found = First(*json.loads(ran.stdout.splitlines()[-1]))
    print(f"{what} {columns}: {found.ms:,.0f} ms, {found.path}", file=sys.stderr, flush=True)
    return found


def command(*words: str, **environ: str) -> None:
    argv = [sys.executable, "-m", "layerzero.client.cli.app", "cache", *words]
    subprocess.run(argv, check=True, env={**os.environ, **environ}, stdout=subprocess.DEVNULL)


def one_round(what: str, backend: str, top: Path, manifests: Path, file: str) -> dict[str, First]:
    """The first call, or the first run of the bundle in `file`, by what there was."""
    here, there = (
        {
            "LAYERZERO_STORE": str(top / name),
            "LAYERZERO_MANIFEST_DIRS": str(manifests),
            "LAYERZERO_BACKEND_ISOLATION": "subprocess",
        }
        for name in ("here", "there")
    )
    small, row = ROWS[what]
    first(what, small, **here)
    for folder in (
        "probes",
        "stage",
    ):  # what each store has once: a probe may take minutes, and our own code for workers
        shutil.copytree(top / "here" / folder, top / "there" / folder)
    found = {"nothing compiled": first(what, row, file, **here), "a warm cache": first(what, row, file, **here)}
    command("export", str(top / "exported"), "--unsigned", "-b", backend, **here)
    command("import", str(top / "exported"), "--allow-unsigned", **there)
    found["an imported cache"] = first(what, row, file, **there)
    if what == "rms_norm":
        lifted = {**here, "LAYERZERO_BACKEND_ISOLATION": "lifted"}
        first(what, row, until="lifted", **lifted)
        found["its lifted call in the store"] = first(what, row, **lifted)
    return found


def main() -> None:
    arguments = parser(__doc__, "one round")
    arguments.add_argument("--gpu", action="store_true", help="a kernel of Triton's on an NVIDIA GPU")
    options = arguments.parse_args()
    what, backend, write = ("rms_norm", "tri", write_triton) if options.gpu else ("silu", "cc", write_backend)
    calls, bundles = [], []
    with tempfile.TemporaryDirectory(prefix="lz-bench-caches-") as folder:
        top, file = Path(folder), str(Path(folder) / "silu.lzb")
        write(top / "manifests")
        if not options.gpu:  # plans on a GPU are no bundles
            store = {"LAYERZERO_STORE": str(top / "made"), "LAYERZERO_MANIFEST_DIRS": str(top / "manifests")}
            first(what, ROWS[what][1], until=f"write {file}", **store)
        for number in range(1 if options.quick else 2 if options.gpu else 5):
            for kind, rounds in (("call", calls), ("bundle", bundles)):
                if kind == "call" or not options.gpu:
                    (top / f"{kind}{number}").mkdir()
                    took = one_round(
                        what, backend, top / f"{kind}{number}", top / "manifests", file if kind == "bundle" else "-"
                    )
                    rounds.append(took)
    rows = []
    for rounds, name in ((calls, "a call"), (bundles, "a bundle of it, opened and run")):
        medians = {way: statistics.median(one[way].ms for one in rounds) for way in (rounds[0] if rounds else ())}
        for way, ms in medians.items():
            ran = rounds[-1][way]
            aim = (
                at_most(ms / medians["a warm cache"], 1.2)
                if way == "an imported cache"
                else f"{ms / medians['a warm cache']:.2f}"
            )
            rows.append((f"{name}, {way}", f"{ms:,.0f} ms", ", ".join(ran.workers) or "none", aim))
    headings = ("the first of a process and a broker", "took", "workers then", "of a warm cache's")
    if options.gpu:
        finish(
            "gpu_caches",
            TITLE,
            {},
            headings,
            rows,
            NOTES,
            is_quick=options.quick,
            command="python bench/caches.py --gpu",
        )
    else:
        finish("caches", TITLE, {}, headings, rows, NOTES, is_quick=options.quick)


TITLE = "First calls of a kernel that compiles"
NOTES = (
    "Medians of rounds, each with stores of its own. The broker has just started, and runs no worker but the call's.",
)


if __name__ == "__main__":
    main()
