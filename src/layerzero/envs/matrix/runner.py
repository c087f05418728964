"""Runs in the environment under test, where nothing of ours is: imports libraries beside each other, then uses each.

`python -I runner.py` reads {"parent", "subjects": [{"name", "imports", "probe"}]} on stdin and prints one JSON object a
line, before and after every step, so that the last line names the step in which the process died:
{"step": "import" | "op", "subject", "again": bool} and then {"ok": true, "seconds"} or {"ok": false, "error": {...}}.
Ops run twice, the second time after the others have run. Standard library only, Python 3.10 and newer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import mmap
import os
import signal
import sys
import time
import traceback
from operator import mul, ne
from typing import Any

SIZE = 64
_PR_SET_PDEATHSIG = 1


class Memory:
    """What all ops of the process work on, as they would on an application's arrays. The values are small integers, so
    that products are exact in float32; `right` is symmetric."""

    def __init__(self) -> None:
        nbytes = SIZE * SIZE * 4
        self.left = memoryview(mmap.mmap(-1, nbytes)).cast("f", [SIZE, SIZE])
        self.right = memoryview(mmap.mmap(-1, nbytes)).cast("f", [SIZE, SIZE])
        for row in range(SIZE):
            for column in range(SIZE):
                self.left[row, column] = (row * 5 + column) % 7
                self.right[row, column] = (row * 3 + column * 4) % 11
        self.original = {"left": self.left.tobytes(), "right": self.right.tobytes()}
        left: Any = self.left.tolist()
        right: Any = self.right.tolist()
        columns = [list(column) for column in zip(*right, strict=True)]
        self.product = [float(sum(map(mul, row, column))) for row in left for column in columns]
        self.linear = [float(sum(map(mul, row, column))) for row in left for column in right]

    def changed(self) -> str:
        """Which values an op has written to since the last call; empty for none."""
        for name, before in self.original.items():
            now = getattr(self, name).tobytes()
            if now != before:
                self.original[name] = now
                count = sum(map(ne, memoryview(now).cast("f"), memoryview(before).cast("f")))
                return f"{count} of the {SIZE * SIZE} values of its input {name!r}"
        return ""


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    faulthandler.enable()
    task = json.load(sys.stdin)
    die_with(task["parent"])

    def say(**line: Any) -> None:
        print(json.dumps(line), file=answer, flush=True)

    memory = Memory()
    subjects = task["subjects"]
    able = [
        subject
        for subject in subjects
        if step(say, lambda subject=subject: import_all(subject["imports"]), "import", subject["name"])
    ]
    for again in (False, True):
        for subject in able:
            if subject["probe"]:
                step(say, lambda subject=subject: compute(subject["probe"], memory), "op", subject["name"], again)
    say(step="end")


def step(say: Any, do: Any, name: str, subject: str, again: bool = False) -> bool:
    """Do it and tell how it went. False when it raised or was wrong."""
    say(step=name, subject=subject, again=again)
    start = time.perf_counter()
    try:
        wrong = do()
    except BaseException as exc:  # some libraries raise SystemExit when they dislike their surroundings
        error = {"type": type(exc).__name__, "message": str(exc), "traceback": traceback.format_exc(limit=-12)}
        say(ok=False, error=error)
        return False
    seconds = round(time.perf_counter() - start, 3)
    say(**({"ok": False, "error": wrong} if wrong else {"ok": True, "seconds": seconds}))
    return not wrong


def import_all(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def compute(path: str, memory: Memory) -> dict[str, str] | None:
    """Run a probe file's op. Returns what was wrong."""
    spec = importlib.util.spec_from_file_location("lz_matrix_probe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    got, right = module.op(memory)
    if changed := memory.changed():
        return {"type": "wrote", "message": changed, "traceback": ""}
    if text := difference(got, right):
        return {"type": "value", "message": text, "traceback": ""}
    return None


def difference(got: list[Any], right: list[Any]) -> str:
    """The first of two flat lists' values that differ, and how many do; empty for none."""
    if len(got) != len(right):
        return f"{len(got)} values instead of {len(right)}"
    wrong = [index for index, (a, b) in enumerate(zip(got, right, strict=True)) if a != b]
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"{len(wrong)} of {len(right)} values are wrong; the first, at {first}, is {got[first]!r}, not {right[first]!r}"
    )


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process that started us ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
