"""What tests of calls on the GPU of threads share: a site whose backends compute there, and a client that has it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tests.process.harness import PATIENCE_S, ROOT, Site, wait_until
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_gpu import driver
from tests.soft_gpu.soft_numpy import GATE

import layerzero as lz
from layerzero.client.gpu import memory
from layerzero.ipc.cuda import driver as cuda

SOFT = ROOT / "tests" / "soft_gpu"
OPS = ("silu", "matmul", "gelu", "layer_norm", "append_kv")


def gpu_site(
    store: Path,
    *names: str,
    isolation: str = "subprocess",
    slow_silu: bool = False,
    needs_jit: bool = False,
    is_repeatable: bool = True,
    provider: str = "soft_provider.py",
    variables: Mapping[str, str] = MappingProxyType({}),
    **settings: object,
) -> Site:
    """A site, not yet started, whose backends are `names`, first choice first, on the GPU of threads. `slow_silu`: each
    has a second silu, which is slow and of a higher priority. `needs_jit`: their kernels are compiled, for dtypes.
    `is_repeatable`: they say that they are. `provider`: a file of tests/soft_gpu; `variables`: more of its workers'."""
    site = Site(store, **{"restart_budget": 1000, "backoff_s": 0.01, "backoff_max_s": 0.01, **settings})
    site.manifests.mkdir()
    for rank, name in enumerate(names):
        (site.manifests / f"{name}.py").write_text((SOFT / provider).read_text())
        kernel: dict[str, Any] = {
            "source": "test",
            "priority": 70 - rank,
            "dtypes": ["float32"],
            "index_dtypes": ["int64"],
            "deterministic": is_repeatable,
            "supports_empty": True,
        }
        if needs_jit:
            kernel |= {"needs_jit": True, "compiled_for": ["dtypes"]}
        ops = {op: [{**kernel, "kernel_id": f"{name}.{op}", "is_cuda_graph_safe": op != "layer_norm"}] for op in OPS}
        if provider != "soft_lifted.py":
            attention = {
                "min_ndim": 4,
                "max_ndim": 4,
                "requires_layouts": ["BHSD", "BSHD"],
                "causal_alignments": ["top_left"],
                "masked_rows": "zero",
                "lse_base": "e",
                "supports_empty": False,
                "is_cuda_graph_safe": True,
            }
            ops["attention_forward"] = [{**kernel, **attention, "kernel_id": f"{name}.attention_forward"}]
        if slow_silu:
            ops["silu"].append({**kernel, "kernel_id": f"{name}.silu.slow", "priority": 80 - rank})
        head = {"schema_version": "1.0", "backend": name, "backend_version": "1", "platform": "cuda"}
        (site.manifests / f"{name}.json").write_text(json.dumps({**head, "ops": ops}))
        manifest = f'summary = "test"\nprovider = "{name}.py"\ndescriptor = "{name}.json"\ninterpreter = "host"\n'
        # A driver opens the memory of others from the kernel; the one of the tests opens their descriptors.
        environ = {"LZ_TOY_NAME": name, "LZ_SOFT_ROOT": str(ROOT), "LAYERZERO_WORKER_CONFINED": "0", **variables}
        env = "".join(f"{key} = {json.dumps(value)}\n" for key, value in environ.items())
        (site.manifests / f"{name}.toml").write_text(f"{manifest}[env]\n{env}")
    site.environ["LAYERZERO_MANIFEST_DIRS"] = str(site.manifests)
    site.environ["LAYERZERO_BACKEND_ISOLATION"] = isolation
    site.environ["PYTHONPATH"] = str(SOFT / "broker")
    return site


@pytest.fixture(autouse=True, scope="module")
def soft() -> Iterator[None]:
    """This process has the GPU, and CuPy for it; to be imported by the modules that use it."""
    cupy, real = sys.modules.get("cupy"), cuda.Driver
    soft_cupy.install()
    yield
    del sys.modules["cupy"]
    if cupy is not None:
        sys.modules["cupy"] = cupy
    cuda.Driver = real  # type: ignore[misc]
    for cache in (cuda.load, memory.uuid_of, memory.memory_of):
        cache.cache_clear()
    driver.reset()
    soft_cupy.reset()


@pytest.fixture(scope="module")
def broker(soft: None, store: Path) -> Iterator[Site]:
    site = gpu_site(store, "one", "two")
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def connected(broker: Site) -> Iterator[Site]:
    session = broker.connect()

    def serves(name: str) -> bool:
        try:  # the broker may not have seen yet that the last test killed a worker
            session.ask("reset", backend=name)
            lz.silu(soft_cupy.empty(1), backend=name)
            lz.synchronize(PATIENCE_S)
        except lz.LayerZeroError:
            return False
        return bool(broker.backend(name)["state"] == "ready")

    for name in ("one", "two"):  # one that becomes ready later would take leases of the other back
        wait_until(lambda: serves(name))  # noqa: B023
    yield broker
    lz.disconnect()


@pytest.fixture
def new_site(store: Path, soft: None) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(*names: str, **settings: Any) -> Site:
        made.append(gpu_site(store, *(names or ("one", "two")), **settings))
        return made[-1]

    yield make
    lz.disconnect()
    for site in made:
        site.stop()


def randn(*shape: int) -> tuple[Any, np.ndarray]:
    values = np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)
    return soft_cupy.asarray(values), values


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return wide / (1 + np.exp(-wide))


def gelu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    return 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))


def attention_forward(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weights = np.exp(q.astype(np.float64) @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5)
    return weights @ v / weights.sum(-1, keepdims=True), np.log(weights.sum(-1))


def close(result: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(result.get(), expected, rtol=1e-4, atol=1e-5)


def slow(x: Any, **options: Any) -> Any:
    return lz.gelu(x, approximate="tanh", **options)


@contextlib.contextmanager
def held(site: Site) -> Iterator[None]:
    """What the workers' streams are slow in ends after the block."""
    gate = site.manifests / GATE
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def report() -> lz.SelectionReport:
    found = lz.last_report()
    assert found is not None
    return found


def finish() -> None:
    """Wait for the current stream, but not for ever."""
    wait_until(lambda: driver.is_stream_idle(soft_cupy.current().ptr))
