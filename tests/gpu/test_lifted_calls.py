"""Lifted calls of a program, on a real GPU and through a real broker: torch's kernels from another process, launched by
this one. tests/gpu/test_lifting.py has what workers lift."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.backends.torch_toy import TRAP, TRAPPED
from tests.gpu.gpu_site import gpu_site
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.process.test_cli import DONE
from tests.process.test_cli import lz as lz_command

import layerzero as lz
from layerzero.client.gpu.lifting import loaded

pytest.importorskip("torch")
from tests.gpu.test_calls import F, randn, torch

WARM = 200  # calls, between two looks
# Each test has shapes of its own: what an earlier one has lifted needs no worker.


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def new_site(store: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(**settings: Any) -> Site:
        made.append(gpu_site(store, "one", isolation="lifted", **settings))
        return made[-1]

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def lift(call: Callable[[], Any]) -> Any:
    """Call until this process launches the kernel itself. Its last result."""

    def is_lifted() -> bool:
        for _ in range(WARM):
            call()
            if lz.last_report().path == "lifted":
                return True
        torch.cuda.synchronize()
        return False

    wait_until(is_lifted)
    return call()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_repeated_call_is_launched_by_this_process(new_site: Callable[..., Site], dtype: str) -> None:
    site = new_site().start()
    site.connect()
    q, k, v = (randn(2, 8, 256, 64, dtype=getattr(torch, dtype)) for _ in "qkv")
    x, w = randn(64, 1024, dtype=getattr(torch, dtype)), randn(1024, 512, dtype=getattr(torch, dtype))
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "attention": (
            lambda: lz.attention(q, k, v, is_causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "silu": (lambda: lz.silu(x), lambda: F.silu(x)),
        "matmul": (lambda: lz.matmul(x, w), lambda: x @ w),
    }
    for name, (ours, torchs) in calls.items():
        result = lift(ours)
        assert torch.allclose(result.float(), torchs().float(), rtol=2e-2, atol=2e-2), name
        report = lz.last_report()
        assert (report.path, report.backend, report.kernel_id) == ("lifted", "one", f"one.{name}")


def test_the_worker_may_die(new_site: Callable[..., Site]) -> None:
    site = new_site().start()
    site.connect()
    x = randn(65, 1024)
    lift(lambda: lz.silu(x))
    os.kill(site.backend("one")["pid"], signal.SIGKILL)
    for _ in range(WARM):
        assert torch.equal(lz.silu(x), F.silu(x))
        assert lz.last_report().path == "lifted"


def test_a_graph_of_the_application_holds_it_as_a_node_of_its_own(new_site: Callable[..., Site]) -> None:
    site = new_site().start()
    site.connect()
    x = randn(66, 1024)
    lift(lambda: lz.silu(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lz.silu(x)
    os.kill(site.backend("one")["pid"], signal.SIGKILL)
    for seed in range(3):
        x.copy_(torch.full_like(x, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, F.silu(x))


def test_the_next_process_needs_no_worker(new_site: Callable[..., Site], store: Path) -> None:
    x = randn(67, 1024)
    first = gpu_site(store, "one", isolation="lifted")
    try:
        first.start().connect()
        lift(lambda: lz.silu(x))
        lz.disconnect()
    finally:
        first.stop()
    second = new_site().start()
    second.connect()
    assert torch.equal(lz.silu(x), F.silu(x))
    assert lz.last_report().path == "lifted"
    assert second.backend("one")["pid"] is None, "no worker was started"


def test_views_at_odd_addresses_have_a_lifted_call_of_their_own(new_site: Callable[..., Site]) -> None:
    site = new_site().start()
    site.connect()
    whole = randn(68 * 1024 + 64)
    for offset in (0, 1, 2, 4, 64):
        x = whole[offset : offset + 68 * 1024]
        assert torch.equal(lift(lambda x=x: lz.silu(x)), F.silu(x)), offset


def test_policy_takes_leave_back_and_gives_it(new_site: Callable[..., Site], tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("backend_isolation: lifted\n")
    site = new_site(policy=policy)
    del site.environ["LAYERZERO_BACKEND_ISOLATION"]
    site.start()
    site.connect()
    x = randn(69, 1024)
    lift(lambda: lz.silu(x))
    policy.write_text("backend_isolation: subprocess\n")

    def path() -> Any:
        assert torch.equal(lz.silu(x), F.silu(x))
        return lz.last_report().path

    wait_until(lambda: path() != "lifted")
    policy.write_text("backend_isolation: lifted\n")
    wait_until(lambda: path() == "lifted")


def test_two_streams_at_once(new_site: Callable[..., Site]) -> None:
    site = new_site().start()
    site.connect()
    x, w = randn(256, 1024, dtype=torch.float16), randn(1024, 1024, dtype=torch.float16)
    wanted = x @ w
    lift(lambda: lz.matmul(x, w))
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(lz.matmul(x, w))
    torch.cuda.synchronize()
    assert all(torch.equal(result, wanted) for result in results)
    assert lz.synchronize(PATIENCE_S) is None


def test_jax_arrays_are_lifted_on_a_stream_of_ours(new_site: Callable[..., Site]) -> None:
    """And kept until the kernel is through: JAX gives their memory to the next array as soon as nobody has them."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    site = new_site().start()
    site.connect()

    def new(seed: int) -> Any:
        return jax.random.normal(jax.random.key(seed), (71, 4096))

    x = new(0)
    assert jax.numpy.allclose(lift(lambda: lz.silu(x)), jax.nn.silu(x), rtol=1e-4, atol=1e-5)
    results = [lz.silu(new(seed)) for seed in range(WARM)]
    assert lz.last_report().path == "lifted"
    for seed, result in enumerate(results):
        assert jax.numpy.allclose(result, jax.nn.silu(new(seed)), rtol=1e-4, atol=1e-5), seed


CLIENT = f"""
import json, sys, time, torch
lz.connect(runtime_dir=sys.argv[1])
x = torch.zeros({TRAPPED}, device="cuda")
said, end_s = {{}}, time.monotonic() + {PATIENCE_S}
while time.monotonic() < end_s and said.get("path") != "lifted" and "FAULTED" not in str(said.get("notes")):
    for _ in range({WARM}):
        lz.gelu(x)
    torch.cuda.synchronize()
    report = lz.last_report()
    said = {{"path": report.path, "notes": report.notes, "pid": report.worker_pid}}
x.fill_({10 * TRAP})
try:
    lz.gelu(x)
    lz.synchronize({PATIENCE_S})
except Exception as exc:
    said["error"] = type(exc).__name__
try:
    said["sum"] = float(torch.ones(8, device="cuda").sum())
except Exception as exc:
    said["lost"] = str(exc)
print(json.dumps(said, default=str), flush=True)
"""


def test_a_fault_of_a_lifted_kernel_costs_one_process_its_gpu_and_no_other(new_site: Callable[..., Site]) -> None:
    """The next ones are isolated again: there the same call ends its worker, and the client goes on."""
    site = new_site().start()
    said = []
    for _ in range(3):
        with site.python(CLIENT) as client:
            out, _ = client.communicate(timeout=4 * PATIENCE_S)
        said.append(json.loads(out.splitlines()[-1]))
    first, *others = said
    assert first["path"] == "lifted", said
    assert "lost" in first, said
    for other in others:
        assert other["path"] != "lifted", said
        assert "FAULTED" in str(other["notes"]), said
        assert (other.get("sum"), "lost" in other) == (8.0, False), said
        assert "error" in other, said


def test_an_export_serves_where_the_library_is_not_installed(
    new_site: Callable[..., Site], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A GEMM and attention, signed; of the other broker's backends none can be started."""
    pytest.importorskip("cryptography")
    x, w = randn(70, 1024, dtype=torch.float16), randn(1024, 512, dtype=torch.float16)
    q, k, v = (randn(1, 4, 70, 64, dtype=torch.bfloat16) for _ in "qkv")
    calls = {"one.matmul": lambda: lz.matmul(x, w), "one.attention": lambda: lz.attention(q, k, v, is_causal=True)}
    site = new_site().start()
    site.connect()
    wanted = {name: lift(call) for name, call in calls.items()}
    torch.cuda.synchronize()
    lz.disconnect()
    loaded.forget()
    folder, key = tmp_path / "exported", tmp_path / "ci.key"
    assert lz_command(site, "lift", "key", str(key)).returncode == DONE
    done = lz_command(site, "lift", "export", str(folder), "--key", str(key))
    assert done.returncode == DONE, done.stderr
    other = gpu_site(tmp_path_factory.mktemp("other-store"), isolation="lifted")
    try:
        for words in (("trust", f"{key}.pub", "--name", "ci"), ("import", str(folder))):
            done = lz_command(other, "lift", *words)
            assert done.returncode == DONE, done.stderr
        other.connect()
        for name, call in calls.items():
            assert torch.equal(call(), wanted[name]), name
            report = lz.last_report()
            assert (report.path, report.kernel_id) == ("lifted", name)
        assert other.backend("one")["unavailable"]["code"] == "LIFTED_ONLY"
        with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
            lz.matmul(x[:69], w)
    finally:
        lz.disconnect()
        other.stop()
