"""Parts of observability.py: what a capsule costs a call that its worker dies of, what having them costs all others,
and whether a crash that is the same each time makes itself again everywhere."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import at_most, p50_us, verdict

import layerzero as lz
from layerzero.client.capsules import store, taking
from layerzero.client.facade.default_session import session

Row = tuple[str, str, str, str]
NAME, DEADLY = "crasher", 6661.0
MIB = 64
MOST_MS = 100.0
ROUNDS, QUICK_ROUNDS = 10, 2
KEPT_MIB = 256  # of capsules; then each new one takes the place, and the page cache, of an old one
CRASHES = {"LAYERZERO_RESTART_BUDGET": "1000", "LAYERZERO_BACKOFF_S": "0.01", "LAYERZERO_BACKOFF_MAX_S": "0.01"}
_PROVIDER = f"""
import ctypes
import numpy as np
from layerzero.workers.provider import Loaded

def load():
    return Loaded({{"numpy": np.__version__}}, {{"{NAME}.silu": silu}})

def silu(call, inputs, outputs):
    x, y = (np.ndarray(b.spec.shape, b.spec.dtype, b.memory,
                       strides=[s * b.spec.itemsize for s in b.spec.strides]) for b in (inputs[0], outputs[0]))
    def run():
        if x.size and x.flat[0] == {DEADLY}:
            ctypes.string_at(0)
        with np.errstate(over="ignore"):
            y[...] = x / (1 + np.exp(-x))
    return run
"""


def add_crasher(folder: Path) -> None:
    """A backend whose silu dies, the same each time, where the first number is DEADLY."""
    claims = {"dtypes": ["float32"], "priority": 99, "source": "bench", "deterministic": True}
    descriptor = {
        "schema_version": "1.0",
        "backend": NAME,
        "backend_version": "1",
        "platform": "cpu",
        "ops": {"silu": [{**claims, "kernel_id": f"{NAME}.silu"}]},
    }
    (folder / f"{NAME}.json").write_text(json.dumps(descriptor))
    (folder / f"{NAME}.py").write_text(_PROVIDER)
    manifest = f'summary = "bench"\nprovider = "{NAME}.py"\ndescriptor = "{NAME}.json"\ninterpreter = "host"\n'
    (folder / f"{NAME}.toml").write_text(manifest)
    (folder / "policy.yaml").write_text("weights: {perfdb: 0, reliability: 0}\n")  # it is the first whatever happens


def environment(folder: Path, mode: str = "full") -> dict[str, str]:
    """Of a broker with that backend, and of sessions that keep capsules in the folder."""
    kept = {"LAYERZERO_CAPSULES": mode, "LAYERZERO_CAPSULE_DIR": str(folder / "capsules")}
    kept["LAYERZERO_CAPSULE_MIB"] = str(KEPT_MIB)
    own = {"LAYERZERO_MANIFEST_DIRS": str(folder), "LAYERZERO_POLICY": str(folder / "policy.yaml")}
    return {**own, **CRASHES, **kept}


def before_a_crash(null: Callable[[], None], settle: Callable[[], None], rounds: int, calls: int) -> Iterator[Row]:
    """The same lane, in short rounds in turn with capsules of whole arguments and with none."""
    own, made = session(), {}
    for mode in ("full", "off"):
        with mock.patch.dict(os.environ, {"LAYERZERO_CAPSULES": mode}):
            made[mode] = taking.Capsules(own.ask, own.capsules._log_of)
    before, x = own.capsules, lz.empty((256, 256), "float32")
    x[...] = 1.0
    for what, call in (("null call on an express lane", null), ("silu of 256 KiB", lambda: lz.silu(x))):
        call()
        settle()
        found: dict[str, list[float]] = {"full": [], "off": []}
        for n in range(rounds):
            for mode in ("full", "off") if n % 2 else ("off", "full"):
                own.capsules = made[mode]
                found[mode].append(p50_us(call, calls))
        own.capsules = before
        ratio = statistics.median(a / b for a, b in zip(found["full"], found["off"], strict=True))
        yield (
            f"{what}, before any crash: capsules=full",
            f"{statistics.median(found['full']):.2f} us",
            f"off: {statistics.median(found['off']):.2f} us",
            at_most(ratio, 1.01),
        )


def delays(*, is_quick: bool) -> Iterator[Row]:
    """Crashes of calls with 64 MiB, in shared memory and elsewhere: how much longer the answer takes that is there."""
    took: list[float] = []
    keep = taking.Capsules.keep

    def timed(self: taking.Capsules, *args: Any) -> str:
        start = time.perf_counter()
        note = keep(self, *args)
        took.append(1e3 * (time.perf_counter() - start))
        assert "capsule of the failure" in note, note
        return note

    def crash(x: Any) -> None:
        session().ask("reset", backend=NAME)  # else it is left alone for longer with each crash
        while True:  # its worker has started again
            lz.silu(np.ones((8, 8), np.float32))
            report = lz.last_report()
            if report is not None and report.backend == NAME:
                break
            time.sleep(0.05)
        x.flat[0] = DEADLY
        lz.silu(x)
        report = lz.last_report()
        assert report is not None
        assert [one.outcome is None for one in report.attempts] == [False, True], report

    lz.silu(np.ones((8, 8), np.float32), backend=NAME)
    side = int((MIB << 18) ** 0.5)
    shared = lz.empty((side, side), "float32")
    shared[...] = 1.0
    with mock.patch.object(taking.Capsules, "keep", timed), mock.patch.object(taking, "AGAIN_S", 0.0):
        for where, x in (("shared memory", shared), ("the program's own memory", np.ones((side, side), np.float32))):
            took.clear()
            for _ in range(QUICK_ROUNDS if is_quick else ROUNDS):
                crash(x)
            middle = statistics.median(took)
            yield (
                f"from the fallback's answer to the capsule's, {MIB} MiB of {where}",
                f"{middle:.0f} ms, at least {min(took):.0f}, at most {max(took):.0f}",
                f"aim: {MOST_MS:.0f} ms",
                verdict(middle <= MOST_MS),
            )
        took.clear()
        for n in range(QUICK_ROUNDS if is_quick else ROUNDS):
            crash(np.ones((8, 8 + n), np.float32))
    yield "likewise, of some hundred bytes", f"{statistics.median(took):.0f} ms, at most {max(took):.0f}", "", ""


def again(folder: Path, *, is_quick: bool) -> Iterator[Row]:
    """One command, on every backend that has the op and can serve here."""
    name = store.names(folder / "capsules")[-1]
    times = 1 if is_quick else 3
    command = [str(Path(sys.executable).with_name("lz")), "replay", name, "--env", "all", "-n", str(times), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    took_s = time.perf_counter() - start
    rows = json.loads(done.stdout)["backends"]
    died = {row["backend"] for row in rows if row["runs"] == {"signal 11": times}}
    served = sorted(row["backend"] for row in rows if row["runs"] == {"ok": times} and not row["is_far"])
    is_met = died == {NAME} and len(served) + 1 == len(rows)
    others = "" if is_met else f"; not as expected: {sorted({row['backend'] for row in rows} - died - set(served))}"
    yield (
        f"lz replay --env all -n {times} of the crash, {len(rows)} environments",
        f"signal 11 each time in {', '.join(sorted(died))}; ok in {', '.join(served)}{others}",
        f"{took_s:.0f} s",
        verdict(is_met),
    )
