"""What a person sees: reports, errors and tables as they are printed at 80 columns, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import select
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process.harness import BACKENDS, PATIENCE_S, Site, wait_until
from tests.process.test_cli import DONE, FAILED, data
from tests.process.test_cli import lz as run_lz

import layerzero as lz
from layerzero.broker.processes.cuda_driver import detect_gpus
from layerzero.envs.manifest import discover

Sites = Callable[..., Site]
X = np.ones((2, 8), np.float32)
OTHERS = {"torch-hpu": "a Gaudi HPU", "torch-rocm": "an AMD GPU", "torch-xpu": "an Intel GPU"}  # and what each needs
GPU_BACKENDS = sorted(
    name for name, one in discover()[0].items() if one.variants and "cpu" not in one.variants and name not in OTHERS
)
TOYS = ("alpha", "beta", "gamma")

pytestmark = pytest.mark.skipif(bool(detect_gpus().devices), reason="what is said where there is no GPU")


@pytest.fixture
def site(new_site: Sites) -> Site:
    """A healthy machine: the toys are there, and all GPU backends are allowed; other environments are not built."""
    return new_site(allow_sources=";".join((*TOYS, *GPU_BACKENDS))).start()


def fits(text: str, *, lines: int) -> bool:
    """Whether it fits so many lines of 80 columns."""
    return len(text.splitlines()) <= lines and all(len(line) <= 80 for line in text.splitlines())


# --- backends of other machines


def test_doctor_finds_a_healthy_machine_healthy(site: Site) -> None:
    """Ten backends for GPUs are here as files, and are no fault of a machine without one: one line in all."""
    site.connect()
    site.wait_ready(*TOYS)
    assert len(GPU_BACKENDS) >= 10
    shown = run_lz(site, "doctor", COLUMNS="80")
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (DONE, "ready")
    checks = {check["name"]: check for check in data(run_lz(site, "doctor", "--json"))["checks"]}
    assert not [name for name in GPU_BACKENDS if f"environment {name}" in checks]
    platforms = checks["platforms"]
    expected = f"not for this machine: {', '.join(GPU_BACKENDS)}: needs an NVIDIA GPU, and this machine has none"
    assert (platforms["ok"], platforms["detail"].startswith(expected)) == (True, True)
    for name, device in OTHERS.items():
        assert f"environment {name}" not in checks
        assert f"not for this machine: {name}: needs {device}, and this machine has none" in platforms["detail"]


def test_doctor_fails_where_a_gpu_backend_is_needed(site: Site) -> None:
    """Who names it needs it; then it is a fault that there is no GPU."""
    answer = data(run_lz(site, "doctor", "torch-cuda", "--json"), FAILED)
    [check] = [check for check in answer["checks"] if check["name"] == "environment torch-cuda"]
    assert (check["ok"], check["repair"]) == (False, "a machine that has one")
    assert check["detail"].startswith("NOT_FOR_MACHINE: needs an NVIDIA GPU")


def test_status_of_a_healthy_machine_finds_nothing_wrong(site: Site) -> None:
    """GPU backends are one line, all of them on request, and complete in JSON."""
    rows = {row["name"]: row for row in data(run_lz(site, "status", "--json"))["backends"]}
    assert {rows[name]["unavailable"]["code"] for name in GPU_BACKENDS} == {"NOT_FOR_MACHINE"}
    assert set(rows["torch-cuda"]["unavailable"]) == {"code", "detail", "repair"}
    shown = run_lz(site, "status", COLUMNS="80").stdout
    wrong = shown.partition("what is wrong")[2]
    assert [name for name in GPU_BACKENDS if name in wrong] == []
    assert {rows[name]["unavailable"]["code"] for name in OTHERS} == {"NOT_FOR_MACHINE"}
    names = ", ".join(sorted((*GPU_BACKENDS, *OTHERS)))
    assert f"not for this machine, --all shows why: {names}" in " ".join(shown.split())
    in_full = run_lz(site, "status", "--all", COLUMNS="80").stdout
    assert "torch-cuda" in in_full.partition("backend ")[2].partition("\n\n")[0]
    assert "needs an NVIDIA GPU, and this machine has none" in in_full.partition("\nnot for this machine\n")[2]


# --- reports


def test_report_of_attention_fits_a_small_terminal(new_site: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines that anybody prints; fifteen kernels for GPUs are one of them."""
    monkeypatch.setenv("COLUMNS", "80")
    new_site().connect()
    q = np.ones((1, 8, 16, 64), np.float32)
    report = lz.explain("attention", q, q, q)
    text = str(report)
    print(text)
    assert fits(text, lines=15)
    count = sum(candidate.backend in GPU_BACKENDS for candidate in report.candidates)
    assert f"{count} kernels need an NVIDIA GPU\n" in text
    # torch-rocm's and torch-xpu's, which nobody has run; torch-hpu has no attention
    assert "2 kernels need other hardware; full list: --all, or report.text(verbose=True)" in text
    assert text.index("lz env build torch") < text.index("need an NVIDIA GPU")
    whole = report.text(verbose=True)
    assert [c.kernel_id for c in report.candidates if c.kernel_id not in whole] == []
    assert "PLATFORM_MISMATCH" in whole
    assert str(lz.explain("attention", q, q, q, verbose=True)) == whole
    assert {c["kernel_id"] for c in report.to_dict()["candidates"]} == {c.kernel_id for c in report.candidates}


def test_report_shows_chosen_then_accepted_then_what_can_be_repaired(new_site: Sites) -> None:
    """What the reader can act on comes before what nobody can change."""
    new_site().connect()
    lz.silu(X)
    report = lz.last_report()
    assert report is not None
    kernels = [line.split()[0] for line in str(report).splitlines() if ".silu " in line and "silu:" not in line]
    assert kernels == [
        "alpha.silu",
        "beta.silu",
        "gamma.silu",
        "mlx.silu",
        "numba.silu",
        "onnxruntime.silu",
        "torch.silu",
    ]
    assert "need an NVIDIA GPU" in report._repr_html_()


def test_report_of_a_pinned_call_shows_the_pinned_kernel_only(site: Site) -> None:
    """That the others are not pinned is what the caller asked for."""
    shown = run_lz(site, "explain", "silu", "4:f32", "--backend", "beta", COLUMNS="80").stdout
    assert "beta.silu" in shown
    assert "alpha.silu" not in shown
    assert "NOT_PINNED" not in shown
    assert "kernels need the call to be pinned to another backend" in " ".join(shown.split())
    in_full = run_lz(site, "explain", "silu", "4:f32", "--backend", "beta", "--all", COLUMNS="80").stdout
    assert "NOT_PINNED" in in_full


# --- errors


def test_first_line_of_an_error_says_what_to_do(new_site: Sites) -> None:
    """Who has forgotten `lz env build` learns that, and not first where manifests of GPU backends lie."""
    site = new_site().start()
    site.connect()
    with pytest.raises(lz.NoBackend) as failure:
        lz.gelu(X)
    first, *more = str(failure.value).splitlines()
    assert first == "gelu: no kernel accepts this call; repair: lz env build mlx"
    assert sorted(line.strip() for line in more[-2:]) == [
        "2 kernels need an NVIDIA GPU",
        "3 kernels need other hardware",
    ]
    assert "/manifests/" not in str(failure.value)
    assert failure.value.facts["repair"] == "lz env build mlx"
    with pytest.raises(lz.NoBackend) as failure:
        lz.gelu(X, backend="torch-cuda")
    text = str(failure.value)
    assert "torch-cuda.gelu: PLATFORM_MISMATCH" in text
    assert "NOT_FOR_MACHINE: needs an NVIDIA GPU" in text
    assert json.dumps(failure.value.report.to_dict()).count("NOT_FOR_MACHINE") >= 1


# --- waiting

GATED = """
import os, time
_real = load


def load():
    while not os.path.exists(os.environ["LZ_GATE"]):
        time.sleep(0.01)
    return _real()
"""
CALL = """
import array, sys
lz.connect()
print("calls", flush=True)
lz.silu(array.array("f", [1.0]), backend="gated")
print(lz.last_report(), flush=True)
"""


def test_first_call_says_on_a_terminal_why_it_waits_and_in_the_report_for_how_long(new_site: Sites) -> None:
    """Seconds of silence look like a hang. A pipe, and a terminal whose user wants it quiet, hear nothing."""
    site = new_site()
    gate = site.folder / "gate"
    toy = (BACKENDS / "toy.py").read_text()
    site.add_backend("gated", provider=toy + GATED, env={"LZ_GATE": str(gate)})
    site.start()
    terminal, slave = pty.openpty()
    muted, muted_slave = pty.openpty()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, terminal)
        stack.callback(os.close, muted)
        piped = stack.enter_context(site.python(CALL, stderr=subprocess.PIPE))
        site.environ["LAYERZERO_PROGRESS"] = "0"
        quiet = stack.enter_context(site.python(CALL, stderr=muted_slave))
        del site.environ["LAYERZERO_PROGRESS"]
        for client in (piped, quiet):  # they wait for longer than the one that is listened to
            assert client.stdout is not None
            assert client.stdout.readline() == "calls\n"
        shown = stack.enter_context(site.python(CALL, stderr=slave))
        os.close(slave)
        os.close(muted_slave)
        assert select.select([terminal], [], [], PATIENCE_S)[0], "nothing is said"
        line = os.read(terminal, 1000).decode()
        gate.touch()
        reports = [client.stdout.read() for client in (piped, quiet, shown) if client.stdout is not None]
        assert piped.stderr is not None
        assert piped.stderr.read() == ""
        assert [client.wait(PATIENCE_S) for client in (piped, quiet, shown)] == [0, 0, 0]
        assert not select.select([muted], [], [], 0)[0] or _is_hung_up(muted)
    assert line.startswith("layerzero: silu waits: the gated worker is ")
    assert line.rstrip().endswith("s so far")
    for report in reports:
        assert " s: its worker was started\n" in report


def _is_hung_up(terminal: int) -> bool:
    """Nobody has the other end, and nothing was written to it."""
    try:
        return os.read(terminal, 1) == b""
    except OSError as exc:
        return exc.errno == errno.EIO


# --- what is known, and of when


def test_report_of_a_repeated_call_says_of_when_its_verdicts_are(new_site: Sites) -> None:
    """A settled call asks nobody: what its report says of kernels was true when it was chosen, and may not be now."""
    site = new_site()
    site.connect()
    site.wait_ready(*TOYS)
    x, out = lz.share(X), lz.empty_like(X)
    lz.silu(x, out=out)
    report = lz.last_report()
    assert report is not None
    assert (report.verdicts_age_s, "verdicts of" in str(report)) == (0.0, False)

    def settled() -> lz.SelectionReport | None:
        lz.silu(x, out=out)
        report = lz.last_report()
        return report if report is not None and report.path == "express" else None

    report = wait_until(settled)
    assert report is not None
    assert report.verdicts_age_s > 0
    assert "before this call; lz.explain has the present ones" in str(report)
    assert "not measured yet" not in str(report)
    assert f"verdicts of {report.verdicts_age_s:,.1f} s" in str(report) or "verdicts of a moment" in str(report)


def test_plan_without_times_has_no_sums(new_site: Sites) -> None:
    """ "0 us with the joint plan" reads like a measurement."""
    new_site().connect()
    text = str(lz.dry_run(lambda: lz.silu(lz.silu(X))))
    assert text.splitlines()[0] == "2 calls, no times yet: lz.tune(...) or lz.warmup(...) measures them"
    assert " us" not in text
    assert str(lz.dry_run(lambda: lz.silu(X))).startswith("1 call, ")


# --- words


def test_explain_suggests_the_op_that_is_meant(new_site: Sites) -> None:
    """By a name that is nearly right, and by a function of torch that does the same."""
    new_site().connect()

    def scaled_dot_product_attention() -> None: ...

    for given, meant in (("attenton", "attention"), (scaled_dot_product_attention, "attention"), (np.matmul, "matmul")):
        with pytest.raises(lz.InvalidArgument, match=rf"did you mean lz\.{meant}\? Ops: "):
            lz.explain(given, X)  # type: ignore[arg-type]


def test_objects_say_what_they_are(new_site: Sites, tmp_path: Path) -> None:
    """A notebook shows them, and nobody reads addresses."""
    site = new_site()
    site.use_store(tmp_path / "store")  # other tests declare environments of functions
    session = site.connect()
    assert repr(session) == (
        f"<lz.Session with broker pid {site.broker_pid} in {site.folder}, backends: alpha, beta, gamma, null>"
    )
    compiled = lz.compile(lambda: lz.silu(X))
    assert repr(compiled).endswith("<lambda>: 0 runs, 0 plans>")
    with lz.prefer("beta") as scope:
        assert "beta" in repr(scope)
    assert repr(scope).endswith("not in force here>")
    plan = lz.dry_run(lambda: lz.silu(X))
    assert plan._repr_html_().startswith("<b>1 call, no times yet")
    lz.disconnect()
    assert "not connected" in repr(session)


def test_policy_shows_rules_as_they_were_written(new_site: Sites) -> None:
    """What is printed can be pasted into a policy."""
    site = new_site()
    rule = {"match": {"op": ["matmul", "linear"], "seq_len": ">=128"}, "prefer": ["beta"], "bonus": 20}
    site.set_policy(f"rules: [{json.dumps(rule)}]\n")
    assert data(run_lz(site, "policy", "show", "--json"))["values"]["rules.0"] == rule


def test_status_fits_a_small_terminal(new_site: Sites) -> None:
    """Versions are cut, names and states are not."""
    site = new_site()
    site.connect()
    site.wait_ready(*TOYS)
    shown = run_lz(site, "status", COLUMNS="80").stdout.partition("what is wrong")[0].partition("\nbackend ")[2]
    rows = [line.split()[:2] for line in shown.splitlines()]
    assert [row for row in rows if row and row[0] in TOYS] == [[name, "ready"] for name in TOYS]
    assert max(map(len, shown.splitlines())) <= 80
