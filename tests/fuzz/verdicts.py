"""What a probe's process writes, which is a foreign library's: a verdict that certifies its own kernels at most, or the
record of a failure. Never an exception: one environment must not keep a broker from going on."""

from __future__ import annotations

import json
import random

import msgpack
from tests.fuzz import scratch, values
from tests.unit.broker.driver import Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.io import frame_codec
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.storage.perf_rows import Identity
from layerzero.envs.probe import probe
from layerzero.envs.probe.child import Ended

TYPED = ()
_PATH = scratch.folder() / "probes" / "alpha-key.json"


def run(data: bytes) -> None:
    ended = Ended(0, data, b"last words")
    record = probe.judge(ended, "alpha", "key", 1.0, 10.0, lambda kind, _: f"lz env probe {kind}")
    probe.keep_record(_PATH, record)
    kept = probe.cached_record(_PATH)
    assert kept is not None
    assert kept.ok == record.ok
    record.counts  # noqa: B018  # it is computed when asked
    driver = Driver("alpha", "beta")
    driver.route(2, backend="alpha")
    driver.call(1, 2)
    failure = Launcher.failure(record)
    for action in driver(ev.ProbeEnded("alpha", failure, record)):
        if isinstance(action, act.Refuse):
            frame_codec.TO_CLIENT[act.Refuse](action)
    worker = driver.state.workers["alpha"]
    driver(ev.WorkerSpawned("alpha", worker.generation, 1))
    if record.ok:
        driver(ev.WorkerReady(b"W1", "alpha", worker.generation, record.versions))
        assert worker.was_ready
        Identity(torch_version=record.versions.get("torch", "")).hash  # noqa: B018
    assert not driver.state.engine.certification.is_known("beta.silu"), "alpha's probe says something of beta's kernel"
    msgpack.packb({"versions": dict(record.versions), "cause": failure.to_wire() if failure else None})


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    try:
        return values.mutated_text(json.loads(data), rng)
    except (ValueError, TypeError, RecursionError):
        return None


def seeds() -> dict[str, bytes]:
    classes = {"plain/small/dense": 0.0, "plain/large/dense": 1e-6}
    failure = {"kernel_id": "alpha.silu", "dtype": "float64", "shape_class": "x", "case": "c", "detail": "wrong"}
    passed = {
        "ok": True,
        "versions": {"alpha": "1.0", "torch": "2.13.0"},
        "kernels": {"alpha.silu": {"ms": 1.0}, "alpha.gelu": {}},
        "certified": {"alpha.silu": {"float32": classes}},
        "failures": [failure],
    }
    error = {"kind": "import", "message": "no module", "missing": "alpha", "traceback": "..."}
    return {
        "passed": json.dumps(passed).encode(),
        "others": json.dumps({**passed, "kernels": {"beta.silu": {}}}).encode(),
        "failed": json.dumps({**passed, "ok": False, "error": error}).encode(),
        "nothing": b"Segmentation fault\n",
    }
