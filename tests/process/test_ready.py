"""lz.readiness_check, lz.warmup and `lz doctor`: what is looked at, what each fault says, what is tried."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.harness import BACKENDS, Site
from tests.process.test_cli import data
from tests.process.test_cli import lz as run_lz
from tests.process.test_tune import provider

import layerzero as lz
from layerzero.broker.processes.host import detect_cpu
from layerzero.broker.selection import dispatch_table
from layerzero.broker.selection.dispatch_table import Hardware, Header, Measurement
from layerzero.client.tools.calls import Call
from layerzero.client.tools.ready import Check, ReadinessReport
from layerzero.ipc.vocabulary.tensors import TensorSpec

TOYS = ["alpha", "beta", "gamma"]
GENERAL = [
    "descriptors",
    "platforms",
    "kernel sources",
    "policy",
    "dispatch table",
    "measured times",
    "compiled kernels",
    "memory",
    "GPU sharing",
    "confinement",
    "huge pages",
]
SILU = Call("silu", {"input": TensorSpec.contiguous("float32", (4, 8))})


def found(report: ReadinessReport) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


@pytest.fixture
def toys(new_site: Callable[..., Site]) -> Callable[..., Site]:
    """Sites on which the toys alone are wanted: other environments are perhaps not built here."""
    return lambda *more, **settings: new_site(**{"allow_sources": ";".join((*TOYS, *more)), **settings})


def ready(site: Site) -> Site:
    """Its environments have been probed: a worker is started only after that."""
    site.start().connect()
    site.wait_ready(*TOYS)
    return site


# --- ready


def test_a_broker_in_order_is_ready(toys: Callable[..., Site]) -> None:
    """Every backend answers from a process of its own, and a script can go by the exit code."""
    ready(toys())
    report = lz.readiness_check()
    assert [check.name for check in report.checks] == [
        *(f"environment {name}" for name in TOYS),
        *GENERAL,
        *(f"worker {name}" for name in TOYS),
    ]
    assert (report.ok, report.exit_code, [c.repair for c in report.checks if c.repair]) == (True, 0, [])
    assert str(report).startswith("ready\n")
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    pids = {row["pid"] for row in lz.status()["backends"] if row["name"] in TOYS}
    assert len(pids) == 3
    assert all(f"in process {pid}" in str(report) for pid in pids)


def test_backends_that_cannot_run_are_not_tried(new_site: Callable[..., Site]) -> None:
    """Nothing is named: the project's own backends are wanted, too, and are not built in this store. Why is a check of
    each one's environment; a call that is sure to fail would say less, and the check once ended in a KeyError there."""
    ready(new_site())
    checks = found(lz.readiness_check())
    assert {name for name in checks if name.startswith("worker ")} == {f"worker {name}" for name in (*TOYS, "null")}
    assert not checks["environment torch"].ok


def test_only_the_backends_that_are_needed_are_looked_at(toys: Callable[..., Site]) -> None:
    """By name, or by what the policy allows; a backend that nobody uses must not hold up a deployment."""
    site = toys(allow_sources="alpha;gamma")
    site.start().connect()
    site.wait_ready("alpha", "gamma")
    names = {check.name for check in lz.readiness_check(starts_workers=False).checks} - set(GENERAL)
    assert names == {"environment alpha", "environment gamma"}
    names = {check.name for check in lz.readiness_check(backends=["gamma"]).checks} - set(GENERAL)
    assert names == {"environment gamma", "worker gamma"}
    with pytest.raises(lz.InvalidArgument, match="did you mean 'gamma'"):
        lz.readiness_check(backends=["gama"])
    with pytest.raises(lz.InvalidArgument, match="takes `backends`"):
        lz.session().ask("readiness", backends="alpha")


def test_each_kernel_of_the_calls_given_must_have_run(toys: Callable[..., Site]) -> None:
    """A cold kernel costs the first customer a start and a compilation."""
    ready(toys())
    before = found(lz.readiness_check(calls=[SILU], starts_workers=False))["warm silu(4x8:float32)"]
    assert (before.ok, before.repair) == (False, "lz.warmup, or lz tune")
    warm = lz.warmup([SILU])
    assert (warm.ok, [run.kernel_id for run in warm.runs]) == (True, ["alpha.silu", "beta.silu"])
    after = found(lz.readiness_check(calls=[SILU], starts_workers=False))["warm silu(4x8:float32)"]
    assert (after.ok, "alpha.silu" in after.detail) == (True, True)


# --- not ready


@pytest.mark.parametrize(
    ("settings", "name", "text", "repair"),
    [
        ({"plan_mode": "true"}, "dispatch table", "plan_mode is on", "lz solve"),
        ({"memory_headroom_bytes": "900000 GiB"}, "memory", "bytes free, memory_headroom_bytes is", "free memory"),
        (
            {"dispatch_table": "/nowhere/table.json"},
            "dispatch table",
            "/nowhere/table.json cannot be read",
            "lz solve",
        ),
        ({"perf_db": "/proc/1/perf.db"}, "measured times", "/proc/1/perf.db", "a writable /proc/1"),
    ],
)
def test_what_the_policy_asks_for_and_the_machine_lacks_is_a_fault(
    toys: Callable[..., Site], settings: dict[str, str], name: str, text: str, repair: str
) -> None:
    """The report says what, and what to do."""
    ready(toys())  # what its probes have shown is known from here on
    lz.disconnect()
    toys(**settings).start().connect()
    report = lz.readiness_check(starts_workers=False)
    assert [check.name for check in report.checks if not check.ok] == [name]
    fault = found(report)[name]
    assert text in fault.detail
    assert fault.repair.startswith(repair)
    assert (report.ok, report.exit_code) == (False, 1)
    assert f"repair: {repair}" in str(report)


def test_memory_that_is_free_is_enough(toys: Callable[..., Site]) -> None:
    """The limit is one that can be met."""
    ready(toys(memory_headroom_bytes="1 MiB"))
    check = found(lz.readiness_check(starts_workers=False))["memory"]
    assert (check.ok, check.repair) == (True, "")


def test_a_policy_that_broke_since_the_start_is_a_fault(toys: Callable[..., Site], tmp_path: Path) -> None:
    """The broker goes on with the one before, and nobody would notice until its next start."""
    file = tmp_path / "policy.yaml"
    file.write_text("strict_mode: false\n")
    ready(toys(policy=file))
    file.write_text("strict_mood: false\n")
    while (check := found(lz.readiness_check(starts_workers=False))["policy"]).ok:
        lz.null()  # the broker looks once a second
    assert "strict_mood" in check.detail
    assert check.repair == f"lz policy check {file}"


def test_a_broken_descriptor_is_a_fault(toys: Callable[..., Site]) -> None:
    """Its backend is left out, and that is easy to overlook."""
    site = toys()
    site.add_backend("delta")
    (site.manifests / "delta.json").write_text("{}")
    ready(site)
    check = found(lz.readiness_check(starts_workers=False))["descriptors"]
    assert (check.ok, "delta.json" in check.detail) == (False, True)


def test_a_backend_whose_probe_fails_is_a_fault(toys: Callable[..., Site]) -> None:
    """With the probe's own words and repair; its worker is not tried."""
    site = toys("broken")
    site.add_backend("broken", provider="def load():\n    raise RuntimeError('no such library')\n")
    ready(site)
    checks = found(lz.readiness_check())
    assert [name for name, check in checks.items() if not check.ok] == ["environment broken"]
    assert "no such library" in checks["environment broken"].detail
    assert checks["environment broken"].repair


def test_a_backend_that_was_never_probed_is_a_fault(toys: Callable[..., Site]) -> None:
    """Whether it works is not known, and the gate must not guess; to start its worker tells."""
    site = toys("fresh")
    site.add_backend("fresh")
    site.start().connect()
    check = found(lz.readiness_check(backends=["fresh"], starts_workers=False))["environment fresh"]
    assert (check.ok, check.repair) == (False, "lz env probe fresh")
    assert lz.readiness_check(backends=["fresh"]).ok


def test_a_worker_that_fails_its_call_is_a_fault(toys: Callable[..., Site]) -> None:
    """It loaded, was probed, and cannot work all the same."""
    site = toys("frail")
    failing = provider("assert x.shape != (256, 2048), 'out of registers'")
    site.add_backend("frail", provider=failing.replace("lambda: None", "lambda: 1 / 0"))
    site.start().connect()
    lz.silu(np.zeros((2, 2), np.float32), backend="frail")
    checks = found(lz.readiness_check(backends=["frail"]))
    assert [name for name, check in checks.items() if not check.ok] == ["worker frail"]
    assert "out of registers" in checks["worker frail"].detail
    assert checks["worker frail"].repair == "lz logs frail"


def _header(site: Site, **change: Any) -> Header:
    hashes = {name: descriptor_hash(name) for name in TOYS}
    envs = {row["name"]: row["env"] for row in lz.status()["backends"] if row["env"]}
    given = {
        "created": "2026-01-01T00:00:00Z",
        "layerzero_version": lz.__version__,
        "hardware": {"cpu": Hardware.of(detect_cpu())},
        "capability_hashes": hashes,
        "env_ids": envs,
        "command": "lz solve",
    }
    return Header(**{**given, **change})


def descriptor_hash(name: str) -> str:
    from layerzero.capabilities import descriptor

    return descriptor.load(BACKENDS / f"{name}.json").hash


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_dispatch_table_must_be_of_this_machine(toys: Callable[..., Site], tmp_path: Path, is_ours: bool) -> None:
    """Times of another one are no times."""
    path = tmp_path / "table.json"
    site = ready(toys(dispatch_table=path))
    header = _header(site) if is_ours else _header(site, capability_hashes={"alpha": "another"})
    measured = Measurement("silu x", {"x.0": 4}, {"alpha.silu": 1.0})
    path.write_text(dispatch_table.build([measured], header).save())
    assert lz.session().ask("load_table")["path"] == str(path)
    check = found(lz.readiness_check(starts_workers=False))["dispatch table"]
    assert check.ok is is_ours
    if is_ours:
        assert "1 kind of calls, 1 bucket;" in check.detail
    else:
        assert "descriptor of alpha: table another" in check.detail


def test_isolation_that_the_policy_asks_for_must_hold(toys: Callable[..., Site]) -> None:
    """A backend meant to run in this process that has to run elsewhere is slower than was promised."""
    site = toys(backend_isolation="alpha=in_process")
    ready(site)
    check = found(lz.readiness_check(backends=["alpha"]))["worker alpha"]
    assert check.ok, check
    assert "isolation: in_process" in check.detail
    assert lz.last_report().worker_pid == os.getpid()


# --- warm-up


def test_warmup_runs_what_would_serve_and_what_would_take_over(toys: Callable[..., Site]) -> None:
    """All of them when asked; a backend that fails is a line, and a call that nobody takes another."""
    site = toys("broken")
    site.add_backend("broken", provider=provider("assert x.shape != (12, 34), 'never'"))
    site.start().connect()
    likely = lz.warmup("silu", np.zeros((12, 34), np.float32))
    assert [run.backend for run in likely.runs] == ["broken", "alpha"]
    bad, good = likely.runs
    assert "never" in bad.error
    assert (likely.ok, bad.first_us, good.error) == (False, None, "")
    assert good.first_us is not None
    assert good.later_us is not None
    assert good.first_us > good.later_us > 0
    assert "never" in str(likely)
    every = lz.warmup([SILU], every=True)
    assert (every.ok, sorted(run.backend for run in every.runs)) == (True, sorted([*TOYS, "broken"]))
    nobody = lz.warmup("softmax", SILU.arrays["input"], dim=0)
    assert [run.error for run in nobody.runs] == ["no kernel accepts it; lz explain says why"]
    assert json.loads(json.dumps(nobody.to_dict()))["ok"] is False


# --- the command


def test_doctor_tells_a_person_and_a_script(toys: Callable[..., Site]) -> None:
    """0 when ready; 1 with the fault and its repair when not; workers are started when asked only."""
    site = ready(toys(plan_mode="true"))
    sick = run_lz(site, "doctor")
    assert sick.returncode == 1
    assert "plan_mode is on" in sick.stdout
    value = data(run_lz(site, "doctor", "alpha", "--ready", "--json"), 1)
    assert [check["name"] for check in value["checks"] if not check["ok"]] == ["dispatch table"]
    assert [check["name"] for check in value["checks"]][-1] == "worker alpha"
    well = toys()
    well.start()
    with well.environment():
        assert run_lz(well, "doctor", "--ready").returncode == 0
