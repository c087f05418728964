"""Bundles of plans on a GPU, over the GPU of threads: their calls, by the kernels that they had, in a graph of the
process that opens them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.c.conftest import Built, built, libzmq, run
from tests.process.gpu_site import broker, close, connected, new_site, randn, silu, soft
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.test_cli import lz as lz_command
from tests.process.test_gpu_lifted import Lifting, kernels
from tests.process.test_gpu_plans import captured, graphs, lifting
from tests.soft_gpu import soft_cupy
from tests.soft_gpu.soft_graphs import SoftGraphs

import layerzero as lz
from layerzero.client.bundles import form
from layerzero.ipc.errors import InvalidArgument

__all__ = ["broker", "built", "connected", "graphs", "kernels", "lifting", "new_site", "soft"]

W = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)


def model(weight: Any) -> Callable[[Any], Any]:
    """Views of what steps make and of what it is given, a constant that is read in two ways, two results."""

    def block(x: Any) -> Any:
        h = lz.matmul(lz.silu(x[1:]), weight)
        return {"h": lz.silu(h.T), "rest": [lz.matmul(h[1:], weight.T), 3]}

    return block


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    h = silu(x[1:]) @ W
    return silu(h.T), h[1:] @ W.T


def agree(result: Any, x: np.ndarray) -> None:
    for found, wanted in zip((result["h"], result["rest"][0]), expected(x), strict=True):
        close(found, wanted)
    assert result["rest"][1] == 3


def kernels_of(bundle: lz.Bundle, x: Any) -> list[str]:
    """Of its calls, once they are in a graph: what a worker has enqueued says not by which one."""

    def found() -> list[str]:
        bundle(x)
        return [step.kernel_id for step in bundle.timings()]

    return wait_until(lambda: told if all(told := found()) else None)


def write(path: Path, **options: Any) -> None:
    """The bundle of the block, written by a plan that has settled."""
    plan, (x, _) = lz.plan(model(soft_cupy.asarray(W)), **options), randn(5, 6)
    while plan.phase != "FROZEN":
        plan(x)
    plan(x)
    lz.write_bundle(plan, path)


@pytest.fixture
def written(connected: Site, tmp_path: Path) -> Path:
    path = tmp_path / "block.lzb"
    write(path)
    return path


def test_a_bundle_gives_what_its_plan_gave(connected: Site, written: Path) -> None:
    """By the same kernels, without the function, its weights or its graph; constants are in the file."""
    lz.disconnect()
    connected.connect()
    bundle = lz.load_bundle(written)
    assert form.read(written).content.is_on_gpu
    assert form.read(written).content.constant_bytes == W.nbytes
    assert [*bundle.inputs, *bundle.outputs] == ["x", "h", "rest.0"]
    assert bundle.timings() == []
    for seed in range(3):
        values = np.random.default_rng(seed).standard_normal((5, 6), dtype=np.float32)
        agree(bundle(soft_cupy.asarray(values)), values)
        agree(bundle(x=soft_cupy.asarray(values)), values)
    assert kernels_of(bundle, soft_cupy.asarray(values)) == ["one.silu", "one.matmul", "one.silu", "one.matmul"]
    for given, why in (
        (np.ones((5, 6), np.float32), "pass x as an array of .* on a GPU"),
        (randn(4, 6)[0], r"x is float32\[4, 6\]; this bundle was made for float32\[5, 6\]"),
        (randn(6, 5)[0].T, "pass x in row-major order"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            bundle(given)


def test_its_calls_are_lifted_and_captured_where_it_is_opened(
    lifting: Lifting, graphs: SoftGraphs, tmp_path: Path
) -> None:
    """No machine code is in the file; there is one graph of this process's, as of a plan."""
    path = tmp_path / "block.lzb"
    plan, (x, values) = lz.plan(lambda x: lz.silu(lz.silu(x))), randn(40)
    captured(plan, x)
    lz.write_bundle(plan, path)
    bundle, made = lz.load_bundle(path), len(graphs.made)

    def is_there() -> bool:
        close(bundle(x), silu(silu(values)))
        return len(graphs.made) > made

    wait_until(is_there)
    for seed in range(10):
        values = np.random.default_rng(seed).standard_normal(40, dtype=np.float32)
        close(bundle(soft_cupy.asarray(values)), silu(silu(values)))
    assert {step.how for step in bundle.timings()} == {"lifted"}


def test_a_kernel_whose_worker_dies_costs_no_result(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """The kernel of the file is preferred: another one, which ranks before it, does not serve; when it fails, that one
    does."""
    site, path = new_site().start(), tmp_path / "block.lzb"
    site.connect()
    with lz.prefer("two"):
        write(path)
    assert {step.backend for step in form.read(path).content.steps} == {"two"}
    bundle, (x, values) = lz.load_bundle(path), randn(5, 6)
    agree(bundle(x), values)
    assert {kernel.partition(".")[0] for kernel in kernels_of(bundle, x)} == {"two"}
    pid = site.backend("two")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_ended(pid)
    for _ in range(3):
        agree(bundle(x), values)


def test_what_no_bundle_can_be_is_named(connected: Site, tmp_path: Path) -> None:
    """A step of the library's own, and a call that writes to its caller's memory."""
    weight, (x, _) = soft_cupy.asarray(W), randn(5, 6)
    plan = lz.plan(lambda x: lz.silu(lz.matmul(x, weight) * 2.0))
    while plan.phase != "FROZEN":
        plan(x)
    with pytest.raises(InvalidArgument, match="do it with an lz op, or outside of the plan: step 1, "):
        lz.write_bundle(plan, tmp_path / "no.lzb")
    assert not list(tmp_path.iterdir())


def test_the_commands_say_that_it_is_on_a_gpu(connected: Site, written: Path) -> None:
    """To run it there takes arrays that no file has."""
    told = lz_command(connected, "bundle", "show", str(written))
    assert told.stdout.startswith("block, by layerzero ")
    assert told.stdout.splitlines()[0].endswith(", on a GPU")
    told = lz_command(connected, "bundle", "run", str(written))
    assert told.returncode != 0
    assert "run it by lz.load_bundle, with arrays on a GPU" in " ".join(told.stderr.split())


def test_the_c_library_refuses_it(connected: Site, written: Path, built: Built) -> None:
    """It says where that runs."""
    said = run(built["bundles"], "open", connected.folder, libzmq(), written).stdout.decode()
    assert said.startswith("INVALID_ARGUMENT|Run it from Python: its calls are on a GPU")
