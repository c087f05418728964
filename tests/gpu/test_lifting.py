"""Kernels of real libraries, lifted out of their process and launched by another that has the driver alone.

    python -m pytest -s tests/gpu/test_lifting.py

prints a line for each kind of call: what it consists of, what lifting and launching cost, and whether the results are
those of its library. Backends whose library this interpreter lacks are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.bare_worker import NBYTES, PLANS, SPEC, Connect, Spawn, Worker, call, clients
from tests.gpu.lifting_calls import kinds
from tests.gpu.peer import ROOT

from layerzero.ipc.cuda import driver
from layerzero.ipc.lifting.form import Copy, Kernel
from layerzero.ipc.transport import messages
from layerzero.workers.gpu.lifting import modules

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads manifests")
LAYERZERO = ROOT / "src" / "layerzero"
DESCRIPTORS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((LAYERZERO / "capabilities" / "descriptors").glob("*.json"))
}
BACKENDS = [name for name, descriptor in DESCRIPTORS.items() if descriptor["platform"] == "cuda"]
TIMEOUT_S = 400
AIM = 0.95  # of classes that a deterministic kernel is certified in
# Kinds of which the design says that they can be lifted, by the start of their name.
MUST = (
    "torch-cuda.rms_norm: 1024 x 4096",
    "torch-cuda.layer_norm: ",
    "torch-cuda.layer_norm_backward: 1024 x 4096",
    "torch-cuda.rms_norm_backward: 1024 x 4096",
    "triton.layer_norm_backward: ",
    "triton.rms_norm_backward: ",
    "torch-cuda.silu: ",
    "torch-cuda.gelu: ",
    "torch-cuda.softmax: ",
    "torch-cuda.linear: ",
    "torch-cuda.attention.flash: ",
    "cudnn.attention: ",
)
pytestmark = pytest.mark.timeout(TIMEOUT_S + 200)


def environment(backend: str) -> tuple[str, dict[str, str]]:
    """A backend's provider and variables."""
    manifest = tomllib.loads((LAYERZERO / "envs" / "manifests" / f"{backend}.toml").read_text(encoding="utf-8"))
    site, caches = sysconfig.get_path("purelib"), str(ROOT / ".gpu-caches")
    variables = {
        name: value.replace("{cache}", f"{caches}/{backend}").replace("{site}", site)
        for name, value in manifest.get("env", {}).items()
    }
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return f"layerzero.workers.providers.{manifest['provider']}", {**os.environ, **variables, "PYTHONPATH": path}


def run(arguments: list[str], environ: dict[str, str], patience_s: float) -> tuple[list[dict[str, Any]], str]:
    """What lifting_checks.py says, and how it ended where that was not well."""
    command = [sys.executable, "-m", "tests.gpu.lifting_checks", *arguments]
    try:
        ran = subprocess.run(
            command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=patience_s, check=False
        )
        said, end = ran.stdout, "" if ran.returncode == 0 else f"exit code {ran.returncode}: {ran.stderr[-1500:]}"
    except subprocess.TimeoutExpired as exc:
        said = exc.stdout.decode() if isinstance(exc.stdout, bytes) else exc.stdout or ""
        end = f"not through after {patience_s:g} s"
    return [json.loads(line) for line in said.splitlines() if line.endswith("}")], end


def launch(how: str, files: list[str], environ: dict[str, str]) -> dict[str, dict[str, Any]]:
    """By file, what launching or proving it gave. One that ends its process is told from the rest."""
    found: dict[str, dict[str, Any]] = {}
    while left := [file for file in files if file not in found]:
        said, end = run([how, *left], environ, 60 + 5 * len(left))
        found |= {one["file"]: one for one in said}
        still = [file for file in files if file not in found]
        if still and end:
            found[still[0]] = {"verdict": f"stopped: {end.strip().splitlines()[-1][:300]}"}
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_lifted_kernels_give_what_their_library_gives(
    driver: driver.Driver, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, in a process that has never loaded it, whatever scratch and unwritten parameters hold."""
    provider, environ = environment(backend)
    arguments = ["lift", provider, str(LAYERZERO / "capabilities" / "descriptors" / f"{backend}.json"), str(tmp_path)]
    start_s = time.monotonic()
    said, end = run(arguments, environ, TIMEOUT_S)
    if not said:
        pytest.skip(f"{backend}: {end[-300:]}")
    lift_s = time.monotonic() - start_s
    head, *lifted = said
    verdicts = launch("launch", [one["file"] for one in lifted if "file" in one], environ)
    lines = [f"\n== {backend} {head['versions']}, CUPTI: {head['cupti']}; lifted in {lift_s:.0f} s {end[-300:]}"]
    failed = []
    for one in lifted:
        result = verdicts.get(one.get("file", ""), {})
        verdict = result.get("verdict") or f"{one['reason']}: {one['detail']}"
        lines.append(f"{one['kind']}: {verdict}")
        if "steps" in one:
            lines.append(
                f"    {one['steps']} steps, {one['kernels']} kernels {one['names'][:3]}, scratch {one['scratch']}, "
                f"code {one['code_bytes']:,} bytes, {one['patches']} addresses, {one['padding']} bytes of padding; "
                f"lifting {one['lift_ms']} ms, loading {result.get('load_ms')} ms, "
                f"a launch {result.get('host_us')} us host, {result.get('stream_us')} us"
            )
        if one["kind"].startswith(MUST) and verdict != "equal":
            failed.append(f"{one['kind']}: {verdict}")
    equal = sum(one.get("verdict") == "equal" for one in verdicts.values())
    lines.append(f"== {backend}: {len(lifted)} kinds, {len(verdicts)} lifted, {equal} equal")
    with capsys.disabled():
        print("\n".join(lines))
    assert head["cupti"] == "seen"
    assert not end
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nearly_all_classes_of_deterministic_kernels_lift(
    driver: driver.Driver, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call of each class that they are certified in, proved as the broker has it done; others have their reason."""
    provider, environ = environment(backend)
    descriptor = LAYERZERO / "capabilities" / "descriptors" / f"{backend}.json"
    said, end = run(["certified", provider, str(descriptor), str(tmp_path)], environ, TIMEOUT_S)
    if len(said) < 2:
        pytest.skip(f"{backend}: {end[-300:] or 'no kernel of it is deterministic'}")
    lifted = said[1:]
    verdicts = launch("prove", [one["file"] for one in lifted if "file" in one], environ)
    others: dict[str, list[str]] = {}  # classes, by kernel and why they are not lifted
    for one in lifted:
        verdict = verdicts[one["file"]]["verdict"] if "file" in one else f"{one['reason']}: {one['detail']}"
        if verdict != "proved":
            kernel, _, name = one["kind"].partition(": ")
            others.setdefault(f"{kernel}: {verdict[:160]}", []).append(name)
    proved = len(lifted) - sum(map(len, others.values()))
    lines = [f"\n== {backend}: {proved} of {len(lifted)} classes of deterministic kernels are proved"]
    lines += [f"{len(names)} of {why} (as {names[0]})" for why, names in others.items()]
    with capsys.disabled():
        print("\n".join(lines))
    assert not end
    assert not [why for why in others if ": RAISED: " in why or ": stopped: " in why]
    assert proved >= AIM * len(lifted), "\n".join(lines)


@pytest.fixture
def spawn(context: driver.Context, tmp_path: Path) -> Iterator[Spawn]:
    spawn = Spawn(tmp_path, context.gpu)
    yield spawn
    spawn.close()


@pytest.fixture
def connect(current: driver.Context, spawn: Spawn) -> Iterator[Connect]:
    with clients(current, spawn) as make:
        yield make


@pytest.fixture
def cupti() -> None:
    if not modules.find(os.environ, sys.path):
        pytest.skip("no libcupti here")


@pytest.mark.usefixtures("cupti")
def test_worker_hands_over_what_a_kernel_does(spawn: Spawn) -> None:
    """The toy's kernel is a copy by the driver: it needs no machine code."""
    answer = spawn(lifts=True).lift(PLANS["copy"], (256, 16), seeds=(3, 4))
    assert answer.specimen is not None, answer
    lifted = answer.specimen.lifted
    (step,) = lifted.steps
    assert isinstance(step, Copy)
    assert (step.source, step.target, step.nbytes) == (("input", 0, 0), ("output", 0, 0), NBYTES)
    assert (lifted.scratch, lifted.codes, lifted.inputs, lifted.alignments) == ((), (), (SPEC,), (256, 16))
    assert set(answer.specimen.trials) == {3, 4}


@pytest.mark.usefixtures("cupti")
@pytest.mark.parametrize(("kernel", "detail"), [("raise", "the toy refuses"), ("synchronize", "cuStreamSynchronize")])
def test_worker_says_why_a_kernel_cannot_be_lifted(spawn: Spawn, kernel: str, detail: str) -> None:
    """And serves on."""
    worker = spawn(lifts=True)
    answer = worker.lift(PLANS[kernel], (256, 256))
    assert answer.reason == "NOT_CAPTURABLE"
    assert detail in answer.detail
    assert worker.lift(PLANS["copy"], (256,)).reason == "WORKER_FAILED"
    assert worker.lift(PLANS["copy"], (256, 256)).specimen is not None


@pytest.mark.usefixtures("cupti")
def test_worker_that_watches_no_machine_code_says_so(spawn: Spawn) -> None:
    """Its kernels stay where they are."""
    assert spawn().lift(PLANS["copy"], (256, 256)).reason == "NO_CUPTI"


@pytest.mark.usefixtures("cupti")
def test_lifting_waits_for_no_client(spawn: Spawn, connect: Connect) -> None:
    """A stream of the worker waits for a client's; what was allocated is freed once it goes on."""
    worker, client = spawn(lifts=True), connect()
    client.join(worker)
    release = client.hold()
    client.write(0, b"x" * NBYTES)
    call(worker, client, 0, 1)
    assert worker.lift(PLANS["copy"], (256, 256)).specimen is not None
    assert not client.driver.is_stream_idle(client.streams[0])
    release()
    assert client.read(1) == b"x" * NBYTES


@pytest.mark.usefixtures("cupti")
def test_worker_of_a_real_library_hands_over_its_machine_code(context: driver.Context, tmp_path: Path) -> None:
    """As the broker asks for it."""
    pytest.importorskip("torch", reason="the backend's tensors are torch's")
    (kernel,) = DESCRIPTORS["torch-cuda"]["ops"]["rms_norm"]
    kind = next(iter(kinds("rms_norm", kernel)))
    worker = Worker(
        tmp_path, context.gpu, provider="layerzero.workers.providers.torch_cuda", lifts=True, prepares=False
    )
    try:
        prepare = messages.Prepare(
            op=kind.call.op,
            kernel_id=kind.call.kernel_id,
            inputs=[None if spec is None else spec.to_wire() for spec in kind.call.inputs],
            outputs=[spec.to_wire() for spec in kind.call.outputs],
            attrs=dict(kind.call.attrs),
            device=context.gpu,
            is_graph_safe=True,
        )
        worker.prepared[5] = prepare
        answer = worker.lift(5, kind.alignments)
        assert answer.specimen is not None, answer
        assert any(isinstance(step, Kernel) for step in answer.specimen.lifted.steps)
        assert answer.specimen.codes
        assert "torch" in answer.specimen.lifted.versions
    finally:
        worker.close()
