"""Scripts for the library's developers, written from capsules and run in the environments of the backends: they need
nothing of layerzero, and make the call that the kernel makes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.envs.harness import STORE, Harness
from typer.testing import CliRunner

from layerzero.client.capsules import form
from layerzero.client.capsules.form import Argument, Capsule, Failure, Segment
from layerzero.client.cli.app import app
from layerzero.client.facade import api
from layerzero.client.tools import calls, script
from layerzero.envs.build.build import ensure, resolve
from layerzero.envs.build.env import Env
from layerzero.envs.build.environ import worker_environ
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec

NORMS = ["layer_norm", "rms_norm", "add_rms_norm", "group_norm", "instance_norm", "batch_norm"]
ACTIVATIONS = ["gelu", "silu", "relu", "sigmoid", "tanh", "hardswish", "mish", "swiglu", "geglu", "reglu"]
PRODUCTS = ["matmul", "addmm", "linear", "gated_mlp", "conv", "conv_transpose"]
POOLS = ["max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool", "interpolate"]
ELEMENTWISE = ["add", "mul", "clamp", "where", "cat", "cast"]
BOTH = [*NORMS, *ACTIVATIONS, *PRODUCTS, *POOLS, *ELEMENTWISE, "softmax", "log_softmax"]
OF = {
    "torch": [*BOTH, "attention", "embedding"],
    "onnxruntime": [*(op for op in BOTH if op != "rms_norm"), "quick_gelu", "attention_forward", "rope", "int_matmul"],
    "mlx": [
        *ELEMENTWISE,
        "matmul",
        "addmm",
        "conv",
        "layer_norm",
        "rms_norm",
        "softmax",
        "sigmoid",
        "tanh",
        "attention",
    ],
}
# Runs scripts one after the other in one process, and says which failed.
ALL = """\
import runpy, sys, traceback
for path in sys.argv[1:]:
    try:
        runpy.run_path(path)
    except Exception:
        traceback.print_exc()
        print("FAILED", path)
"""


def capsule_of(op: str, kernel_id: str) -> Capsule:
    """As if a worker had died of the first typical call of an op."""
    call = calls.DEFAULTS[op][0]
    request = api.request(op, **call.arrays, **call.params)
    named = zip(OPS[op].inputs, request.args, strict=True)
    given = [(name, spec) for name, spec in named if spec is not None]
    arguments = tuple(Argument(name, spec, n, 0) for n, (name, spec) in enumerate(given))
    segments = tuple(Segment(spec.span_bytes, 64) for _, spec in given)
    failure = Failure(kernel_id.partition(".")[0], kernel_id, "BACKEND_CRASHED", "", 11, None)
    facts = {"versions": {"torch": "1.0"}, "python": "3.11.2"}
    return Capsule(op, op, 0.0, arguments, segments, request.params, None, (failure,), "", "shapes", facts)


@pytest.mark.parametrize("backend", list(OF))
def test_scripts_of_capsules_make_the_call_with_the_library_alone(backend: str, tmp_path: Path) -> None:
    """Of each op with random numbers: results have the call's dtypes. With an argument's bytes, few in the script, many
    beside it: results are right."""
    paths, wanted = [], []
    for op in OF[backend]:
        call = calls.DEFAULTS[op][0]
        request = api.request(op, **call.arrays, **call.params)
        wanted.append([spec.dtype for spec in request.planner(*request.args, **request.params).outputs])
        paths.append(tmp_path / f"{op}.py")
        paths[-1].write_text(script.write(capsule_of(op, f"{backend}.{op}"), [], [], None, 0))
    op = "sigmoid" if backend == "mlx" else "silu"
    kept = {rows: with_bytes(f"{backend}.{op}", rows, tmp_path) for rows in (3, 3000)}
    assert [path.with_suffix(".npz").exists() for path, _ in kept.values()] == [False, True]
    (tmp_path / "all").write_text(ALL)
    env = ensure(resolve(backend), store=STORE)
    environ = environ_of(env)
    command = [env.python, tmp_path / "all", *paths, *(path for path, _ in kept.values())]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout, done.stdout + done.stderr
    came = [line for line in done.stdout.splitlines() if line.startswith("it came back")]
    for dtypes, line in zip(wanted, came, strict=False):
        assert all(dtype in line for dtype in dtypes), (dtypes, line)
    for path, x in kept.values():
        wanted_ = (1 if op == "sigmoid" else x) / (1 + np.exp(-x))
        np.testing.assert_allclose(np.load(f"{path}.npy"), wanted_, rtol=1e-5, atol=1e-6)


def environ_of(env: Env) -> dict[str, str]:
    """For a script in an environment. MLX's has no NumPy: that of another one is beside it."""
    environ = dict(worker_environ(env.environ, os.environ))
    environ.pop("PYTHONPATH", None)
    if not any(site_of(env).glob("numpy")):
        environ["PYTHONPATH"] = str(site_of(ensure(resolve("numba"), store=STORE)))
    return environ


def site_of(env: Env) -> Path:
    (found,) = Path(env.python).parents[1].glob("lib/python*/site-packages")
    return found


def with_bytes(kernel_id: str, rows: int, folder: Path) -> tuple[Path, np.ndarray]:
    """The script of a capsule that has its argument's bytes, as the command writes it. It saves its result."""
    x = np.linspace(-2, 2, rows * 8, dtype=np.float32).reshape(rows, 8)[:, ::2]
    name = f"of{rows}"
    capsules = folder / "capsules"
    (capsules / name).mkdir(parents=True)
    spec = TensorSpec("float32", x.shape, (8, 2))
    memory = x.base.tobytes()[: spec.span_bytes]
    segment = Segment(spec.span_bytes, 4, hashlib.sha256(memory).hexdigest())
    told = form.arguments_to_dict([Argument("x", spec, 0, 0)], [segment])
    backend, _, op = kernel_id.partition(".")
    bare = capsule_of(op, kernel_id).to_dict()
    (capsules / name / form.CALL).write_text(json.dumps({**bare, **told, "left_out": ""}))
    (capsules / name / form.memory_name(0)).write_bytes(memory)
    target = folder / f"{name}.py"
    command, environ = (
        ["capsule", "script", name, "-o", str(target), "--data"],
        {"LAYERZERO_CAPSULE_DIR": str(capsules)},
    )
    done = CliRunner().invoke(app, command, env=environ)
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, command, env=environ).exit_code, "what is there is not overwritten"
    text = target.read_text()
    assert f"#   {backend}==" in text
    assert "the process ended by SIGSEGV" in text
    target.write_text(f"{text}np.save(__file__ + '.npy', np.asarray(out))\n")
    return target, x


def test_a_script_ends_by_the_signal_that_the_kernel_ended_by(tmp_path: Path) -> None:
    """A real fault of a real library: onnxruntime 1.18 reads where nothing is when InstanceNormalization gets no
    numbers. (Its descriptor keeps such calls away from it.)"""
    x = TensorSpec.contiguous("float32", (2, 2, 0))
    request = api.request("group_norm", x, 2)
    plan = request.planner(*request.args, **request.params)
    with closing(Harness("onnxruntime")) as harness:
        with pytest.raises(pytest.fail.Exception, match=f"ended with -{signal.SIGSEGV:d}$"):
            harness.run("onnxruntime.group_norm", "group_norm", plan.inputs, plan.outputs, dict(plan.attrs), [[b""]])
    told = ends_alike("onnxruntime.group_norm", [("x", x)], dict(request.params), tmp_path)
    assert "run_with_iobinding" in told, "the stack is there for the issue"


def test_a_convolution_that_mlx_has_no_memory_for(tmp_path: Path) -> None:
    """A real fault that no descriptor keeps away: MLX lays out 8 TB of windows, gets no memory, and writes there."""
    if "1" in Path("/proc/sys/vm/overcommit_memory").read_text():
        pytest.skip("this machine promises any memory")
    specs = [TensorSpec.contiguous("float32", (1, 1, n, n)) for n in (4000, 400)]
    params = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    told = ends_alike("mlx.conv", list(zip(("x", "weight"), specs, strict=True)), params, tmp_path)
    assert "Segmentation fault" in told


def ends_alike(kernel_id: str, given: list[tuple[str, TensorSpec]], params: dict[str, Any], folder: Path) -> str:
    """What the script of such a call writes to stderr, which ends by SIGSEGV as its worker did."""
    backend, _, op = kernel_id.partition(".")
    bare = capsule_of(op, kernel_id)
    failure = replace(bare.failed, exit_signal=int(signal.SIGSEGV))
    arguments = tuple(Argument(name, spec, n, 0) for n, (name, spec) in enumerate(given))
    segments = tuple(Segment(spec.span_bytes, 0) for _, spec in given)
    capsule = replace(bare, arguments=arguments, segments=segments, failures=(failure,), params=params)
    path = folder / "report.py"
    path.write_text(script.write(capsule, [], [], None, 0))
    env = ensure(resolve(backend), store=STORE)
    done = subprocess.run(
        [env.python, path], env=environ_of(env), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "the process ended by SIGSEGV" in path.read_text()
    return done.stderr


@pytest.mark.parametrize(("op", "kernel"), [("rope", "torch.rope"), ("silu", "mlx.silu"), ("silu", "alpha.silu")])
def test_a_kernel_that_is_no_public_function_says_what_to_do(op: str, kernel: str) -> None:
    with pytest.raises(InvalidArgument, match=r"no script can be written for .*; send the capsule: lz capsule share"):
        script.write(capsule_of(op, kernel), [], [], None, 0)


def test_words_of_somebody_elses_capsule_are_no_code(tmp_path: Path) -> None:
    bad = 'x"""\nraise SystemExit(3)\r\nraise SystemExit(4)\n"""\x00'
    capsule = replace(capsule_of("silu", "torch.silu"), facts={"versions": {bad: bad}, "python": bad, "system": bad})
    text = script.write(capsule, [], [bad], None, 0)
    assert "\x00" not in text
    assert [line for line in text.splitlines() if "SystemExit" in line and not line.startswith("#")] == []
