"""Fuzz one target or all of them: `python -m tests.fuzz [TARGET ...] [--seconds N] [--keep FOLDER]`.

libFuzzer starts from the committed corpus and what is kept in FOLDER. Prints one line of JSON for each target; a
finding is kept in FOLDER, too, and is exit code 1. The target `kernels` has no corpus: hypothesis makes its calls, for
each environment that is built in a share of the time (tests/fuzz/kernels.py).

`--write-corpus` writes the seeds of the targets, made of real messages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"
MAX_BYTES = 4096  # of an input
GRACE_S = 600  # on a busy machine the start alone takes minutes
KERNELS = "kernels"
_STATUS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)", re.MULTILINE)


def targets() -> list[str]:
    """Those with a corpus."""
    return sorted(path.name for path in CORPUS.iterdir())


def fuzz(target: str, seconds: int, keep: Path, seed: int = 0) -> dict[str, Any]:
    """One run, in a process of its own. `seed` 0: another one each time."""
    kept, before = keep / target, resource.getrusage(resource.RUSAGE_CHILDREN)
    (kept / "corpus").mkdir(parents=True, exist_ok=True)
    shm = Path("/dev/shm")  # most targets that write files would only wait for a disk
    base = shm if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 1 << 28 else None
    with tempfile.TemporaryDirectory(prefix="lz-fuzz-", dir=base) as scratch:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.fuzz.engine",
                target,
                f"-max_total_time={seconds}",
                f"-seed={seed}",
                f"-max_len={MAX_BYTES}",
                "-timeout=60",
                "-rss_limit_mb=8192",  # what libFuzzer reads is no less than the peak of the process that started it
                "-malloc_limit_mb=2048",
                f"-artifact_prefix={kept}/",
                str(kept / "corpus"),
                str(CORPUS / target),
            ],
            check=False,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "TMPDIR": scratch,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            },
            capture_output=True,
            timeout=seconds + GRACE_S,
        )
    said = done.stderr.decode(errors="replace") + done.stdout.decode(errors="replace")
    (kept / "log").write_text(said)
    statuses = _STATUS.findall(said)
    count, state, edges, features, _ = statuses[-1] if statuses else ("0", "", "0", "0", "0")
    found: dict[str, Any] = {"target": target, "seconds": seconds, "executions": int(count), "edges": int(edges)}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    found |= {"features": int(features), "cpu_s": cpu_s, "finding": ""}
    if done.returncode != 0 or state != "DONE":
        found["finding"] = said.partition("=== Uncaught Python exception: ===")[2][:3000].strip() or said[-3000:]
    return found


def fuzz_kernels(target: str, seconds: int, keep: Path, seed: int = 0) -> dict[str, Any]:
    """Of every environment that is built. `seed` 0: other calls each time."""
    from tests.fuzz import kernels  # hypothesis, and what reads environments

    (keep / target).mkdir(parents=True, exist_ok=True)
    names = kernels.environments()
    start = seed or time.time_ns() % (1 << 31)
    runs = [kernels.fuzz(name, seconds / len(names), first=start) for name in names]
    (keep / target / "log").write_text(json.dumps(runs, indent=1))
    finding = "\n".join(
        f"{kernel}, {kind}: {text}"
        for run in runs
        for kernel, found in run["found"].items()
        for kind, text in found.items()
    )
    executions = sum(run.get("calls", 0) for run in runs)
    return {"target": target, "seconds": seconds, "executions": executions, "environments": names, "finding": finding}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n\n")[0])
    parser.add_argument("target", nargs="*", choices=[*targets(), KERNELS, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument(
        "--keep",
        type=Path,
        help="folder for what is found; default: a new one in the temporary folder, for findings alone",
    )
    parser.add_argument("--write-corpus", action="store_true")
    args = parser.parse_args(arguments)
    if args.write_corpus:
        return write_corpus(args.target)
    keep = args.keep or Path(tempfile.mkdtemp(prefix="lz-fuzz-kept-"))
    code = 0
    for target in args.target or [*targets(), KERNELS]:
        run = fuzz_kernels if target == KERNELS else fuzz
        found, kept = run(target, args.seconds, keep.resolve()), keep / target
        if found["finding"]:
            code = 1
        elif args.keep is None:
            shutil.rmtree(kept)
        print(json.dumps({**found, "kept": str(kept) if kept.exists() else ""}), flush=True)
    if args.keep is None:
        with suppress(OSError):  # there were findings
            keep.rmdir()
    return code


def write_corpus(names: list[str]) -> int:
    for target in names or targets():
        folder = CORPUS / target
        folder.mkdir(exist_ok=True)
        for name, data in import_module(f"tests.fuzz.{target}").seeds().items():
            (folder / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
